#include "weft/collectives/internal/ddp/sink.h"

#include <string>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"
#include "torch/csrc/autograd/variable.h"

namespace weft::internal {
namespace {

using torch::autograd::variable_list;

class Sink final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "DistributedDataParallelBackward"; }
};

class Hook final : public GradReadyHook {
 public:
  explicit Hook(OnBackward call, std::optional<absl::Duration> deadline = std::nullopt)
      : call_(std::move(call)), deadline_(deadline) {}
  void on_grad_ready(const std::shared_ptr<GradAccessor>& accessor) override { call_(accessor); }
  std::optional<absl::Duration> default_deadline() const override { return deadline_; }

 private:
  const OnBackward call_;
  const std::optional<absl::Duration> deadline_;
};

}  // namespace

void watch_outputs(const std::vector<at::Tensor*>& outputs, absl::Duration deadline,
                   OnBackward begins) {
  const std::shared_ptr<Sink> sink(new Sink(), torch::autograd::deleteNode);
  torch::autograd::edge_list edges;
  std::vector<at::Tensor> inner;
  for (at::Tensor* one : outputs) {
    if (!one->defined() || !one->requires_grad()) continue;
    edges.push_back(torch::autograd::impl::gradient_edge(*one));
    inner.push_back(*one);
  }
  if (edges.empty()) return;
  sink->set_next_edges(std::move(edges));
  sink->add_post_hook(std::make_unique<Hook>(std::move(begins), deadline));
  size_t i = 0;
  for (at::Tensor* one : outputs) {
    if (!one->defined() || !one->requires_grad()) continue;
    *one = inner[i++].detach();
    torch::autograd::set_history(*one, sink);
  }
}

LeafHook::LeafHook(const at::Tensor& leaf, OnBackward ready)
    : accumulator_(torch::autograd::impl::grad_accumulator(leaf)),
      key_(accumulator_->add_post_hook(std::make_unique<Hook>(std::move(ready)))) {}

LeafHook::~LeafHook() {
  if (accumulator_ != nullptr) accumulator_->del_post_hook(key_);
}

bool LeafHook::is_on(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (accumulator == nullptr) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<const Hook*>(hook.get()) != nullptr) return true;
  }
  return false;
}

}  // namespace weft::internal
