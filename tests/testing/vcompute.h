#ifndef WEFT_TESTS_TESTING_VCOMPUTE_H_
#define WEFT_TESTS_TESTING_VCOMPUTE_H_

// VCompute: a stage that waits on the Runtime instead of computing, for as long as its costs say.
// Under SimRuntime a pipeline of such stages takes exactly the time that the simulator predicts. It
// also refuses what no correct run does: an action twice, or without what it needs.

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "weft/common/runtime.h"
#include "weft/pipeline/simulator.h"
#include "weft/pipeline/stage_compute.h"

namespace weft::testing {

class VCompute : public pipeline::StageCompute {
 public:
  // `throws_at`: that forward (step, micro-batch) fails. `asynchronous`: of a plan that steps while
  // micro-batches are under way.
  VCompute(std::shared_ptr<Runtime> runtime, pipeline::StageCost cost,
           std::pair<int64_t, int> throws_at = {-1, -1}, bool asynchronous = false)
      : runtime_(std::move(runtime)),
        cost_(cost),
        throws_at_(throws_at),
        asynchronous_(asynchronous) {}

  StatusOr<pipeline::Tensors> forward(pipeline::ForwardCall call) override {
    const Key key{call.step, call.micro_batch};
    if (!call.forward_only && !live_.emplace(key, call.inputs.size()).second) {
      return wrong(key, "a second forward");
    }
    const absl::Time until = after(cost_.forward);
    pipeline::Tensors out{at::zeros({1})};
    wait(until);
    if (!call.forward_only && key == throws_at_) {
      return make_error(ErrorKind::kUser, "vcompute was told to fail");
    }
    return out;
  }
  Status recompute(int64_t step, int micro_batch) override {
    if (live_.count({step, micro_batch}) == 0) return wrong({step, micro_batch}, "no forward");
    wait(cost_.forward);
    return absl::OkStatus();
  }
  StatusOr<pipeline::Tensors> backward(int64_t step, int micro_batch,
                                       pipeline::Tensors gradients) override {
    const auto out = input_grad(step, micro_batch, std::move(gradients));
    if (!out.ok()) return out;
    WEFT_RETURN_IF_ERROR(weight_grad(step, micro_batch));
    return out;
  }
  StatusOr<pipeline::Tensors> input_grad(int64_t step, int micro_batch,
                                         pipeline::Tensors) override {
    const auto it = live_.find({step, micro_batch});
    if (it == live_.end()) return wrong({step, micro_batch}, "no forward");
    const absl::Time until = after(cost_.input_grad);
    pipeline::Tensors out(it->second, at::zeros({1}));
    wait(until);
    return out;
  }
  Status weight_grad(int64_t step, int micro_batch) override {
    if (live_.erase({step, micro_batch}) == 0) return wrong({step, micro_batch}, "no forward");
    wait(cost_.weight_grad);
    return absl::OkStatus();
  }
  Status reduce(int64_t step, absl::Duration time_left) override {
    (void)time_left;
    for (const auto& [key, inputs] : live_) {
      if (key.first == step) return wrong(key, "a reduction before its gradient");
    }
    wait(cost_.reduce);
    return absl::OkStatus();
  }
  StatusOr<double> squared_norm() override { return 1; }
  Status scale_gradients(double factor) override {
    (void)factor;
    return absl::OkStatus();
  }
  Status step(int64_t step) override {
    for (const auto& [key, inputs] : live_) {
      if (key.first == step && !asynchronous_) return wrong(key, "a step before its gradient");
    }
    wait(cost_.step);
    return absl::OkStatus();
  }
  void drop(const Status&) override { live_.clear(); }

 protected:
  // What an action computes is made within its time, as that of any stage.
  absl::Time after(pipeline::Ticks ns) const { return runtime_->now() + absl::Nanoseconds(ns); }
  void wait(pipeline::Ticks ns) { wait(after(ns)); }
  void wait(absl::Time until) {
    const auto parker = runtime_->make_parker();
    while (runtime_->now() < until) (void)parker->park_until(until);
  }

 private:
  using Key = std::pair<int64_t, int>;

  static Status wrong(const Key& key, const std::string& what) {
    return make_error(ErrorKind::kInternal,
                      absl::StrCat(what, ": step ", key.first, ", micro-batch ", key.second));
  }

  const std::shared_ptr<Runtime> runtime_;
  const pipeline::StageCost cost_;
  const Key throws_at_;
  const bool asynchronous_;
  std::map<Key, size_t> live_;  // with how many inputs
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_VCOMPUTE_H_
