// Steps within a backward: what they compute, what they keep, what they cost, and how they fail.

#include <torch/autograd.h>
#include <torch/optim.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>
#include <thread>

#include "torch/csrc/autograd/variable.h"
#include "weft/collectives/grad_accessor.h"
#include "weft/dist_optim/update_rule.h"
#include "weft/dist_optim/user_optimizer.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

// Halves what comes, at the end of the backward.
class HalveAtEnd final : public GradReadyHook {
 public:
  explicit HalveAtEnd(at::Tensor parameter) : parameter_(std::move(parameter)) {}
  void on_grad_ready(const std::shared_ptr<GradAccessor>& of) override {
    of->at_end([of, parameter = parameter_] {
      of->with_grad(parameter, [](at::Tensor& grad) {
        grad = grad / 2;
        return true;
      });
    });
  }

 private:
  const at::Tensor parameter_;
};

class DistOptimFused : public DistOptimTest {
 protected:
  DistOptimFused() { optimizer_<torch::optim::Adam, double>(library_, "Adam"); }

  // And one of the trainer's own.
  static at::Tensor add_own(OptimCluster& c) {
    at::Tensor own = torch::tensor({3.0, -1.0, 2.0}, torch::kFloat64).set_requires_grad(true);
    c.parameters.push_back(RRef<at::Tensor>::local(c[0], own));
    return own;
  }
};

TEST_P(DistOptimFused, EqualsABackwardAndAStep) {
  const auto run = [&]<class Tag>(Tag, const typename Tag::Options& options) {
    SCOPED_TRACE(std::string(Tag::kName));
    OptimCluster c = make();
    std::vector<at::Tensor> local = values(c);
    const at::Tensor own = add_own(c);
    local.push_back(own.detach().clone());
    for (at::Tensor& p : local) p.set_requires_grad(true);
    DistributedOptimizer<Tag> optimizer(c[0], c.parameters, options);
    const auto rule = make_update_rule(std::string(Tag::kName));
    const auto packed = internal::pack_options<Tag>(options);
    std::vector<ParameterState> states(local.size());
    for (int i = 0; i < 5; ++i) {
      {
        DistAutogradContext context(c[0]);
        const StepReport report =
            optimizer.backward_and_step(context, {loss(c, own * input())}, {}, {});
        EXPECT_EQ(report.updated, 3);
        for (const OwnerReport& one : report.owners) {
          EXPECT_EQ(one.outcome, StepOutcome::kApplied);
          EXPECT_EQ(one.versions, std::vector<int64_t>{i + 1});
        }
        EXPECT_TRUE(context.gradients().empty());
        EXPECT_EQ(optimizer.step(context).updated, 0);
      }
      const at::Tensor loss = at::matmul(local[1], at::matmul(local[0], local[2] * input())).sum();
      const auto gradients = torch::autograd::grad({loss}, local);
      const at::AutoGradMode no_grad(false);
      for (size_t k = 0; k < local.size(); ++k) {
        rule->prepare(packed, local[k], &states[k]);
        rule->update(packed, local[k], gradients[k], &states[k]);
      }
    }
    const std::vector<at::Tensor> got = values(c);
    for (size_t k = 0; k < 2; ++k) expect_equal(got[k], local[k].detach());
    expect_equal(own.detach(), local[2].detach());
    EXPECT_FALSE(own.grad().defined());
    EXPECT_FALSE(c.weights[0].rpc_sync(&Weights::has_grad));
    expect_none(*c.cluster, "num_autograd_contexts");
  };
  run(optim::SGD{}, {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1});
  run(optim::Adam{}, {.lr = 1e-2, .amsgrad = true});
  run(optim::AdamW{}, {.lr = 0.05});
  run(optim::Adagrad{}, {.lr = 0.05});
  run(optim::RMSprop{}, {.lr = 0.05});
  run(optim::Adadelta{}, {.rho = 0.95});
  run(optim::Adamax{}, {.lr = 0.05});
  run(optim::Rprop{}, {.lr = 0.05});
}

// As many messages as the backward alone.
TEST_P(DistOptimFused, TakesNoMessageOfItsOwn) {
  auto plan = std::make_shared<FaultPlan>(1);
  OptimCluster c = make(1, plan);
  const at::Tensor own = add_own(c);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 0.1});
  const auto requests = [&](bool fused) {
    DistAutogradContext context(c[0]);
    const at::Tensor l = loss(c, own * input());
    const int id = plan->add({.fault = Fault::kNone, .kind = FrameKind::kRequest});
    if (fused) {
      EXPECT_EQ(optimizer.backward_and_step(context, {l}).updated, 2);
    } else {
      context.backward({l});
    }
    const int64_t hits = plan->hits(id);
    plan->remove(id);
    context.release().wait();
    return hits;
  };
  // What was set up before may still be confirmed at first.
  int64_t apart = 100;
  int64_t fused = 100;
  for (int i = 0; i < 5; ++i) {
    apart = std::min(apart, requests(false));
    fused = std::min(fused, requests(true));
  }
  EXPECT_EQ(apart, 2);
  EXPECT_EQ(fused, 2);
}

TEST_P(DistOptimFused, AParameterOfSeveralMessagesIsUpdatedOnceWithTheirSum) {
  for (const BackwardMode mode : {BackwardMode::kExact, BackwardMode::kFast}) {
    OptimCluster c = make(1);
    DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 0.1});
    at::Tensor w = values(c)[0].set_requires_grad(true);
    {
      DistAutogradContext context(c[0]);
      at::Tensor y = input();
      for (int i = 0; i < 3; ++i) y = c.weights[0].rpc_sync(&Weights::forward, y);
      EXPECT_EQ(optimizer.backward_and_step(context, {y.sum()}, {.mode = mode}).updated, 1);
    }
    const at::Tensor y = at::matmul(w, at::matmul(w, at::matmul(w, input())));
    const at::Tensor g = torch::autograd::grad({y.sum()}, {w})[0];
    expect_close(values(c)[0], (w - g * 0.1).detach());
    EXPECT_EQ(optimizer.versions(), std::vector<int64_t>{1});
  }
}

// What a loss does not depend on stays as it is; so does a leaf of no optimizer.
TEST_P(DistOptimFused, OnlyItsParametersAndOnlyThoseThatAreReached) {
  OptimCluster c = make();
  const std::vector<at::Tensor> before = values(c);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  at::Tensor x = input().set_requires_grad(true);
  {
    DistAutogradContext context(c[0]);
    const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, x).sum();
    (void)c.weights[1].rpc_sync(&Weights::forward, x);  // not used
    const StepReport report = optimizer.backward_and_step(context, {y});
    EXPECT_EQ(report.updated, 1);
    EXPECT_EQ(report.owners[1].updated, 0);
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kApplied);
    expect_close(context.gradient(x), before[0].sum(0));
  }
  const std::vector<at::Tensor> after = values(c);
  expect_equal(after[0], before[0] - input().detach().expand({3, 3}));
  expect_equal(after[1], before[1]);
}

TEST_P(DistOptimFused, AReducerComesFirst) {
  OptimCluster c = make(1);
  at::Tensor own = add_own(c);
  const at::Tensor start = own.detach().clone();
  const auto accumulator = torch::autograd::impl::grad_accumulator(own);
  accumulator->add_post_hook(std::make_unique<HalveAtEnd>(own));
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  {
    DistAutogradContext context(c[0]);
    EXPECT_EQ(optimizer.backward_and_step(context, {(own * input()).sum()}).updated, 1);
  }
  expect_equal(own.detach(), start - input() / 2);
}

// A class of the user is not asked parameter by parameter.
TEST_P(DistOptimFused, AUsersClassStepsOncePerOwner) {
  OptimCluster c = make();
  at::Tensor own = add_own(c);
  c.parameters.push_back(RRef<at::Tensor>::local(
      c[0], torch::full({3}, 2.0, torch::kFloat64).set_requires_grad(true)));
  const at::Tensor other = *c.parameters.back().local_value();
  std::vector<at::Tensor> local = values(c);
  for (const at::Tensor& one : {own, other}) local.push_back(one.detach().clone());
  for (at::Tensor& p : local) p.set_requires_grad(true);
  DistributedOptimizer<torch::optim::Adam> optimizer(c[0], c.parameters, {}, 0.1);
  torch::optim::Adam local_optimizer(local, torch::optim::AdamOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    DistAutogradContext context(c[0]);
    EXPECT_EQ(optimizer.backward_and_step(context, {loss(c, own * other * input())}).updated, 4);
    local_optimizer.zero_grad();
    at::matmul(local[1], at::matmul(local[0], local[2] * local[3] * input())).sum().backward();
    local_optimizer.step();
  }
  const std::vector<at::Tensor> got = values(c);
  for (size_t k = 0; k < 2; ++k) expect_close(got[k], local[k].detach());
  expect_close(own.detach(), local[2].detach());
  expect_close(other.detach(), local[3].detach());
}

TEST_P(DistOptimFused, StepsOfManyTrainersAddUp) {
  OptimCluster c = make(1);
  const at::Tensor before = values(c)[0];
  constexpr int kTrainers = 4;
  constexpr int kSteps = 25;
  std::vector<std::thread> trainers;
  for (int t = 0; t < kTrainers; ++t) {
    trainers.emplace_back([&] {
      DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 0.25});
      for (int i = 0; i < kSteps; ++i) {
        DistAutogradContext context(c[0]);
        const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, input()).sum();
        optimizer.backward_and_step(context, {y});
      }
    });
  }
  for (std::thread& one : trainers) one.join();
  const at::Tensor sum = input().expand({3, 3}) * (0.25 * kTrainers * kSteps);
  expect_equal(values(c)[0], before - sum);
  expect_none(*c.cluster, "optimizers");
}

TEST_P(DistOptimFused, X13_a_failure_lists_what_is_known_of_each_owner) {
  OptimCluster c = make(3);
  const std::vector<at::Tensor> before = values(c);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  {
    // Finite where it enters, infinite at the middle owner.
    DistAutogradContext context(c[0]);
    const at::Tensor big = torch::full({3}, std::numeric_limits<double>::max(), torch::kFloat64);
    const at::Tensor fine = c.weights[0].rpc_sync(&Weights::forward, input()).sum();
    const at::Tensor bad = (c.weights[1].rpc_sync(&Weights::forward, big) * 4).sum();
    const StepReport report =
        optimizer.try_backward_and_step(context, {fine + bad}, {}, {.require_finite = true});
    expect_error(
        report.status, ErrorKind::kInvalidArgument,
        {"step 1 of optimizer SGD, in its backward", "on worker 'worker2'",
         "parameter 0 of this owner", "not finite", "'worker2' unknown", "'worker3' unknown"});
    EXPECT_EQ(error_details(report.status).origin, "worker2");
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kUnknown);
    // When a step fails, the versions show what it has updated.
    const std::vector<int64_t> versions = optimizer.versions();
    const std::vector<at::Tensor> after = values(c);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(torch::equal(after[i], before[i]), versions[i] == 0) << i;
    }
    EXPECT_EQ(versions[1], 0);
    EXPECT_EQ(versions[2], 0);
  }
  expect_none(*c.cluster, "num_autograd_contexts");
}

TEST_P(DistOptimFused, BadInput) {
  OptimCluster c = make(1);
  const std::vector<at::Tensor> before = values(c);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  DistributedOptimizer<optim::SGD> versioned(c[0], c.parameters, {.lr = 1},
                                             {.isolation = Isolation::kVersioned});
  {
    DistAutogradContext context(c[0]);
    const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, input()).sum();
    const auto error = [&](auto& of, const BackwardOptions& backward, const StepOptions& step) {
      return error_of([&] { of.backward_and_step(context, {y}, backward, step); });
    };
    const ErrorKind kind = ErrorKind::kInvalidArgument;
    expect_error(error(optimizer, {.retain_graph = true}, {}), kind, {"retain_graph"});
    expect_error(error(optimizer, {}, {.versions = {0}}), kind, {"versions"});
    expect_error(error(versioned, {}, {}), kind, {"versions", "backward() and step()"});
    expect_error(error_of([&] { optimizer.backward_and_step(context, {}); }), kind, {"no losses"});
    context.release().wait();
    expect_error(error(optimizer, {}, {}), ErrorKind::kState, {"has been released"});
  }
  expect_equal(values(c)[0], before[0]);
  // A part that is gone affects no other optimizer.
  {
    DistAutogradContext context(c[0]);
    const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, input()).sum();
    DistributedOptimizer<optim::SGD>(c[0], c.parameters, {.lr = 1}).backward_and_step(context, {y});
  }
  expect_equal(values(c)[0], before[0] - input().expand({3, 3}));
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimFused, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
