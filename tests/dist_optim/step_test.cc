// Steps that succeed: equal to those of one process (DA-53, DA-54), in how many messages, and what
// they leave alone.

#include <torch/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>
#include <torch/types.h>

#include "weft/dist_optim/update_rule.h"
#include "weft/rref/remote_module.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

using DistOptimStep = DistOptimTest;

// Five steps of both, on the same losses.
template <class Tag, class Local>
void compare(DistOptimTest*, OptimCluster& c, DistributedOptimizer<Tag>& optimizer,
             std::vector<at::Tensor>& local, Local& local_optimizer, const at::Tensor& x,
             const std::function<at::Tensor()>& loss) {
  for (int i = 0; i < 5; ++i) {
    {
      DistAutogradContext context(c[0]);
      context.backward({loss()});
      const StepReport report = optimizer.step(context, {.require_finite = true});
      EXPECT_EQ(report.updated, 2);
    }
    local_optimizer.zero_grad();
    at::matmul(local[1], at::matmul(local[0], x)).sum().backward();
    local_optimizer.step();
  }
}

#define WEFT_COMPARE(tag, options, local_class, local_options)                 \
  do {                                                                         \
    SCOPED_TRACE(#tag);                                                        \
    OptimCluster c = make();                                                   \
    std::vector<at::Tensor> local = values(c);                                 \
    for (at::Tensor & p : local) p.set_requires_grad(true);                    \
    {                                                                          \
      DistributedOptimizer<optim::tag> optimizer(c[0], c.parameters, options); \
      torch::optim::local_class local_optimizer(local, local_options);         \
      compare(this, c, optimizer, local, local_optimizer, input(),             \
              [&] { return loss(c, input()); });                               \
    }                                                                          \
    const std::vector<at::Tensor> got = values(c);                             \
    for (size_t i = 0; i < 2; ++i) expect_close(got[i], local[i].detach());    \
    c.weights.clear();                                                         \
    c.parameters.clear();                                                      \
    expect_none(*c.cluster, "optimizers");                                     \
  } while (false)

TEST_P(DistOptimStep, DA_53_equals_the_local_optimizer) {
  WEFT_COMPARE(Adagrad, {.lr = 0.05}, Adagrad, torch::optim::AdagradOptions(0.05));
  WEFT_COMPARE(Adam, (optim::Adam::Options{.lr = 1e-2, .amsgrad = true}), Adam,
               torch::optim::AdamOptions(1e-2).amsgrad(true));
  WEFT_COMPARE(AdamW, (optim::AdamW::Options{.lr = 0.05, .amsgrad = true}), AdamW,
               torch::optim::AdamWOptions(0.05).amsgrad(true));
  WEFT_COMPARE(SGD, {.lr = 0.05}, SGD, torch::optim::SGDOptions(0.05));
  WEFT_COMPARE(
      SGD, (optim::SGD::Options{.lr = 1e-3, .momentum = 1, .weight_decay = 1, .nesterov = true}),
      SGD, torch::optim::SGDOptions(1e-3).momentum(1).weight_decay(1).nesterov(true));
  WEFT_COMPARE(RMSprop, {.lr = 0.05}, RMSprop, torch::optim::RMSpropOptions(0.05));
}

// LibTorch has no C++ class of these three: against the rule alone, which golden.inc has proved.
TEST_P(DistOptimStep, DA_53_those_that_libtorch_lacks) {
  const auto run = [&]<class Tag>(Tag, const typename Tag::Options& options) {
    SCOPED_TRACE(std::string(Tag::kName));
    OptimCluster c = make();
    std::vector<at::Tensor> local = values(c);
    for (at::Tensor& p : local) p.set_requires_grad(true);
    DistributedOptimizer<Tag> optimizer(c[0], c.parameters, options);
    const auto rule = make_update_rule(std::string(Tag::kName));
    const auto packed = internal::pack_options<Tag>(options);
    std::vector<ParameterState> states(2);
    for (int i = 0; i < 5; ++i) {
      {
        DistAutogradContext context(c[0]);
        context.backward({loss(c, input())});
        optimizer.step(context);
      }
      const auto gradients =
          torch::autograd::grad({at::matmul(local[1], at::matmul(local[0], input())).sum()}, local);
      const at::AutoGradMode no_grad(false);
      for (size_t k = 0; k < 2; ++k) {
        rule->prepare(packed, local[k], &states[k]);
        rule->update(packed, local[k], gradients[k], &states[k]);
      }
    }
    const std::vector<at::Tensor> got = values(c);
    for (size_t k = 0; k < 2; ++k) expect_equal(got[k], local[k].detach());
  };
  run(optim::Adadelta{}, {.rho = 0.95});
  run(optim::Adamax{}, {.lr = 0.05});
  run(optim::Rprop{}, {.lr = 0.05});
}

TEST_P(DistOptimStep, DA_54_none_grads) {
  OptimCluster c = make();
  const std::vector<at::Tensor> before = values(c);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1, .weight_decay = 0.5});
  {
    DistAutogradContext context(c[0]);
    context.backward({c.weights[0].rpc_sync(&Weights::forward, input()).sum()});
    const StepReport report = optimizer.step(context);
    EXPECT_EQ(report.updated, 1);
    EXPECT_EQ(report.owners[0].updated, 1);
    EXPECT_EQ(report.owners[1].updated, 0);
    EXPECT_EQ(report.owners[1].outcome, StepOutcome::kApplied);
  }
  const std::vector<at::Tensor> after = values(c);
  EXPECT_FALSE(torch::equal(before[0], after[0]));
  expect_equal(after[1], before[1]);
  {
    // Nothing is left of the first context.
    DistAutogradContext context(c[0]);
    EXPECT_EQ(optimizer.step(context).updated, 0);
  }
  expect_equal(values(c)[0], after[0]);
}

// RPC-132: parameters of a remote module are what an optimizer takes.
TEST_P(DistOptimStep, RPC_132_get_module_rref) {
  module_<torch::nn::Linear>(library_, "Linear")
      .constructor<int64_t, int64_t>()
      .def("forward", &torch::nn::LinearImpl::forward);
  OptimCluster c = make(1);
  RemoteModule<torch::nn::Linear> layer(c[0], "worker1", 3, 2);
  const auto before = layer.state_dict();
  DistributedOptimizer<optim::SGD> optimizer(c[0], layer.parameters(), {.lr = 0.5});
  DistAutogradContext context(c[0]);
  const at::Tensor x = torch::ones({4, 3});
  context.backward({layer.forward(x).sum()});
  EXPECT_EQ(optimizer.step(context).updated, 2);
  const auto after = layer.state_dict();
  expect_equal(after.at("bias"), before.at("bias") - 2.0);
  expect_equal(after.at("weight"), before.at("weight") - 2.0);
}

// OPT-6
TEST_P(DistOptimStep, GradIsNotTouchedAndGradientsOfOthersStayValid) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 0.5});
  const at::Tensor x = input().set_requires_grad(true);
  DistAutogradContext context(c[0]);
  const at::Tensor one = c.weights[0].rpc_sync(&Weights::forward, x).sum();
  const at::Tensor two = c.weights[0].rpc_sync(&Weights::forward, x).sum();
  context.backward({one});
  optimizer.step(context);
  // Its node has saved the weights that were updated meanwhile.
  context.backward({two});
  optimizer.step(context);
  EXPECT_FALSE(c.weights[0].rpc_sync(&Weights::has_grad));
  EXPECT_EQ(optimizer.versions(), (std::vector<int64_t>{2}));
}

TEST_P(DistOptimStep, ParametersOfOneOwnerTakeOneMessageSeveralTwoEach) {
  OptimCluster c = make(2);
  DistributedOptimizer<optim::SGD> one(c[0], {c.parameters[0]}, {.lr = 0.1});
  DistributedOptimizer<optim::SGD> two(c[0], c.parameters, {.lr = 0.1});
  DistAutogradContext context(c[0]);
  context.backward({loss(c, input())});
  const int64_t a = c.calls->to(1);
  const int64_t b = c.calls->to(2);
  one.step(context);
  EXPECT_EQ(c.calls->to(1), a + 1);
  EXPECT_EQ(c.calls->to(2), b);
  two.step(context);
  EXPECT_EQ(c.calls->to(1), a + 3);
  EXPECT_EQ(c.calls->to(2), b + 2);
}

// OPT-7: local parameters take no message, and one other owner decides in one message.
TEST_P(DistOptimStep, ParametersOfThisWorkerTakeNoMessage) {
  OptimCluster c = make(2);
  const at::Tensor mine = torch::ones({2}, torch::kFloat64).set_requires_grad(true);
  const auto here = RRef<at::Tensor>::local(c[0], mine);
  DistributedOptimizer<optim::SGD> alone(c[0], {here}, {.lr = 0.5});
  DistributedOptimizer<optim::SGD> both(c[0], {c.parameters[0], here}, {.lr = 0.5});
  const int64_t self = c.calls->to(0);
  const int64_t other = c.calls->to(1);
  {
    DistAutogradContext context(c[0]);
    context.backward({mine.sum()});
    EXPECT_EQ(alone.step(context).updated, 1);
    EXPECT_TRUE(torch::equal(mine, torch::full({2}, 0.5, torch::kFloat64)));
    EXPECT_EQ(both.step(context).updated, 1);
    EXPECT_TRUE(torch::equal(mine, torch::zeros({2}, torch::kFloat64)));
    EXPECT_EQ(c.calls->to(0), self);
    EXPECT_EQ(c.calls->to(1), other + 1);
    // Refused here: no other owner is asked. Refused there: what is here stays as it is.
    const std::vector<int64_t> versions = both.versions();
    const int64_t asked = c.calls->to(1);
    const StepReport late = both.try_step(context, {.deadline = std::chrono::nanoseconds(1)});
    EXPECT_EQ(error_kind(late.status), ErrorKind::kDeadline);
    EXPECT_EQ(c.calls->to(1), asked);
    EXPECT_EQ(both.versions(), versions);
    EXPECT_EQ(counter(c[0], "optimizer_reservations"), 0);
  }
}

TEST_P(DistOptimStep, AsyncAndGroups) {
  OptimCluster c = make();
  const std::vector<at::Tensor> before = values(c);
  DistributedOptimizer<optim::SGD> optimizer(c[0], {c.parameters[0]}, {.lr = 1});
  optimizer.add_param_group({c.parameters[1]}, {.lr = 0.25});
  EXPECT_EQ(optimizer.num_param_groups(), 2U);
  EXPECT_EQ(optimizer.lr(1), 0.25);
  optimizer.set_lr(0.5, 1);
  at::Tensor g0;
  {
    DistAutogradContext context(c[0]);
    const at::Tensor y = c.weights[0].rpc_sync(&Weights::forward, input());
    const at::Tensor z = c.weights[1].rpc_sync(&Weights::forward, input());
    context.backward({y.sum() + z.sum()});
    const StepReport report = optimizer.step_async(context).wait();
    EXPECT_TRUE(report.status.ok()) << report.status;
    EXPECT_EQ(report.updated, 2);
  }
  const std::vector<at::Tensor> after = values(c);
  const at::Tensor g = input().unsqueeze(0).expand({3, 3});
  expect_equal(after[0], before[0] - g);
  expect_equal(after[1], before[1] - 0.5 * g);
}

TEST_P(DistOptimStep, NoParameters) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::Adam> optimizer(c[0], {});
  DistAutogradContext context(c[0]);
  const StepReport report = optimizer.step(context);
  EXPECT_EQ(report.updated, 0);
  EXPECT_TRUE(report.owners.empty());
}

TEST_P(DistOptimStep, OwnParametersAndSparseOnes) {
  OptimCluster c = make(1);
  const at::Tensor mine = torch::ones({3}, torch::kFloat64).set_requires_grad(true);
  std::vector<RRef<at::Tensor>> parameters = c.parameters;
  parameters.push_back(RRef<at::Tensor>::local(c[0], mine));
  DistributedOptimizer<optim::Adagrad> optimizer(c[0], parameters, {.lr = 1});
  const at::Tensor before = values(c)[0];
  DistAutogradContext context(c[0]);
  const at::Tensor ids = torch::tensor({2, 2}, torch::kLong);
  const at::Tensor rows = c.weights[0].rpc_sync(&Weights::rows, ids, true);
  context.backward({(rows * mine).sum()});
  EXPECT_EQ(optimizer.step(context).updated, 2);
  const at::Tensor after = values(c)[0];
  expect_equal(after.slice(0, 0, 2), before.slice(0, 0, 2));
  expect_close(after[2], before[2] - 2 / (2 + 1e-10));
  EXPECT_FALSE(torch::equal(mine.detach(), torch::ones({3}, torch::kFloat64)));
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimStep, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
