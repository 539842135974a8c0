#include "weft/rpc/spi/device_order.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/_indices.h"
#include "ATen/ops/_values.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "weft/rpc/internal/device/published_streams.h"

namespace weft {
namespace internal {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class StreamGuards final : public ValueGuard {
 public:
  explicit StreamGuards(const std::vector<c10::Stream>& streams) : streams_(streams) {
    for (const c10::Stream& stream : streams_) {
      events_.emplace_back(stream.device_type()).record(stream);
    }
  }
  void before_use() override {
    for (size_t i = 0; i < streams_.size(); ++i) {
      const c10::Stream here = current_stream(streams_[i].device());
      if (here != streams_[i]) events_[i].block(here);
    }
  }
  std::shared_ptr<ValueGuard> derive() override {
    StreamsUsed here;
    for (const c10::Stream& stream : streams_) here.add(current_stream(stream.device()));
    return here.mark();
  }

 private:
  const std::vector<c10::Stream> streams_;
  std::vector<c10::Event> events_;  // of each
};

void keep_for(const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.is_sparse()) {
    keep_for(tensor._indices(), stream);
    keep_for(tensor._values(), stream);
  } else if (tensor.has_storage() && tensor.storage().data_ptr().get() != nullptr) {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

}  // namespace

bool any_on_device(c10::ArrayRef<at::Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), on_device);
}

std::optional<c10::Stream> stream_here(c10::Device device) {
  // A backend may be of devices that LibTorch here knows nothing of: they have no streams.
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) return std::nullopt;
  return current_stream(device);
}

void use_here(const GuardRef& guard, c10::ArrayRef<at::Tensor> tensors) {
  if (guard == nullptr) return;
  guard->before_use();
  for (const at::Tensor& tensor : tensors) {
    if (on_device(tensor)) keep_for(tensor, current_stream(tensor.device()));
  }
}

GuardRef mark_here(const at::Tensor& tensor) {
  StreamsUsed here;
  here.add(stream_here(tensor));
  return here.mark();
}

void StreamsUsed::add(const std::optional<c10::Stream>& stream) {
  if (!stream.has_value()) return;
  if (std::find(streams_.begin(), streams_.end(), *stream) != streams_.end()) return;
  streams_.push_back(*stream);
}

GuardRef StreamsUsed::mark() const {
  return streams_.empty() ? nullptr : std::make_shared<StreamGuards>(streams_);
}

// ---- what is published -------------------------------------------------------------------------

void PublishedStreams::publish(c10::ArrayRef<at::Tensor> tensors) {
  MutexLock lock(&mutex_);
  std::map<DeviceCode, const at::Tensor*> devices;
  for (const at::Tensor& tensor : tensors) {
    if (on_device(tensor)) devices.emplace(device_code(tensor.device()), &tensor);
  }
  for (const auto& [device, tensor] : devices) {
    GuardRef& guard = by_device_[device];
    use_here(guard, {});
    guard = mark_here(*tensor);
  }
  any_.store(true, std::memory_order_release);
}

void PublishedStreams::follow_all() {
  MutexLock lock(&mutex_);
  for (const auto& [device, guard] : by_device_) use_here(guard, {});
}

void ObjectStreams::follow(bool is_const) {
  MutexLock lock(&mutex_);
  use_here(written_, {});
  if (!is_const) use_here(read_, {});
}

void ObjectStreams::ended(bool is_const, const std::function<GuardRef()>& mark) {
  MutexLock lock(&mutex_);
  use_here(read_, {});  // others', which have nothing to wait for any more but this mark
  (is_const ? read_ : written_) = mark();
  if (!is_const) read_ = nullptr;
}

}  // namespace internal
}  // namespace weft
