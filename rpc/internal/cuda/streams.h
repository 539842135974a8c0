#ifndef WEFT_RPC_INTERNAL_CUDA_STREAMS_H_
#define WEFT_RPC_INTERNAL_CUDA_STREAMS_H_

// What messages have to do with streams: marks, the streams of a request, and guards of values. All
// of it queues and records; nothing here waits (STREAM-1). Any thread.

#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Storage.h"
#include "c10/cuda/CUDAEvent.h"
#include "c10/cuda/CUDAStream.h"
#include "weft/common/log.h"
#include "weft/common/mutex.h"
#include "weft/rpc/internal/device_backend.h"

namespace weft::internal {

// Runs `body`, which may throw what LibTorch and CUDA throw, and says what it was doing then.
Status guarded(std::string_view doing, const std::function<void()>& body);

// A point in the queues of some devices.
class StreamMark {
 public:
  // What is queued now on the calling thread's current streams. Throws c10::Error.
  explicit StreamMark(const std::vector<c10::Device>& devices);
  // Has everything before the mark been done? Throws when it failed.
  bool reached() const;
  // What the calling thread queues on its current streams from now on comes after the mark.
  void block_current_streams();
  const std::vector<c10::Device>& devices() const { return devices_; }

 private:
  const std::vector<c10::Device> devices_;
  std::vector<c10::cuda::CUDAEvent> events_;  // by device
};

class CudaWork : public DeviceWork {
 public:
  CudaWork(const std::vector<c10::Device>& devices, Logger log);

  std::unique_ptr<ScopeEntry> enter() const override;
  void before_use() override;
  std::shared_ptr<ValueGuard> derive() override;

  // `tensors` are there when what is queued on `copies`, the streams that filled them, is done: our
  // streams wait for that, and so does whoever takes the value. Throws c10::Error.
  void arrived(const std::vector<at::Tensor>& tensors,
               const std::vector<c10::cuda::CUDAStream>& copies);

 private:
  std::vector<c10::cuda::CUDAStream> streams_;  // one for each device
  const Logger log_;
  Mutex mutex_;
  std::vector<c10::cuda::CUDAEvent> events_ ABSL_GUARDED_BY(mutex_);
  // Weak: whoever has the value decides how long its memory lives.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_CUDA_STREAMS_H_
