// Reductions under a Join: a rank without batches takes part in those of the others, with zeros.

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "weft/collectives/internal/ddp/reducer.h"

namespace weft::internal {

// The gradients of a rank that runs no backward.
class Reducer::OwnGrads final : public GradAccessor {
 public:
  explicit OwnGrads(bool keeps) : keeps_(keeps) {}
  BackwardId backward_id() const override { return {}; }
  absl::Duration time_left() const override { return absl::InfiniteDuration(); }
  void with_grad(const at::Tensor& parameter, absl::FunctionRef<bool(at::Tensor&)> fn) override {
    at::Tensor grad = keeps_ ? parameter.grad() : at::Tensor();
    if (fn(grad) && keeps_) parameter.mutable_grad() = std::move(grad);
  }
  void at_end(absl::AnyInvocable<void()>) override {
    throw_error(make_error(ErrorKind::kInternal, "no backward runs whose end would come"));
  }

 private:
  const bool keeps_;
};

Reducer::ReductionRef Reducer::make_reduction(const std::shared_ptr<GradAccessor>& accessor) const {
  auto made = std::make_shared<Reduction>();
  made->id = accessor->backward_id();
  made->accessor = accessor;
  made->ready.resize(parameters_.size());
  made->fired.resize(parameters_.size());
  return made;
}

bool Reducer::is_idle() const {
  MutexLock lock(&mutex_);
  return waiting_.empty();
}

void Reducer::set_join(std::shared_ptr<JoinSession> join, size_t part) {
  MutexLock lock(&mutex_);
  if (join != nullptr && !waiting_.empty()) {
    throw_error(make_error(ErrorKind::kState,
                           "Join: a backward of the DistributedDataParallel is under way: begin "
                           "the Join before the first batch"));
  }
  join_ = std::move(join);
  join_part_ = part;
}

void Reducer::shadow(const JoinActive& active) {
  ReductionRef made;
  bool keeps = false;
  {
    MutexLock lock(&mutex_);
    if (!waiting_.empty()) {
      throw_error(make_error(ErrorKind::kState,
                             "Join: wait() was called while a backward of this rank is under way"));
    }
    keeps = join_ != nullptr && join_->needs_gradients();
    made = make_reduction(std::make_shared<OwnGrads>(keeps));
    made->shadow = true;
    made->active = active;
    waiting_.push_back(made);
  }
  if (keeps) zero_grad(true);  // what no rank uses has no gradient either
  finalize(made);
}

void Reducer::settle_join(Reduction* reduction) {
  if (reduction->announced == nullptr) return;
  std::shared_ptr<JoinSession> join;
  {
    MutexLock lock(&mutex_);
    join = join_;
  }
  if (join == nullptr) {
    throw_error(make_error(ErrorKind::kState, "Join: it has ended before this backward"));
  }
  reduction->active = join->settle(reduction->announced);
}

double Reducer::share_of_absent(const Reduction& reduction) const {
  MutexLock lock(&mutex_);
  if (join_ == nullptr || join_->options().divide_by_initial_world_size) return 1;
  return static_cast<double>(world_) / std::max(1, reduction.active.count);
}

}  // namespace weft::internal
