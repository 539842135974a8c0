#include "weft/rpc/internal/cuda/streams.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "c10/cuda/CUDACachingAllocator.h"

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

// Of a value that a continuation made from another one: of whatever that thread queued.
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

CudaWork::CudaWork(const std::vector<c10::Device>& devices, Logger log) : log_(std::move(log)) {
  for (const c10::Device device : devices) {
    streams_.push_back(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()));
  }
}

std::unique_ptr<ScopeEntry> CudaWork::enter() const {
  return std::make_unique<StreamsEntry>(streams_);
}

void CudaWork::arrived(const std::vector<at::Tensor>& tensors,
                       const std::vector<CUDAStream>& copies) {
  MutexLock lock(&mutex_);
  for (const CUDAStream& copy : copies) {
    events_.emplace_back();
    events_.back().record(copy);
    for (const CUDAStream& stream : streams_) {
      if (stream.device_index() == copy.device_index()) events_.back().block(stream);
    }
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
