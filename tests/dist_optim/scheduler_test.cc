// Learning-rate schedules.

#include "weft/dist_optim/lr_scheduler.h"

#include <torch/types.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "weft/dist_optim/lr_cycles.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

using DistOptimScheduler = DistOptimTest;

// Rates and momenta of torch.optim.SGD(lr=0.75, momentum=0.25) under a schedule (golden.py).
struct GoldenSchedule {
  std::string name;
  std::vector<double> rates;
  std::vector<double> momenta;
};
const GoldenSchedule kGoldenSchedules[] = {
#include "golden_schedules.inc"
};

using Sgd = DistributedOptimizer<optim::SGD>;
using Schedules = std::vector<std::unique_ptr<LRScheduler>>;
// All of golden.py's; the last one made is what is stepped when the others are its parts.
const std::map<std::string, std::function<Schedules(Sgd&)>>& schedules() {
  const auto one = []<class S>(std::unique_ptr<S> made) {
    Schedules out;
    out.push_back(std::move(made));
    return out;
  };
  static const std::map<std::string, std::function<Schedules(Sgd&)>> all = {
      {"linear", [one](Sgd& o) { return one(std::make_unique<LinearLR>(o)); }},
      {"linear_down",
       [one](Sgd& o) {
         return one(std::make_unique<LinearLR>(
             o, LinearLROptions{.start_factor = 0.5, .end_factor = 0.25, .total_iters = 4}));
       }},
      {"constant",
       [one](Sgd& o) {
         return one(
             std::make_unique<ConstantLR>(o, ConstantLROptions{.factor = 0.25, .total_iters = 3}));
       }},
      {"polynomial",
       [one](Sgd& o) {
         return one(
             std::make_unique<PolynomialLR>(o, PolynomialLROptions{.total_iters = 4, .power = 2}));
       }},
      {"restarts",
       [one](Sgd& o) {
         return one(std::make_unique<CosineAnnealingWarmRestarts>(
             o, CosineAnnealingWarmRestartsOptions{.t_0 = 3}));
       }},
      {"restarts_longer",
       [one](Sgd& o) {
         return one(std::make_unique<CosineAnnealingWarmRestarts>(
             o, CosineAnnealingWarmRestartsOptions{.t_0 = 2, .t_mult = 2, .eta_min = 0.125}));
       }},
      {"cyclic",
       [one](Sgd& o) {
         return one(std::make_unique<CyclicLR>(
             o, CyclicLROptions{.base_lr = {0.1}, .max_lr = {0.5}, .step_size_up = 3}));
       }},
      {"cyclic_2",
       [one](Sgd& o) {
         return one(std::make_unique<CyclicLR>(o, CyclicLROptions{.base_lr = {0.1},
                                                                  .max_lr = {0.5},
                                                                  .step_size_up = 2,
                                                                  .step_size_down = 3,
                                                                  .mode = CyclicMode::kTriangular2,
                                                                  .base_momentum = 0.5,
                                                                  .max_momentum = 0.75}));
       }},
      {"cyclic_exp",
       [one](Sgd& o) {
         return one(std::make_unique<CyclicLR>(o, CyclicLROptions{.base_lr = {0.1},
                                                                  .max_lr = {0.5},
                                                                  .step_size_up = 2,
                                                                  .mode = CyclicMode::kExpRange,
                                                                  .gamma = 0.9,
                                                                  .cycle_momentum = false}));
       }},
      {"cyclic_own",
       [one](Sgd& o) {
         return one(std::make_unique<CyclicLR>(
             o, CyclicLROptions{.base_lr = {0.1},
                                .max_lr = {0.5},
                                .step_size_up = 2,
                                .scale_fn = [](double x) { return 1 / (5 + x); },
                                .scale_mode = CyclicScaleMode::kIterations}));
       }},
      {"one_cycle",
       [one](Sgd& o) {
         return one(std::make_unique<OneCycleLR>(
             o, OneCycleLROptions{.max_lr = {0.5}, .total_steps = 12}));
       }},
      {"one_cycle_three",
       [one](Sgd& o) {
         return one(std::make_unique<OneCycleLR>(
             o, OneCycleLROptions{.max_lr = {0.5},
                                  .epochs = 4,
                                  .steps_per_epoch = 3,
                                  .anneal_strategy = AnnealStrategy::kLinear,
                                  .three_phase = true}));
       }},
      {"sequential",
       [](Sgd& o) {
         Schedules out;
         out.push_back(
             std::make_unique<ConstantLR>(o, ConstantLROptions{.factor = 0.1, .total_iters = 2}));
         out.push_back(std::make_unique<ExponentialLR>(o, 0.9));
         out.push_back(std::make_unique<CosineAnnealingWarmRestarts>(
             o, CosineAnnealingWarmRestartsOptions{.t_0 = 2}));
         std::vector<LRScheduler*> parts;
         for (const auto& part : out) parts.push_back(part.get());
         out.push_back(std::make_unique<SequentialLR>(o, parts, std::vector<int64_t>{3, 6}));
         return out;
       }},
      {"chained",
       [](Sgd& o) {
         Schedules out;
         out.push_back(std::make_unique<LinearLR>(o, LinearLROptions{.total_iters = 3}));
         out.push_back(std::make_unique<ExponentialLR>(o, 0.9));
         return out;
       }},
      {"chained_polynomial",
       [](Sgd& o) {
         Schedules out;
         out.push_back(std::make_unique<ConstantLR>(o, ConstantLROptions{.total_iters = 2}));
         out.push_back(std::make_unique<PolynomialLR>(o, PolynomialLROptions{.total_iters = 8}));
         return out;
       }},
  };
  return all;
}

// Two groups, one of them with half of the rate where the schedule does not set it.
TEST_P(DistOptimScheduler, DEF_32_schedules_as_in_python) {
  OptimCluster c = make();
  size_t seen = 0;
  for (const GoldenSchedule& golden : kGoldenSchedules) {
    SCOPED_TRACE(golden.name);
    const auto make_schedules = schedules().find(golden.name);
    ASSERT_NE(make_schedules, schedules().end());
    Sgd optimizer(c[0], {c.parameters[0]}, {.lr = 0.75, .momentum = 0.25});
    optimizer.add_param_group({c.parameters[1]}, {.lr = 0.375, .momentum = 0.25});
    const Schedules made = make_schedules->second(optimizer);
    const bool sets = golden.name.starts_with("cyclic") || golden.name.starts_with("one_cycle");
    for (size_t i = 0; i < golden.rates.size(); ++i) {
      const double want = std::max(golden.rates[i], 0.0);
      EXPECT_NEAR(optimizer.lr(0), want, 1e-14) << i;
      EXPECT_NEAR(optimizer.lr(1), sets ? want : want / 2,
                  golden.name == "restarts_longer" ? 1 : 1e-14)
          << i;
      EXPECT_NEAR(optimizer.options(0).momentum, golden.momenta[i], 1e-14) << i;
      EXPECT_EQ(optimizer.options(1).momentum, optimizer.options(0).momentum) << i;
      if (i + 1 == golden.rates.size()) continue;
      if (golden.name == "sequential") {
        made.back()->step();
      } else {
        for (const auto& one : made) one->step();
      }
    }
    ++seen;
  }
  EXPECT_EQ(seen, schedules().size());
}

// Each says what is wrong, and changes nothing.
TEST_P(DistOptimScheduler, DEF_32_wrong_schedules_are_refused) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::Adadelta> optimizer(c[0], c.parameters, {.lr = 1});
  const auto refused = [&](const std::function<void()>& fn, const std::vector<std::string>& words) {
    expect_error(error_of(fn), ErrorKind::kInvalidArgument, words);
    EXPECT_EQ(optimizer.lr(), 1);
  };
  refused([&] { LinearLR(optimizer, {.start_factor = 0}); }, {"LinearLR", "start_factor is 0"});
  refused([&] { LinearLR(optimizer, {.end_factor = 2}); }, {"LinearLR", "end_factor is 2"});
  refused([&] { LinearLR(optimizer, {.total_iters = 0}); }, {"LinearLR", "total_iters is 0"});
  refused([&] { ConstantLR(optimizer, {.factor = 1.5}); }, {"ConstantLR", "factor is 1.5"});
  refused([&] { PolynomialLR(optimizer, {.total_iters = -1}); }, {"PolynomialLR", "-1"});
  refused([&] { CosineAnnealingWarmRestarts(optimizer, {.t_0 = 0}); }, {"t_0 is 0"});
  refused([&] { CosineAnnealingWarmRestarts(optimizer, {.t_mult = 0}); }, {"t_mult is 0"});
  refused([&] { CyclicLR(optimizer, {.base_lr = {0.1}, .max_lr = {0.5}}); },
          {"CyclicLR", "neither momentum nor beta1", "cycle_momentum to false"});
  refused([&] { CyclicLR(optimizer, {.base_lr = {0.1}, .cycle_momentum = false}); },
          {"max_lr has 0 values"});
  refused([&] { OneCycleLR(optimizer, {.max_lr = {0.5}, .cycle_momentum = false}); },
          {"OneCycleLR", "total_steps is 0", "epochs and steps_per_epoch"});
  ExponentialLR exponential(optimizer, 0.5);
  refused([&] { SequentialLR(optimizer, {&exponential}, {1}); }, {"1 schedules and 1 milestones"});
  refused([&] { SequentialLR(optimizer, {&exponential, &exponential}, {0}); }, {"are 0"});
  DistributedOptimizer<optim::SGD> other(c[0], c.parameters, {.lr = 1});
  refused([&] { SequentialLR(other, {&exponential}, {}); }, {"another optimizer"});
  OneCycleLR short_one(optimizer, {.max_lr = {0.5}, .total_steps = 2, .cycle_momentum = false});
  short_one.step();
  short_one.step();
  const double last = optimizer.lr();
  expect_error(error_of([&] { short_one.step(); }), ErrorKind::kInvalidArgument,
               {"step 3 of 2", "total_steps"});
  EXPECT_EQ(optimizer.lr(), last);
  EXPECT_EQ(short_one.epoch(), 2);
}

// To go on later: the same rates, then the epoch.
TEST_P(DistOptimScheduler, DEF_32_a_sequence_goes_on_from_an_epoch) {
  OptimCluster c = make(1);
  const auto at = [&c](int64_t epoch, bool step_by_step) {
    Sgd optimizer(c[0], c.parameters, {.lr = 0.75, .momentum = 0.25});
    const Schedules made = schedules().at("sequential")(optimizer);
    for (int64_t i = 0; i < epoch && step_by_step; ++i) made.back()->step();
    if (!step_by_step) made.back()->set_epoch(epoch);
    EXPECT_EQ(made.back()->epoch(), epoch);
    return optimizer.lr();
  };
  for (int64_t epoch = 0; epoch < 10; ++epoch)
    EXPECT_NEAR(at(epoch, true), at(epoch, false), 1e-14);
}

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
