#include "weft/pipeline/internal/data_parallel.h"

#include <utility>

#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/variable.h"

namespace weft::pipeline::internal {

class StepAccessor final : public GradAccessor {
 public:
  // Apart from the numbers of local backwards, which LibTorch counts from 0.
  BackwardId backward_id() const override {
    return {std::nullopt, uint64_t{1} << 63 | reinterpret_cast<uintptr_t>(this)};
  }
  absl::Duration time_left() const override { return time_left_; }
  void with_grad(const at::Tensor& parameter, absl::FunctionRef<bool(at::Tensor&)> fn) override {
    at::Tensor grad = parameter.grad();
    if (fn(grad)) parameter.mutable_grad() = std::move(grad);
  }
  void at_end(absl::AnyInvocable<void()> fn) override { at_end_.push_back(std::move(fn)); }

  void run_at_end(absl::Duration time_left) {
    time_left_ = time_left;
    while (!at_end_.empty()) {
      for (auto& fn : std::exchange(at_end_, {})) fn();
    }
  }

 private:
  absl::Duration time_left_ = absl::InfiniteDuration();
  std::vector<absl::AnyInvocable<void()>> at_end_;
};

namespace {

template <class F>
void for_each_hook(torch::autograd::Node* node, F f) {
  if (node == nullptr) return;
  for (const auto& hook : node->post_hooks()) {
    if (auto* const ready = dynamic_cast<GradReadyHook*>(hook.get())) f(ready);
  }
}
bool is_watched(torch::autograd::Node* node) {
  bool found = false;
  for_each_hook(node, [&found](GradReadyHook*) { found = true; });
  return found;
}

}  // namespace

std::unique_ptr<DataParallelHooks> DataParallelHooks::of(
    const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& p : parameters) {
    if (!is_watched(torch::autograd::impl::try_get_grad_accumulator(p).get())) continue;
    return std::make_unique<DataParallelHooks>();
  }
  return nullptr;
}

DataParallelHooks::~DataParallelHooks() = default;

void DataParallelHooks::unwrap(std::vector<at::Tensor>* outputs) {
  for (at::Tensor& t : *outputs) {
    if (!t.defined() || !is_watched(t.grad_fn().get())) continue;
    const Node node = t.grad_fn();
    const torch::autograd::Edge inner = node->next_edge(t.output_nr());
    watcher_ = node;
    t = t.detach();
    torch::autograd::impl::set_gradient_edge(t, inner);
  }
}

void DataParallelHooks::begin() {
  if (accessor_ != nullptr) return;
  accessor_ = std::make_shared<StepAccessor>();
  for_each_hook(watcher_.get(), [this](GradReadyHook* hook) { hook->on_grad_ready(accessor_); });
}

void DataParallelHooks::ready(const at::Tensor& parameter) {
  begin();
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  for_each_hook(accumulator.get(), [this](GradReadyHook* hook) { hook->on_grad_ready(accessor_); });
}

Status DataParallelHooks::finish(absl::Duration time_left) {
  Status status;
  try {
    begin();
    accessor_->run_at_end(time_left);
  } catch (...) {
    status = status_from_current_exception();
  }
  drop();
  return status;
}

void DataParallelHooks::drop() {
  accessor_.reset();
  watcher_ = {};
}

}  // namespace weft::pipeline::internal
