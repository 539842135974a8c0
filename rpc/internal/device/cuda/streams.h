#ifndef WEFT_RPC_INTERNAL_DEVICE_CUDA_STREAMS_H_
#define WEFT_RPC_INTERNAL_DEVICE_CUDA_STREAMS_H_

// What messages have to do with streams: marks, the streams of a request, and guards of values. All
// of it queues and records; nothing here waits (STREAM-1). Any thread.

#include <deque>
#include <functional>
#include <map>
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
#include "weft/rpc/internal/device/device_backend.h"

namespace weft::internal {

// Runs `body`, which may throw what LibTorch and CUDA throw, and says what it was doing then.
Status guarded(std::string_view doing, const std::function<void()>& body);

// While it lives, the calling thread may do what a graph capture of another thread forbids by default
// (cudaStreamCaptureModeGlobal): allocate, and ask for events and streams. It captures nothing itself.
class CaptureElsewhere {
 public:
  CaptureElsewhere();
  ~CaptureElsewhere() { exchange(); }
  CaptureElsewhere(const CaptureElsewhere&) = delete;
  CaptureElsewhere& operator=(const CaptureElsewhere&) = delete;

 private:
  void exchange();
  int mode_;  // a cudaStreamCaptureMode: the thread's, or while this lives, the one it had
};

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

// Streams for handlers, each for one at a time. LibTorch's pool would give every 32nd the same one,
// where a kernel that waits for another call can hold up that very call.
//
// A stream that was given back is taken again when the kernels on it have ended. None is ever
// destroyed: LibTorch's allocator uses the streams of a tensor when that is freed, and tensors may
// outlive their worker. Any thread.
class StreamPool {
 public:
  // Most streams of one device. With so many, a stream that still has kernels is reused.
  static constexpr size_t kMost = 256;

  // Throws c10::Error.
  c10::cuda::CUDAStream take(c10::DeviceIndex device) ABSL_LOCKS_EXCLUDED(mutex_);
  void give_back(const c10::cuda::CUDAStream& stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes some, so that the first handlers need not. Throws c10::Error.
  void prepare(c10::DeviceIndex device) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct OfDevice {
    std::deque<c10::cuda::CUDAStream> free;  // that which was given back first is the first
    size_t made = 0;
  };
  static c10::cuda::CUDAStream make(c10::DeviceIndex device);

  Mutex mutex_;
  std::map<c10::DeviceIndex, OfDevice> devices_ ABSL_GUARDED_BY(mutex_);
};

class CudaWork : public DeviceWork {
 public:
  // Throws c10::Error.
  CudaWork(const std::vector<c10::Device>& devices, std::shared_ptr<StreamPool> pool, Logger log);
  ~CudaWork() override;

  std::unique_ptr<ScopeEntry> enter() const override;
  void before_use() override;
  std::shared_ptr<ValueGuard> derive() override;

  // `tensors` are there when what is queued on `copies`, the streams that filled them, is done: our
  // streams wait for that, and so does a thread that takes the value. Throws c10::Error.
  void arrived(const std::vector<at::Tensor>& tensors,
               const std::vector<c10::cuda::CUDAStream>& copies);

 private:
  const std::shared_ptr<StreamPool> pool_;
  std::vector<c10::cuda::CUDAStream> streams_;  // one for each device
  const Logger log_;
  Mutex mutex_;
  std::vector<c10::cuda::CUDAEvent> events_ ABSL_GUARDED_BY(mutex_);
  // Weak: the holder of the value decides how long its memory lives.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_CUDA_STREAMS_H_
