#include "weft/rpc/internal/device/cuda/streams.h"

#include <algorithm>

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "c10/cuda/CUDACachingAllocator.h"
#include "c10/cuda/CUDAException.h"
#include "c10/cuda/CUDAGuard.h"

namespace weft::internal {
namespace {

using c10::cuda::CUDAStream;

class StreamsEntry : public ScopeEntry {
 public:
  explicit StreamsEntry(const std::vector<CUDAStream>& streams) {
    for (const CUDAStream& stream : streams) {
      previous_.push_back(c10::cuda::getCurrentCUDAStream(stream.device_index()));
      c10::cuda::setCurrentCUDAStream(stream);
    }
  }
  ~StreamsEntry() override {
    for (const CUDAStream& stream : previous_) c10::cuda::setCurrentCUDAStream(stream);
  }

 private:
  std::vector<CUDAStream> previous_;
};

// Whether all that was queued there has ended. After an error of the device nothing is known.
bool is_idle(const CUDAStream& stream) {
  const CaptureElsewhere allowed;
  const c10::cuda::CUDAGuard guard(stream.device());
  const cudaError_t state = cudaStreamQuery(stream.stream());
  if (state != cudaSuccess && state != cudaErrorNotReady) (void)cudaGetLastError();
  return state == cudaSuccess;
}

// Guard of a value that a continuation made from another one: covers all that its thread queued.
class DerivedGuard : public ValueGuard {
 public:
  DerivedGuard(const std::vector<c10::Device>& devices, Logger log)
      : mark_(devices), log_(std::move(log)) {}
  void before_use() override {
    const Status queued = guarded("waiting for streams", [this] {
      MutexLock lock(&mutex_);
      mark_.block_current_streams();
    });
    if (!queued.ok()) WEFT_LOG(log_, kError) << queued;
  }
  std::shared_ptr<ValueGuard> derive() override {
    return std::make_shared<DerivedGuard>(mark_.devices(), log_);
  }

 private:
  Mutex mutex_;
  StreamMark mark_;
  const Logger log_;
};

}  // namespace

Status guarded(std::string_view doing, const std::function<void()>& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const c10::Error& e) {
    return make_error(ErrorKind::kInternal,
                      absl::StrCat("CUDA, ", std::string(doing), ": ", e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return make_error(ErrorKind::kInternal,
                      absl::StrCat("CUDA, ", std::string(doing), ": ", e.what()));
  }
}

StreamMark::StreamMark(const std::vector<c10::Device>& devices)
    : devices_(devices), events_(devices.size()) {
  for (size_t i = 0; i < devices_.size(); ++i) {
    events_[i].record(c10::cuda::getCurrentCUDAStream(devices_[i].index()));
  }
}

bool StreamMark::reached() const {
  return std::all_of(events_.begin(), events_.end(),
                     [](const c10::cuda::CUDAEvent& event) { return event.query(); });
}

void StreamMark::block_current_streams() {
  for (size_t i = 0; i < devices_.size(); ++i) {
    events_[i].block(c10::cuda::getCurrentCUDAStream(devices_[i].index()));
  }
}

CaptureElsewhere::CaptureElsewhere() : mode_(cudaStreamCaptureModeRelaxed) { exchange(); }

void CaptureElsewhere::exchange() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&mode));
  mode_ = mode;
}

CUDAStream StreamPool::make(c10::DeviceIndex device) {
  const CaptureElsewhere allowed;
  const c10::cuda::CUDAGuard guard(device);
  cudaStream_t made = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  return c10::cuda::getStreamFromExternal(made, device);
}

CUDAStream StreamPool::take(c10::DeviceIndex device) {
  // Those that were given back long ago are idle, if any is.
  constexpr size_t kMostAsked = 4;
  {
    MutexLock lock(&mutex_);
    OfDevice& of = devices_[device];
    for (size_t i = 0; i < std::min(kMostAsked, of.free.size()); ++i) {
      const CUDAStream stream = of.free[i];
      if (!is_idle(stream)) continue;
      of.free.erase(of.free.begin() + static_cast<std::ptrdiff_t>(i));
      return stream;
    }
    if (of.made >= kMost && !of.free.empty()) {
      const CUDAStream stream = of.free.front();
      of.free.pop_front();
      return stream;
    }
    ++of.made;
  }
  try {
    return make(device);
  } catch (...) {
    MutexLock lock(&mutex_);
    --devices_[device].made;
    throw;
  }
}

void StreamPool::give_back(const CUDAStream& stream) {
  MutexLock lock(&mutex_);
  devices_[stream.device_index()].free.push_back(stream);
}

void StreamPool::prepare(c10::DeviceIndex device) {
  constexpr size_t kFirst = 4;
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (devices_[device].made >= kFirst) return;
      ++devices_[device].made;
    }
    give_back(make(device));
  }
}

CudaWork::CudaWork(const std::vector<c10::Device>& devices, std::shared_ptr<StreamPool> pool,
                   Logger log)
    : pool_(std::move(pool)), log_(std::move(log)) {
  streams_.reserve(devices.size());
  try {
    for (const c10::Device device : devices) streams_.push_back(pool_->take(device.index()));
  } catch (...) {
    for (const CUDAStream& stream : streams_) pool_->give_back(stream);
    throw;
  }
}

CudaWork::~CudaWork() {
  for (const CUDAStream& stream : streams_) pool_->give_back(stream);
}

std::unique_ptr<ScopeEntry> CudaWork::enter() const {
  return std::make_unique<StreamsEntry>(streams_);
}

void CudaWork::arrived(const std::vector<at::Tensor>& tensors,
                       const std::vector<CUDAStream>& copies) {
  MutexLock lock(&mutex_);
  for (const CUDAStream& copy : copies) {
    // One that could not be recorded would say that the copy is done.
    c10::cuda::CUDAEvent event;
    event.record(copy);
    for (const CUDAStream& stream : streams_) {
      if (stream.device_index() == copy.device_index()) event.block(stream);
    }
    events_.push_back(std::move(event));
  }
  for (const at::Tensor& tensor : tensors) {
    memory_.push_back(tensor.storage().getWeakStorageImpl());
    for (const CUDAStream& stream : streams_) {
      if (stream.device_index() != tensor.device().index()) continue;
      // STREAM-4: the memory belongs to the stream that filled it.
      c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream);
    }
  }
}

void CudaWork::before_use() {
  const Status queued = guarded("waiting for the copies of a result", [this] {
    MutexLock lock(&mutex_);
    for (c10::cuda::CUDAEvent& event : events_) {
      event.block(c10::cuda::getCurrentCUDAStream(event.device_index()));
    }
    for (const auto& weak : memory_) {
      const auto memory = weak.lock();
      if (memory.get() == nullptr) continue;
      c10::cuda::CUDACachingAllocator::recordStream(
          memory->data_ptr(), c10::cuda::getCurrentCUDAStream(memory->device().index()));
    }
  });
  // Such an error sticks to its device: whatever is done with the value shows it as well.
  if (!queued.ok()) WEFT_LOG(log_, kError) << queued;
}

std::shared_ptr<ValueGuard> CudaWork::derive() {
  std::vector<c10::Device> devices;
  for (const CUDAStream& stream : streams_) devices.push_back(stream.device());
  return std::make_shared<DerivedGuard>(devices, log_);
}

}  // namespace weft::internal
