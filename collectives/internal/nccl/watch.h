#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_WATCH_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_WATCH_H_

// Watch: the thread that follows the operations of one group on the GPU. It sees them end, and fails
// the group when one is over its deadline, NCCL reports an error, or another rank has failed; then it
// aborts what the GPU does (DEVICE-3).
//
// Threads: all methods from any; close() last.

#include <c10/cuda/CUDAEvent.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/nccl/comm.h"
#include "weft/common/condition.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::internal {

// An operation that was queued.
struct Followed {
  std::string_view name;  // for errors; it lives as long as the program
  uint64_t sequence = 0;
  absl::Time deadline;
  std::shared_ptr<c10::cuda::CUDAEvent> end;
  std::vector<at::Tensor> kept;  // DEVICE-2
  std::optional<Promise<void>> ended;
};

class Watch {
 public:
  // `comm` outlives it. `where`: what errors say after the name of an operation.
  Watch(std::shared_ptr<Runtime> runtime, Comm* comm, int device, std::string where,
        DeviceHooks hooks);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Operations end in the order of adding.
  void add(Followed operation);
  // To record the end of the next operation: one that no operation uses any more, or a new one.
  std::shared_ptr<c10::cuda::CUDAEvent> take_event();
  void abort(const Status& cause);
  // Waits until all have ended.
  void drain();
  void close();

 private:
  void run();
  // Takes those that have ended off the list. Error: the GPU reports one.
  Status take_ended();
  // What fails the group now.
  Status trouble();
  void end_all(const Status& cause);
  absl::Duration first_nap_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string text_of(const Followed& one) const;

  const std::shared_ptr<Runtime> runtime_;
  Comm* const comm_;
  const int device_;
  const std::string where_;
  const DeviceHooks hooks_;
  absl::Time looked_ = absl::InfinitePast();  // of the thread
  Mutex mutex_;
  Condition changed_;
  std::deque<Followed> operations_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<c10::cuda::CUDAEvent>> spare_ ABSL_GUARDED_BY(mutex_);
  bool asleep_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  Status aborted_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Thread> thread_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_WATCH_H_
