#ifndef WEFT_RPC_INTERNAL_DEVICE_CUDA_COPIER_H_
#define WEFT_RPC_INTERNAL_DEVICE_CUDA_COPIER_H_

// Copier: one thread that moves bytes between devices and host memory, through pinned slots. A
// tensor is cut into pieces of a slot; the copy of one piece runs while the one before is carried
// on, and pieces of several messages take turns.
//
//   to the host:   mark reached -> device to slot, queued -> its event -> slot to memory; after the
//                  last piece, done
//   to a device:   memory to slot -> slot to device, queued; after the last piece, done -> its
//                  event -> the slot is free
//
// Copies have streams of their own, two for each device, with nothing else on them, and a copy
// takes a slot only when it can run at once: a kernel that waits for another message, or for a
// collective, can hold up its own message and no other. The thread asks for events and never
// waits for one; while there is nothing to ask for it sleeps.
//
// An error of CUDA about a copy does not say that the copy has ended. Its transfer fails, and its
// slot is retired; when none is left every transfer fails.

#include <algorithm>
#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "c10/cuda/CUDAEvent.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/internal/device/cuda/slots.h"
#include "weft/rpc/internal/device/cuda/streams.h"

namespace weft::internal {

class Copier {
 public:
  using Copied = DeviceBackend::Copied;

  explicit Copier(std::shared_ptr<Runtime> runtime);
  ~Copier();

  // Streams of `devices` and, the first time, the slots. Blocks.
  Status prepare(const std::vector<c10::Device>& devices);
  void to_host(std::vector<at::Tensor> sources, std::shared_ptr<const StreamMark> after,
               HostMemory memory, Copied done);
  void to_devices(std::vector<at::Tensor> hosts, std::vector<c10::Device> targets,
                  std::shared_ptr<CudaWork> work, Copied done);
  // Into tensors that are there; `done` when the bytes are.
  void copy(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
            std::shared_ptr<const StreamMark> after, Copied done);
  void shutdown(const Status& why);

 private:
  struct Transfer;
  struct Piece;
  using TransferRef = std::shared_ptr<Transfer>;
  struct Lanes {
    c10::cuda::CUDAStream out;
    c10::cuda::CUDAStream in;
  };

  void submit(TransferRef transfer);
  void run();
  // Half of the slots: otherwise one direction could wait for the other for ever.
  size_t slots_of_one_direction() const { return std::max<size_t>(1, slots_->usable() / 2); }
  // Each returns whether something went on.
  bool take_new();
  bool start_some();
  bool end_some();
  // Queues the next piece. Throws c10::Error.
  void start_piece(const TransferRef& transfer, char* slot);
  void end_piece(Piece* piece, Status status);
  void begin(Transfer* transfer);
  void finish(Transfer* transfer, Status status);
  Lanes lanes(c10::Device device);
  Status why_now();

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Parker> parker_;

  Mutex mutex_;
  std::deque<TransferRef> fresh_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Status why_ ABSL_GUARDED_BY(mutex_);
  std::map<int, Lanes> lanes_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<SlotPool> slots_;  // made before the first transfer, then the thread's

  // The thread's own.
  std::list<TransferRef> open_;  // with pieces to start, in turn
  std::list<Piece> under_way_;   // in order of their start
  size_t taken_[2] = {0, 0};     // slots: to devices, to the host

  std::atomic<bool> started_{false};
  Mutex start_mutex_;
  std::unique_ptr<Thread> thread_ ABSL_GUARDED_BY(start_mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_CUDA_COPIER_H_
