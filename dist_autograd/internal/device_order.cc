#include "weft/dist_autograd/internal/device_order.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/_indices.h"
#include "ATen/ops/_values.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "torch/csrc/autograd/input_metadata.h"

namespace weft::internal {
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

bool on_device(const at::Tensor& tensor) { return tensor.defined() && !tensor.device().is_cpu(); }

bool any_on_device(c10::ArrayRef<at::Tensor> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), on_device);
}

std::optional<c10::Stream> stream_of(const Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const auto& metadata = node.input_metadata(i);
    if (!metadata.device().is_cpu()) return metadata.stream();
  }
  return std::nullopt;
}

std::optional<c10::Stream> stream_here(const at::Tensor& tensor) {
  if (!on_device(tensor)) return std::nullopt;
  return current_stream(tensor.device());
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

}  // namespace weft::internal
