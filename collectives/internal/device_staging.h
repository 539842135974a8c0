#ifndef WEFT_COLLECTIVES_INTERNAL_DEVICE_STAGING_H_
#define WEFT_COLLECTIVES_INTERNAL_DEVICE_STAGING_H_

// DeviceStaging: tensors on GPUs for a group that works on host memory. When an operation is issued,
// on the caller's thread, what the caller has queued is marked; in its turn the bytes come to host
// memory behind that mark, and go back. An operation has ended when they are there.
//
// What is neither contiguous nor dense goes through a contiguous copy on its device, made on the
// caller's stream.
//
// Threads: prepare(), interrupt() and close() from anywhere; the rest by the thread of the operation.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "weft/collectives/internal/operation.h"
#include "weft/common/condition.h"
#include "weft/common/log.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/spi/device_copies.h"

namespace weft::internal {

class DeviceStaging {
 public:
  DeviceStaging(std::shared_ptr<Runtime> runtime, Logger log);
  ~DeviceStaging();

  // Makes the operation ready to be staged here if its tensors are on a GPU. REQUIRES:
  // check_operation(). Error, kind unavailable: there is no weft::cuda.
  Status prepare(Operation* operation);

  // Between host memory and GPUs; waits until it is done. Throws weft::Error: kind deadline, or that
  // of interrupt().
  void copy(const Operation& operation, const Turn& turn, std::vector<at::Tensor> from,
            std::vector<at::Tensor> to);
  // What was written to a copy on the device goes to where the caller sees it. Throws as copy().
  void finish(const Operation& operation, const Turn& turn);

  // The group has failed: nothing waits any more.
  void interrupt(const Status& why);
  void close();
  // Bytes that were copied, in both directions. Any thread.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  StatusOr<std::shared_ptr<DeviceCopies>> copies();
  void wait(const std::shared_ptr<DeviceCopies>& copies, const Turn& turn,
            std::vector<at::Tensor> from, std::vector<at::Tensor> to, DeviceCopies::Mark after);

  const std::shared_ptr<Runtime> runtime_;
  const Logger log_;
  std::atomic<uint64_t> bytes_{0};
  // One wait's state, kept by its copy as well: the wait may end first.
  struct Waiting;

  Mutex mutex_;
  std::shared_ptr<DeviceCopies> copies_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  Status interrupted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DEVICE_STAGING_H_
