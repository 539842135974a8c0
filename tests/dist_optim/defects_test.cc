// Defects of steps that were found by reading, each with its trigger.

#include <torch/types.h>

#include "weft/dist_autograd/ended_passes.h"
#include "weft/tests/dist_optim/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

class DistOptimDefect : public DistOptimTest {
 protected:
  static at::Tensor ones() { return torch::ones({3}, torch::kFloat64); }
  // Each weight's gradient is one everywhere, whatever it is now.
  static at::Tensor sum_of_all(OptimCluster& c) {
    at::Tensor sum;
    for (const RRef<Weights>& w : c.weights) {
      const at::Tensor one = w.rpc_sync(&Weights::forward, ones()).sum();
      sum = sum.defined() ? sum + one : one;
    }
    return sum;
  }
};

// A step of the first backward's gradients, while the second one runs: neither none of them, nor
// those of the second.
TEST_P(DistOptimDefect, DEF_29_a_step_beside_the_next_backward) {
  constexpr int kRounds = fewer(300, 60);
  OptimCluster c = make(2);
  const at::Tensor mine = torch::zeros({3}, torch::kFloat64).set_requires_grad(true);
  std::vector<RRef<at::Tensor>> parameters = c.parameters;
  parameters.push_back(RRef<at::Tensor>::local(c[0], mine));
  DistributedOptimizer<optim::SGD> optimizer(c[0], parameters, {.lr = 1});
  const std::vector<at::Tensor> before = values(c);
  int wrong = 0;
  for (int i = 0; i < kRounds; ++i) {
    DistAutogradContext context(c[0]);
    const at::Tensor first = sum_of_all(c) + mine.sum();
    const at::Tensor second = sum_of_all(c) + mine.sum();
    context.backward({first});
    const Future<StepReport> step = optimizer.step_async(context);
    context.backward({second});
    const StepReport report = step.wait();
    EXPECT_TRUE(report.status.ok()) << report.status;
    if (report.updated != 3) ++wrong;
  }
  EXPECT_EQ(wrong, 0) << "of " << kRounds << " steps did not find all gradients";
  const std::vector<at::Tensor> after = values(c);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(torch::allclose(after[i], before[i] - kRounds, 1e-12, 1e-9)) << after[i];
  }
  expect_equal(mine.detach(), torch::full({3}, -kRounds, torch::kFloat64));
}

// The root has failed, and its word never reaches the owner, whose own part was done.
TEST_P(DistOptimDefect, DEF_29_a_step_uses_nothing_of_a_pass_that_failed) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(1, plan);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  const at::Tensor before = values(c)[0];
  {
    DistAutogradContext context(c[0]);
    const at::Tensor x = ones().set_requires_grad(true);
    const at::Tensor through = x * 1;
    through.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::domain_error("on purpose"); });
    const at::Tensor l = c.weights[0].rpc_sync(&Weights::forward, through).sum();
    // The first request to the owner is its part of the pass; what follows is that it has failed.
    const int abort = plan->add({.fault = Fault::kDrop,
                                 .kind = FrameKind::kRequest,
                                 .from = "worker0",
                                 .to = "worker1",
                                 .skip = 1});
    expect_error(error_of([&] { context.backward({l}, {.retain_graph = true}); }), ErrorKind::kUser,
                 {"on purpose"});
    EXPECT_GE(plan->hits(abort), 1) << plan->log();
    plan->clear();
    const StepReport report = optimizer.try_step(context);
    EXPECT_TRUE(report.status.ok()) << report.status;
    EXPECT_EQ(report.updated, 0);
  }
  expect_equal(values(c)[0], before);
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{0}));
  // The message that was dropped is not waited for.
  (void)c.cluster->shutdown_all({.graceful = false, .deadline = absl::Milliseconds(100)});
}

// A step that comes so late that later passes are in the same sum is refused.
TEST_P(DistOptimDefect, DEF_29_what_came_too_late_is_refused) {
  OptimCluster c = make(1);
  DistAutogradContext context(c[0]);
  context.backward({sum_of_all(c)});
  const internal::EndedPasses ended = internal::ended_passes(context);
  EXPECT_EQ(ended.below, 2U);
  EXPECT_EQ(ended.last, 1U);
  const auto read = [&] {
    return internal::gradients_of_ended(c[1], context.id(), ended).status();
  };
  const auto first = internal::gradients_of_ended(c[1], context.id(), ended);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(first->size(), 1U);
  context.backward({sum_of_all(c)});
  const auto again = internal::gradients_of_ended(c[1], context.id(), ended);
  ASSERT_TRUE(again.ok()) << again.status();
  expect_equal(again->at(0).gradient, first->at(0).gradient);
  context.backward({sum_of_all(c)});
  expect_error(read(), ErrorKind::kState, {"passes 2 to 1", "later ones have been added"});
}

// Making an optimizer over many parameters does not look at all of them for each.
TEST_P(DistOptimDefect, DEF_28_making_an_optimizer_is_linear) {
  constexpr int64_t kParameters = 3000;
  OptimCluster c = make(1);
  std::vector<at::Tensor> leaves;
  std::vector<RRef<at::Tensor>> parameters;
  for (int64_t i = 0; i < kParameters; ++i) {
    leaves.push_back(torch::zeros({1}).set_requires_grad(true));
    parameters.push_back(RRef<at::Tensor>::local(c[0], leaves.back()));
  }
  DistributedOptimizer<optim::SGD> optimizer(c[0], parameters, {.lr = 1});
  const int64_t looked_at = counter(c[0], "optimizer_parameters_looked_at");
  EXPECT_GE(looked_at, kParameters) << "it is not counted";
  EXPECT_LE(looked_at, 3 * kParameters);
  DistAutogradContext context(c[0]);
  context.backward({torch::cat(leaves).sum()});
  double sum = 0;
  for (const at::Tensor& leaf : leaves) sum += context.gradient(leaf).item<double>();
  EXPECT_EQ(sum, kParameters);
  EXPECT_EQ(optimizer.step(context).updated, kParameters);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimDefect, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
