// What a plan costs by simple rules, and the figures of a simulation.

#include <algorithm>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/simulator.h"

namespace weft::pipeline {
namespace {

[[noreturn]] void refuse_costs(std::string_view what) {
  throw_error(make_error(ErrorKind::kInvalidArgument, what));
}

}  // namespace

Costs Costs::uniform(const Plan& plan, Ticks forward, Ticks input_grad, Ticks weight_grad,
                     Ticks latency, int64_t activation) {
  std::vector<int> shares(plan.workers.size());
  for (int w : plan.placement) ++shares[w];
  Costs costs;
  for (int w : plan.placement) {
    const auto part = [&](int64_t whole) {
      if (whole % shares[w] != 0) {
        refuse_costs(absl::StrCat("a share of ", whole, " does not divide into ", shares[w],
                                  " stages of worker ", w));
      }
      return whole / shares[w];
    };
    costs.stages.push_back({.forward = part(forward),
                            .input_grad = part(input_grad),
                            .weight_grad = part(weight_grad),
                            .activation = part(activation),
                            .weight_activation = part(activation)});
  }
  costs.edges.assign(plan.edges.size(), EdgeCost{.latency = latency});
  return costs;
}

Costs Costs::divided(const Plan& plan, const std::vector<StageCost>& shares, const EdgeCost& edge) {
  if (shares.size() != 1 && shares.size() != plan.workers.size()) {
    refuse_costs(
        absl::StrCat("costs of ", shares.size(), " workers for a plan of ", plan.workers.size()));
  }
  std::vector<int> parts(plan.workers.size());
  for (int w : plan.placement) ++parts[w];
  Costs costs;
  for (int w : plan.placement) {
    StageCost c = shares[shares.size() == 1 ? 0 : static_cast<size_t>(w)];
    for (Ticks* t : {&c.forward, &c.input_grad, &c.weight_grad, &c.reduce, &c.step, &c.activation,
                     &c.weight_activation}) {
      *t /= parts[w];
    }
    costs.stages.push_back(c);
  }
  costs.edges.assign(plan.edges.size(), edge);
  return costs;
}

Ticks Simulation::max_busy() const {
  Ticks most = 0;
  for (const auto& w : workers) most = std::max(most, w.busy);
  return most;
}
Ticks Simulation::max_span() const {
  Ticks most = 0;
  for (const auto& w : workers) most = std::max(most, w.last_end - w.first_start);
  return most;
}
double Simulation::makespan_bubble() const {
  return makespan == 0 ? 0 : 1 - static_cast<double>(max_busy()) / static_cast<double>(makespan);
}
double Simulation::span_bubble() const {
  return max_span() == 0 ? 0
                         : 1 - static_cast<double>(max_busy()) / static_cast<double>(max_span());
}
int64_t Simulation::peak_memory() const {
  int64_t most = 0;
  for (const auto& w : workers) most = std::max(most, w.peak_memory);
  return most;
}

}  // namespace weft::pipeline
