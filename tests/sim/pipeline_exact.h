#ifndef WEFT_TESTS_SIM_PIPELINE_EXACT_H_
#define WEFT_TESTS_SIM_PIPELINE_EXACT_H_

// Stages that wait as VCompute does, and give exact values: whole numbers modulo 2^64, which a
// gradient that is lost, doubled, of another micro-batch or of another weight does not hit by chance.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "weft/pipeline/plan.h"
#include "weft/tests/testing/vcompute.h"

namespace weft::testing {

inline at::Tensor whole(uint64_t value) {
  return at::full({1}, static_cast<int64_t>(value), at::TensorOptions().dtype(at::kLong));
}
inline uint64_t value_of(const at::Tensor& t) { return static_cast<uint64_t>(t.item<int64_t>()); }

// Stage s gives y_o = (a_s + 2o) x + b_s for each of its outputs, where x is the sum of its inputs, each
// times an odd factor by its place. The loss is y_0 times the target. Modulo 2^64.
class ExactModel {
 public:
  explicit ExactModel(const pipeline::Plan& plan)
      : plan_(plan),
        from_(pipeline::edges_from(plan)),
        to_(pipeline::edges_to(plan)),
        outputs_(plan.placement.size(), 1) {
    for (const auto& e : plan.edges) outputs_[e.from] = std::max(outputs_[e.from], e.output + 1);
  }

  static uint64_t input(int64_t step, int i) { return 1 + 1000 * static_cast<uint64_t>(step) + i; }
  static uint64_t target(int64_t step, int i) { return 3 + 2 * static_cast<uint64_t>(i) + step; }
  static double weight(int i) { return 1 + i % 3; }
  static uint64_t factor(size_t place) { return 2 * place + 3; }
  static uint64_t a(int s, int o) { return 0x9E3779B97F4A7C15u * (2 * s + 1) + 2 * o; }
  static uint64_t b(int s) { return 0xD6E8FEB86659FD93u * (s + 1); }
  int outputs(int s) const { return outputs_[s]; }

  // For each stage, the loss, and what the last stage gives by micro-batch, without a pipeline.
  struct Step {
    std::vector<uint64_t> gradients;
    double loss = 0;
    std::vector<uint64_t> outputs;
  };
  Step alone(int64_t step) const {
    const int n = plan_.stages();
    Step out{std::vector<uint64_t>(n), 0, {}};
    for (int i = 0; i < plan_.micro_batches; ++i) {
      std::vector<uint64_t> x(n);
      std::vector<std::vector<uint64_t>> y(n);
      std::vector<std::vector<uint64_t>> dy(n);
      for (int s = 0; s < n; ++s) {
        size_t place = 0;
        if (s == 0) x[s] = factor(place++) * input(step, i);
        for (const int e : to_[s]) {
          const pipeline::Edge& edge = plan_.edges[e];
          for (int o = 0; o < outputs_[edge.from]; ++o) {
            if (edge.output < 0 || edge.output == o) x[s] += factor(place++) * y[edge.from][o];
          }
        }
        for (int o = 0; o < outputs_[s]; ++o) y[s].push_back(a(s, o) * x[s] + b(s));
        dy[s].resize(outputs_[s]);
      }
      out.outputs.push_back(y[n - 1][0]);
      out.loss += weight(i) * static_cast<double>(y[n - 1][0] * target(step, i) % 1'000'003);
      dy[n - 1][0] = static_cast<uint64_t>(weight(i)) * target(step, i);
      for (int s = n - 1; s >= 0; --s) {
        uint64_t dx = 0;
        for (int o = 0; o < outputs_[s]; ++o) {
          dx += a(s, o) * dy[s][o];
          out.gradients[s] += x[s] * dy[s][o];
        }
        size_t place = s == 0 ? 1 : 0;
        for (const int e : to_[s]) {
          const pipeline::Edge& edge = plan_.edges[e];
          for (int o = 0; o < outputs_[edge.from]; ++o) {
            if (edge.output < 0 || edge.output == o) dy[edge.from][o] += factor(place++) * dx;
          }
        }
      }
    }
    for (const auto& group : plan_.tied) {
      uint64_t sum = 0;
      for (int s : group) sum += out.gradients[s];
      for (int s : group) out.gradients[s] = sum;
    }
    return out;
  }

 private:
  const pipeline::Plan& plan_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  std::vector<int> outputs_;
};

// What all stages of a run find wrong: the first of it.
struct Ledger {
  const ExactModel* model = nullptr;
  std::vector<ExactModel::Step> want;  // by step
  std::string wrong;
};

class VExact final : public VCompute {
 public:
  VExact(std::shared_ptr<Runtime> runtime, pipeline::StageCost cost,
         std::pair<int64_t, int> throws_at, int stage, Ledger* ledger)
      : VCompute(std::move(runtime), cost, throws_at), stage_(stage), ledger_(ledger) {}

  StatusOr<pipeline::Tensors> forward(pipeline::ForwardCall call) override {
    const Key key{call.step, call.micro_batch};
    if (!ran_.insert(key).second) note("ran its forward twice", key);
    Live live;
    for (size_t k = 0; k < call.inputs.size(); ++k) {
      live.x += ExactModel::factor(k) * value_of(call.inputs[k]);
    }
    live.inputs = call.inputs.size();
    const bool forward_only = call.forward_only;
    const bool is_last = call.is_last && !forward_only;
    if (is_last) live.dy = static_cast<uint64_t>(call.scale) * value_of(call.target);
    const uint64_t target = is_last ? value_of(call.target) : 0;
    auto made = VCompute::forward(std::move(call));
    if (!made.ok()) return made.status();
    pipeline::Tensors out;
    for (int o = 0; o < ledger_->model->outputs(stage_); ++o) {
      out.push_back(whole(ExactModel::a(stage_, o) * live.x + ExactModel::b(stage_)));
    }
    if (forward_only) return out;
    live_[key] = live;
    if (is_last) return pipeline::Tensors{whole(value_of(out[0]) * target % 1'000'003)};
    return out;
  }
  StatusOr<pipeline::Tensors> input_grad(int64_t step, int micro_batch,
                                         pipeline::Tensors gradients) override {
    const auto it = live_.find({step, micro_batch});
    if (it != live_.end()) {
      Live& live = it->second;
      if (gradients.empty()) gradients.push_back(whole(live.dy));
      live.dy = 0;
      for (size_t o = 0; o < gradients.size(); ++o) {
        const uint64_t dy = gradients[o].defined() ? value_of(gradients[o]) : 0;
        live.dx += ExactModel::a(stage_, static_cast<int>(o)) * dy;
        live.dy += dy;
      }
    }
    auto out = VCompute::input_grad(step, micro_batch, {});
    if (!out.ok() || it == live_.end()) return out;
    for (size_t k = 0; k < out->size(); ++k) {
      (*out)[k] = whole(ExactModel::factor(k) * live_.at({step, micro_batch}).dx);
    }
    return out;
  }
  Status weight_grad(int64_t step, int micro_batch) override {
    WEFT_RETURN_IF_ERROR(VCompute::weight_grad(step, micro_batch));
    const auto node = live_.extract({step, micro_batch});
    if (!node.empty()) sum_ += node.mapped().x * node.mapped().dy;
    return absl::OkStatus();
  }
  StatusOr<pipeline::Tensors> tied_gradients() override { return pipeline::Tensors{whole(sum_)}; }
  Status set_tied_gradients(pipeline::Tensors sums) override {
    sum_ = value_of(sums.at(0));
    return absl::OkStatus();
  }
  Status step(int64_t step) override {
    WEFT_RETURN_IF_ERROR(VCompute::step(step));
    if (!stepped_.insert(step).second) note("stepped twice", {step, -1});
    if (sum_ != ledger_->want.at(static_cast<size_t>(step)).gradients[stage_]) {
      note("has another gradient at its step than one process", {step, -1});
    }
    sum_ = 0;
    return absl::OkStatus();
  }
  void drop(const Status& why) override {
    VCompute::drop(why);
    live_.clear();
  }

 private:
  using Key = std::pair<int64_t, int>;
  struct Live {
    uint64_t x = 0;
    uint64_t dx = 0;
    uint64_t dy = 0;  // the sum over the outputs
    size_t inputs = 0;
  };
  // One thread runs at a time.
  void note(std::string_view what, const Key& at) {
    if (!ledger_->wrong.empty()) return;
    ledger_->wrong = absl::StrCat("stage ", stage_, " ", std::string(what), ": step ", at.first,
                                  ", micro-batch ", at.second);
  }

  const int stage_;
  Ledger* const ledger_;
  std::map<Key, Live> live_;
  std::set<Key> ran_;
  std::set<int64_t> stepped_;
  uint64_t sum_ = 0;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SIM_PIPELINE_EXACT_H_
