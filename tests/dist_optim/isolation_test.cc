// Several trainers, one set of parameters: what each Isolation promises.

#include <torch/types.h>

#include <atomic>
#include <thread>

#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

using DistOptimIsolation = DistOptimTest;

// OPT-1, OPT-2: updates by small integers are exact, so none may be lost.
TEST_P(DistOptimIsolation, PerParameterLockLosesNoUpdate) {
  OptimCluster c = make(2);
  const std::vector<at::Tensor> before = values(c);
  std::vector<std::thread> threads;
  const at::Tensor x = torch::ones({3}, torch::kFloat64);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
      for (int i = 0; i < 10; ++i) {
        DistAutogradContext context(c[0]);
        const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, x);
        const at::Tensor z = c.weights[1].rpc_sync(&Weights::forward, x);
        context.backward({y.sum() + z.sum()});
        EXPECT_EQ(optimizer.step(context).updated, 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<at::Tensor> after = values(c);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(torch::allclose(after[i], before[i] - 40, 1e-12, 1e-12)) << after[i];
  }
}

// X13, two steps at once: each is applied at both owners or at none.
TEST_P(DistOptimIsolation, VersionedRefusesWhatIsStale) {
  OptimCluster c = make(2);
  const OptimizerOptions how{.isolation = Isolation::kVersioned};
  DistributedOptimizer<optim::SGD> a(c[0], c.parameters, {.lr = 1}, how);
  DistributedOptimizer<optim::SGD> b(c[0], c.parameters, {.lr = 1}, how);
  const std::vector<int64_t> read = a.versions();
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  expect_error(error_of([&] { a.step(context); }), ErrorKind::kInvalidArgument, {"0 versions"});
  EXPECT_EQ(a.step(context, {.versions = read}).stale, 0);
  const std::vector<at::Tensor> before = values(c);
  expect_error(error_of([&] { b.step(context, {.versions = read}); }), ErrorKind::kState,
               {"has been updated 1 times since version 0", "not applied"});
  for (size_t i = 0; i < 2; ++i) expect_equal(values(c)[i], before[i]);
  EXPECT_EQ(b.step(context, {.versions = read, .max_staleness = 1}).stale, 2);
  EXPECT_EQ(b.versions(), (std::vector<int64_t>{2, 2}));
  expect_none(*c.cluster, "optimizer_reservations");
}

TEST_P(DistOptimIsolation, VersionedStepsAtOnceAreWholeOrRefused) {
  OptimCluster c = make(2);
  std::atomic<int> applied{0};
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  const at::Tensor x = torch::ones({3}, torch::kFloat64);
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1},
                                                 {.isolation = Isolation::kVersioned});
      for (int i = 0; i < 10; ++i) {
        const std::vector<int64_t> read = optimizer.versions();
        DistAutogradContext context(c[0]);
        context.backward({c.weights[0].rpc_sync(&Weights::forward, x).sum() +
                          c.weights[1].rpc_sync(&Weights::forward, x).sum()});
        const StepReport report = optimizer.try_step(context, {.versions = read});
        if (report.status.ok()) {
          ++applied;
          // No other step came between.
          for (size_t k = 0; k < 2; ++k) EXPECT_EQ(report.owners[k].versions[0], read[k] + 1);
        } else {
          ++refused;
          EXPECT_EQ(error_kind(report.status), ErrorKind::kState) << report.status;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(applied + refused, 30);
  EXPECT_GE(applied.load(), 1);
  DistributedOptimizer<optim::SGD> last(c[0], c.parameters);
  EXPECT_EQ(last.versions(), (std::vector<int64_t>{applied.load(), applied.load()}));
  expect_none(*c.cluster, "optimizer_reservations");
}

// A step is between its phases at worker1, where its word to apply is swallowed.
TEST_P(DistOptimIsolation, OPT_3_a_reserved_parameter_is_nobody_elses) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(2, plan);
  const OptimizerOptions how{.isolation = Isolation::kVersioned};
  DistributedOptimizer<optim::SGD> a(c[0], c.parameters, {.lr = 1}, how);
  DistributedOptimizer<optim::SGD> b(c[0], {c.parameters[0]}, {.lr = 1}, how);
  const std::vector<int64_t> read = a.versions();
  const std::vector<at::Tensor> before = values(c);
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  plan->add({.fault = Fault::kDrop,
             .kind = FrameKind::kRequest,
             .from = "worker0",
             .to = "worker1",
             .skip = 1,
             .times = 1});
  StepReport of_a;
  std::thread step(
      [&] { of_a = a.try_step(context, {.deadline = absl::Seconds(2), .versions = read}); });
  eventually([&] { return counter(c[2], "optimizer_steps") == 1; }, "applied at worker2");
  expect_error(b.try_step(context, {.versions = {0}}).status, ErrorKind::kState,
               {"between the two phases of another step", "'worker1' not applied"});
  expect_equal(values(c)[0], before[0]);
  step.join();
  // It was asked what became of it: nothing, and nothing will.
  EXPECT_EQ(of_a.owners[0].outcome, StepOutcome::kNotApplied);
  EXPECT_EQ(of_a.owners[1].outcome, StepOutcome::kApplied);
  // Its time is over, and the parameter is free again.
  eventually([&] { return b.try_step(context, {.versions = {0}}).status.ok(); }, "free");
  EXPECT_EQ(a.versions(), (std::vector<int64_t>{1, 1}));
}

TEST_P(DistOptimIsolation, HogwildUpdates) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1, .momentum = 0.5},
                                             {.isolation = Isolation::kHogwild});
  const at::Tensor before = values(c)[0];
  const at::Tensor x = torch::ones({3}, torch::kFloat64);
  for (int i = 0; i < 3; ++i) {
    DistAutogradContext context(c[0]);
    context.backward({c.weights[0].rpc_sync(&Weights::forward, x).sum()});
    optimizer.step(context);
  }
  expect_equal(values(c)[0], before - 1 - 1.5 - 1.75);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimIsolation, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
