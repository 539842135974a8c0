#include "weft/collectives/grad_accessor.h"

#include <utility>

#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"

namespace weft {
namespace {

class LocalGradAccessor final : public GradAccessor {
 public:
  BackwardId backward_id() const override { return {std::nullopt, task_}; }
  absl::Duration time_left() const override { return absl::InfiniteDuration(); }
  void with_grad(const at::Tensor& parameter, absl::FunctionRef<bool(at::Tensor&)> fn) override {
    at::Tensor grad = parameter.grad();
    if (fn(grad)) parameter.mutable_grad() = std::move(grad);
  }
  void at_end(absl::AnyInvocable<void()> fn) override {
    // The engine copies what it queues.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [shared = std::make_shared<absl::AnyInvocable<void()>>(std::move(fn))] { (*shared)(); });
  }

 private:
  // LibTorch counts its graph tasks; hooks run inside of theirs.
  const uint64_t task_ = static_cast<uint64_t>(torch::autograd::get_current_graph_task_id());
};

}  // namespace

torch::autograd::variable_list GradReadyHook::operator()(
    const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) {
  on_grad_ready(std::make_shared<LocalGradAccessor>());
  return outputs;
}

}  // namespace weft
