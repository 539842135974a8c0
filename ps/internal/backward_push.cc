#include "weft/ps/internal/backward_push.h"

#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"
#include "weft/collectives/grad_accessor.h"

namespace weft::ps::internal {
namespace {

// Those of a backward through a context, and what a local one has left in `.grad`.
class Collected final : public GradFields {
 public:
  explicit Collected(std::vector<std::pair<at::Tensor, at::Tensor>> of_context)
      : of_context_(std::move(of_context)) {}
  at::Tensor take(const at::Tensor& leaf) const override {
    for (const auto& [of, gradient] : of_context_) {
      if (of.is_same(leaf)) return gradient;
    }
    return GradFields::take(leaf);
  }
  bool shared() const override { return !of_context_.empty(); }

 private:
  const std::vector<std::pair<at::Tensor, at::Tensor>> of_context_;
};

}  // namespace

at::Tensor GradFields::take(const at::Tensor& leaf) const {
  at::Tensor gradient = std::exchange(leaf.mutable_grad(), at::Tensor());
  // That of a recorded backward leads back to its leaf: neither would ever be freed.
  if (gradient.defined() && gradient.requires_grad()) gradient = gradient.detach();
  return gradient;
}

// As a GradReadyHook, whose class is in a library that this one does not need.
class BackwardPush::Hook final : public torch::autograd::FunctionPostHook,
                                 public weft::internal::GradReadyReceiver {
 public:
  Hook(std::weak_ptr<BackwardPush> of, size_t index) : of_(std::move(of)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (const auto of = of_.lock()) of->ready(index_, {});
    return outputs;
  }
  void on_grad_ready(const std::shared_ptr<GradAccessor>& accessor) override {
    const auto of = of_.lock();
    const at::Tensor leaf = of == nullptr ? at::Tensor() : of->leaf(index_);
    if (!leaf.defined()) return;
    at::Tensor gradient;
    accessor->with_grad(leaf, [&gradient](const at::Tensor& has) {
      gradient = has;
      return false;
    });
    of->ready(index_, std::move(gradient));
  }
  std::optional<absl::Duration> default_deadline() const override { return std::nullopt; }

 private:
  const std::weak_ptr<BackwardPush> of_;
  const size_t index_;
};

void BackwardPush::watch(const at::Tensor& leaf) {
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  const MutexLock lock(&mutex_);
  accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), leaves_.size()));
  leaves_.push_back({.leaf = leaf, .accumulator = std::move(accumulator)});
}

at::Tensor BackwardPush::leaf(size_t index) const {
  const MutexLock lock(&mutex_);
  return push_ == nullptr ? at::Tensor() : leaves_[index].leaf;
}

void BackwardPush::ready(size_t index, at::Tensor of_context) {
  Push push;
  std::vector<std::pair<at::Tensor, at::Tensor>> of_contexts;
  {
    const MutexLock lock(&mutex_);
    if (push_ == nullptr) return;
    Leaf& leaf = leaves_[index];
    if (leaf.ready) {
      // Another backward before all leaves have had one: the caller adds gradients up, and says with step()
      // when that is enough.
      push_ = nullptr;
      return;
    }
    leaf.ready = true;
    leaf.gradient = std::move(of_context);
    if (++ready_ < leaves_.size()) return;
    push = std::exchange(push_, nullptr);
    pushing_ = true;
    for (const Leaf& one : leaves_) {
      if (one.gradient.defined()) of_contexts.emplace_back(one.leaf, one.gradient);
    }
  }
  std::optional<Future<PushResult>> left;
  // Also when push() throws, with which the backward fails.
  const absl::Cleanup pushed = [this, &left] {
    const MutexLock lock(&mutex_);
    left_ = std::move(left);
    pushing_ = false;
    changed_.notify_all();
  };
  left = push(Collected(std::move(of_contexts)));
}

bool BackwardPush::has_left() const {
  const MutexLock lock(&mutex_);
  return left_.has_value();
}

std::optional<Future<PushResult>> BackwardPush::end() {
  std::vector<Leaf> leaves;  // released without the mutex
  MutexLock lock(&mutex_);
  push_ = nullptr;
  while (pushing_) (void)changed_.wait_until(&mutex_, absl::InfiniteFuture());
  leaves.swap(leaves_);
  return std::exchange(left_, std::nullopt);
}

}  // namespace weft::ps::internal
