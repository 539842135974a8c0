// Steps within the backward of computations drawn from seeds: every parameter is what one worker
// makes of it, bit by bit, however late, often and out of order messages come.

#include <torch/autograd.h>
#include <torch/types.h>

#include "weft/tests/dist_autograd/random_graph.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

constexpr int kWorkers = 4;
constexpr uint64_t kGraphs = 60;
const FunctionRef<at::Tensor(int64_t)> kRandomParameter{"random.parameter"};

class DistOptimRandom : public DistOptimTest {
 protected:
  DistOptimRandom() : parameters_(RandomGraph::make_parameters(kWorkers)) {
    Library random = RandomGraph::library(parameters_);
    random.def("parameter", [all = parameters_](CallContext& call, int64_t index) {
      return all.at(static_cast<size_t>(call.worker().rank())).at(static_cast<size_t>(index));
    });
    library_.merge(random);
    for (const auto& list : parameters_) all_.insert(all_.end(), list.begin(), list.end());
  }

  std::vector<RRef<at::Tensor>> references(const Worker& worker) const {
    std::vector<RRef<at::Tensor>> out;
    for (int w = 0; w < kWorkers; ++w) {
      for (size_t i = 0; i < parameters_[static_cast<size_t>(w)].size(); ++i) {
        out.push_back(remote(worker, w, kRandomParameter, static_cast<int64_t>(i)));
      }
    }
    return out;
  }

  // After a step of 1 against the sum of the losses; all numbers are small integers.
  std::vector<at::Tensor> stepped(const RandomGraph& graph) const {
    std::vector<at::Tensor> out;
    for (const at::Tensor& p : all_) out.push_back(p.detach().clone());
    for (const at::Tensor& loss : graph.alone(parameters_)) {
      const auto gradients = torch::autograd::grad({loss}, all_, {}, true, false, true);
      for (size_t i = 0; i < out.size(); ++i) {
        if (gradients[i].defined()) out[i] -= gradients[i];
      }
    }
    return out;
  }

  const RandomGraph::Parameters parameters_;
  std::vector<at::Tensor> all_;
};

TEST_P(DistOptimRandom, AStepInTheBackwardIsTheStepOfOneWorker) {
  const auto plan = std::make_shared<FaultPlan>(7);
  OptimCluster c = make(kWorkers - 1, plan);
  std::vector<at::Tensor> start;
  for (const at::Tensor& p : all_) start.push_back(p.detach().clone());
  DistributedOptimizer<optim::SGD> optimizer(c[0], references(c[0]), {.lr = 1});
  int64_t updated = 0;
  std::vector<int64_t> versions(all_.size(), 0);
  for (uint64_t seed = 0; seed < kGraphs && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    if (seed == kGraphs / 2) {
      const absl::Duration late = absl::Milliseconds(1);
      plan->add({.fault = Fault::kDelay, .probability = 0.1, .delay = late});
      plan->add({.fault = Fault::kReorder, .probability = 0.1, .delay = late});
      plan->add({.fault = Fault::kDuplicate, .probability = 0.05});
    }
    const RandomGraph graph(seed, kWorkers);
    const std::vector<at::Tensor> want = stepped(graph);
    DistAutogradContext context(c[0]);
    const auto losses = graph.through(c[0], parameters_);
    if (!losses.empty()) updated += optimizer.backward_and_step(context, losses).updated;
    const std::vector<int64_t> now = optimizer.versions();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < all_.size(); ++i) {
      EXPECT_TRUE(torch::equal(all_[i], want[i])) << i << all_[i] << want[i];
      // Once, if at all; not at all leaves it as it was.
      const int64_t times = now[i] - versions[i];
      EXPECT_TRUE(times == 1 || (times == 0 && torch::equal(want[i], start[i]))) << i;
      all_[i].copy_(start[i]);
    }
    versions = now;
    EXPECT_TRUE(context.gradients().empty());
    context.release().wait();
  }
  EXPECT_GT(updated, static_cast<int64_t>(2 * kGraphs));
  EXPECT_GT(plan->hits(), 0);
  plan->clear();
  expect_none(*c.cluster, "num_autograd_contexts");
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimRandom, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
