// Learning-rate schedules.

#include "weft/dist_optim/lr_scheduler.h"

#include <torch/types.h>

#include <cmath>
#include <numbers>

#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

using DistOptimScheduler = DistOptimTest;

TEST_P(DistOptimScheduler, Rates) {
  OptimCluster c = make();
  DistributedOptimizer<optim::SGD> optimizer(c[0], {c.parameters[0]}, {.lr = 1});
  optimizer.add_param_group({c.parameters[1]}, {.lr = 0.5});
  const auto rates = [&](LRScheduler& schedule, int epochs) {
    std::vector<double> out{optimizer.lr()};
    for (int i = 0; i < epochs; ++i) {
      schedule.step();
      out.push_back(optimizer.lr());
      EXPECT_DOUBLE_EQ(optimizer.lr(1), optimizer.lr() / 2);
    }
    schedule.set_epoch(0);
    EXPECT_EQ(schedule.last_lr(), (std::vector<double>{1, 0.5}));
    return out;
  };
  StepLR steps(optimizer, {.step_size = 2, .gamma = 0.5});
  EXPECT_EQ(rates(steps, 4), (std::vector<double>{1, 1, 0.5, 0.5, 0.25}));
  MultiStepLR milestones(optimizer, {.milestones = {1, 3}, .gamma = 0.5});
  EXPECT_EQ(rates(milestones, 4), (std::vector<double>{1, 0.5, 0.5, 0.25, 0.25}));
  ExponentialLR exponential(optimizer, 0.5);
  EXPECT_EQ(rates(exponential, 3), (std::vector<double>{1, 0.5, 0.25, 0.125}));
  LambdaLR lambda(optimizer, [](int64_t epoch) { return 1.0 / static_cast<double>(1 + epoch); });
  EXPECT_EQ(rates(lambda, 3), (std::vector<double>{1, 0.5, 1.0 / 3, 0.25}));
  CosineAnnealingLR cosine(optimizer, {.t_max = 4});
  const std::vector<double> got = rates(cosine, 4);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], (1 + std::cos(std::numbers::pi * static_cast<double>(i) / 4)) / 2, 1e-15);
  }
  expect_error(error_of([&] { steps.set_epoch(-1); }), ErrorKind::kInvalidArgument, {"-1"});
  expect_error(error_of([&] { StepLR(optimizer, {.step_size = 0}); }), ErrorKind::kInvalidArgument,
               {"step_size"});
}

TEST_P(DistOptimScheduler, Plateau) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  ReduceLROnPlateau plateau(optimizer, {.factor = 0.5, .patience = 1, .cooldown = 1});
  const std::vector<double> metrics = {5, 4, 4, 4, 4, 4, 4, 3};
  std::vector<double> got;
  for (const double metric : metrics) {
    plateau.step(metric);
    got.push_back(optimizer.lr());
  }
  // 5, 4 improve; two that do not are one too many; one that cools down; two again.
  EXPECT_EQ(got, (std::vector<double>{1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25}));
}

// The rate of the moment of the step counts, and costs no message of its own.
TEST_P(DistOptimScheduler, TravelsWithTheStep) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  ExponentialLR schedule(optimizer, 0.5);
  const at::Tensor before = values(c)[0];
  for (int i = 0; i < 3; ++i) {
    DistAutogradContext context(c[0]);
    const at::Tensor x = torch::ones({3}, torch::kFloat64);
    context.backward({c.weights[0].rpc_sync(&Weights::forward, x).sum()});
    optimizer.step(context);
    schedule.step();
  }
  expect_equal(values(c)[0], before - 1.75);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimScheduler, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
