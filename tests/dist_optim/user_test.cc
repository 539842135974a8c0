// Optimizers of users: their own classes, one step at a time, with their errors (X13, DA-55,
// DA-56).

#include "weft/dist_optim/user_optimizer.h"

#include <torch/optim.h>
#include <torch/types.h>

#include <atomic>
#include <functional>
#include <limits>
#include <thread>

#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

std::atomic<int> steps_under_way{0};
std::atomic<int> steps_at_once{0};
// What a step does first.
std::function<void()> at_step;

// p -= rate * sign(g); can be told to fail.
class SignDescent : public torch::optim::Optimizer {
 public:
  SignDescent(std::vector<at::Tensor> parameters, double rate, int64_t fail_after)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(rate)),
        fail_after_(fail_after) {
    if (rate < 0) throw std::invalid_argument("a negative rate");
  }
  at::Tensor step(LossClosure) override {
    steps_at_once = std::max(steps_at_once.load(), ++steps_under_way);
    if (at_step != nullptr) at_step();
    const at::AutoGradMode no_grad(false);
    int64_t done = 0;
    for (auto& group : param_groups()) {
      for (at::Tensor& p : group.params()) {
        if (!p.grad().defined()) continue;
        if (done++ == fail_after_) {
          --steps_under_way;
          throw std::range_error("no more");
        }
        p.sub_(p.grad().sign(), group.options().get_lr());
      }
    }
    --steps_under_way;
    return {};
  }

 private:
  const int64_t fail_after_;
};

class DistOptimUser : public DistOptimTest {
 protected:
  DistOptimUser() {
    optimizer_<SignDescent, double, int64_t>(library_, "SignDescent");
    optimizer_<torch::optim::Adam, double>(library_, "Adam");
  }
};

TEST_P(DistOptimUser, Steps) {
  OptimCluster c = make();
  DistributedOptimizer<SignDescent> optimizer(c[0], c.parameters, {}, 0.5, int64_t{-1});
  const std::vector<at::Tensor> before = values(c);
  for (int i = 0; i < 2; ++i) {
    DistAutogradContext context(c[0]);
    const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, input());
    context.backward({y.sum()});
    EXPECT_EQ(optimizer.step(context).updated, 1);
    optimizer.set_lr(0.25);
  }
  const at::Tensor sign = input().sign().unsqueeze(0).expand({3, 3});
  expect_equal(values(c)[0], before[0] - 0.75 * sign);
  // The second owner never had a gradient; no `.grad` anywhere.
  expect_equal(values(c)[1], before[1]);
  EXPECT_FALSE(c.weights[0].rpc_sync(&Weights::has_grad));
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{2, 0}));
}

// Also for a user's class. The trainer refuses it, so that no owner is asked and nothing changes.
TEST_P(DistOptimUser, DA_55_a_rate_that_is_none_is_refused) {
  OptimCluster c = make(1);
  DistributedOptimizer<SignDescent> optimizer(c[0], c.parameters, {}, 0.5, int64_t{-1});
  const at::Tensor before = values(c)[0];
  for (const double rate : {-0.5, std::numeric_limits<double>::quiet_NaN()}) {
    DistAutogradContext context(c[0]);
    context.backward({loss(c, input())});
    expect_error(error_of([&] {
                   optimizer.set_lr(rate);
                   optimizer.step(context);
                 }),
                 ErrorKind::kInvalidArgument, {"finite and not negative"});
    expect_equal(values(c)[0], before);
  }
  EXPECT_EQ(optimizer.versions(), std::vector<int64_t>{0});
}

TEST_P(DistOptimUser, LibTorchsOwnClassEqualsOurs) {
  OptimCluster ours = make();
  {
    DistributedOptimizer<optim::Adam> a(ours[0], ours.parameters, {.lr = 0.1});
    DistAutogradContext context(ours[0]);
    context.backward({loss(ours, input())});
    a.step(context);
  }
  OptimCluster theirs = make();
  DistributedOptimizer<torch::optim::Adam> b(theirs[0], theirs.parameters, {}, 0.1);
  {
    DistAutogradContext context(theirs[0]);
    context.backward({loss(theirs, input())});
    b.step(context);
  }
  for (size_t i = 0; i < 2; ++i) expect_close(values(theirs)[i], values(ours)[i]);
  // Its state is an archive for each owner.
  const auto state = b.state_dict();
  ASSERT_EQ(state.size(), 2U);
  b.load_state_dict(state);
}

TEST_P(DistOptimUser, DA_56_errors_of_its_constructor) {
  OptimCluster c = make();
  expect_error(error_of([&] {
                 DistributedOptimizer<SignDescent> optimizer(c[0], c.parameters, {}, -1.0,
                                                             int64_t{0});
               }),
               ErrorKind::kUser, {"owner 'worker1'", "a negative rate"});
  expect_none(*c.cluster, "optimizers");
}

// X13: both owners fail while they apply, one of them before its first parameter.
TEST_P(DistOptimUser, X13_outcomes_match_versions) {
  OptimCluster c = make(2);
  const auto second = remote<Weights>(c[0], 2, torch::ones({3, 3}, torch::kFloat64));
  std::vector<RRef<at::Tensor>> parameters = c.parameters;
  parameters.push_back(second.rpc_sync(&Weights::parameter));
  DistributedOptimizer<SignDescent> optimizer(c[0], parameters, {}, 0.5, int64_t{1});
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input()) + second.rpc_sync(&Weights::forward, input()).sum()});
  const StepReport report = optimizer.try_step(context);
  expect_error(report.status, ErrorKind::kUser,
               {"owner 'worker2'", "no more", "'worker1' applied, 'worker2' partly applied"});
  EXPECT_EQ(report.owners[0].outcome, StepOutcome::kApplied);
  EXPECT_EQ(report.owners[1].outcome, StepOutcome::kPartlyApplied);
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{1, 1, 0}));
  DistributedOptimizer<SignDescent> never(c[0], parameters, {}, 0.5, int64_t{0});
  expect_error(never.try_step(context).status, ErrorKind::kUser,
               {"'worker1' not applied, 'worker2' not applied"});
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{1, 1, 0}));
}

// OPT-1. The first step goes on when another one waits for it, or is beside it. Optimizers wait for
// each other while they are made, too: what is counted begins after that.
TEST_P(DistOptimUser, OPT_1_one_step_at_a_time) {
  OptimCluster c = make(1);
  const at::Tensor before = values(c)[0];
  std::vector<std::unique_ptr<DistributedOptimizer<SignDescent>>> optimizers;
  for (int t = 0; t < 2; ++t) {
    optimizers.push_back(std::make_unique<DistributedOptimizer<SignDescent>>(
        c[0], c.parameters, OptimizerOptions{}, 0.5, int64_t{-1}));
  }
  const int64_t waits = counter(c[1], "optimizer_lock_waits");
  steps_at_once = 0;
  at_step = [&] {
    eventually(
        [&] { return steps_under_way == 2 || counter(c[1], "optimizer_lock_waits") > waits; },
        "the other step has come");
  };
  std::vector<std::thread> threads;
  const at::Tensor x = torch::ones({3}, torch::kFloat64);
  for (const auto& optimizer : optimizers) {
    threads.emplace_back([&] {
      DistAutogradContext context(c[0]);
      context.backward({c.weights[0].rpc_sync(&Weights::forward, x).sum()});
      optimizer->step(context);
    });
  }
  for (std::thread& thread : threads) thread.join();
  at_step = nullptr;
  EXPECT_EQ(steps_at_once.load(), 1);
  expect_equal(values(c)[0], before - 1);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimUser, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
