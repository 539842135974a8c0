// DEF_31: rates and state that PyTorch's users expect, and a state_dict that is not of the optimizer.

#include <torch/types.h>

#include <limits>

#include "weft/dist_optim/lr_scheduler.h"
#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

class DistOptimNumerics : public DistOptimTest {
 protected:
  template <class T>
  static void step(OptimCluster& c, DistributedOptimizer<T>& optimizer, const at::Tensor& x) {
    DistAutogradContext context(c[0]);
    context.backward({c.weights[0].rpc_sync(&Weights::forward, x).sum()});
    optimizer.step(context);
  }
};

// Those that its parameter has before its first step do not count, nor do later ones.
TEST_P(DistOptimNumerics, DEF_31_rprop_takes_the_rate_of_its_first_step) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::Rprop> optimizer(c[0], c.parameters, {.lr = 1});
  optimizer.set_lr(0.25);
  const at::Tensor before = values(c)[0];
  step(c, optimizer, torch::ones({3}, torch::kFloat64));
  expect_equal(values(c)[0], before - 0.25);
  optimizer.set_lr(1);
  step(c, optimizer, torch::ones({3}, torch::kFloat64));
  expect_close(values(c)[0], before - 0.25 - 0.25 * 1.2);
  const auto state = optimizer.state_dict();
  DistributedOptimizer<optim::Rprop> other(c[0], c.parameters, {.lr = 1});
  other.load_state_dict(state);
  step(c, other, torch::ones({3}, torch::kFloat64));
  expect_close(values(c)[0], before - 0.25 - 0.25 * 1.2 - 0.25 * 1.2 * 1.2);
}

// min_lr bounds what is lowered, and lifts nothing.
TEST_P(DistOptimNumerics, DEF_31_a_plateau_raises_no_rate) {
  OptimCluster c = make();
  DistributedOptimizer<optim::SGD> optimizer(c[0], {c.parameters[0]}, {.lr = 1});
  optimizer.add_param_group({c.parameters[1]}, {.lr = 0.125});
  ReduceLROnPlateau plateau(optimizer, {.factor = 0.5, .patience = 0, .min_lr = 0.25});
  for (int i = 0; i < 5; ++i) plateau.step(1);
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(1), 0.125);
}

// What PyTorch 2.11 gives for the same.
TEST_P(DistOptimNumerics, DEF_31_schedules_chain) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::SGD> optimizer(c[0], c.parameters, {.lr = 1});
  const auto rates = [&](LRScheduler& one, LRScheduler& two, int epochs) {
    std::vector<double> out{optimizer.lr()};
    for (int i = 0; i < epochs; ++i) {
      one.step();
      two.step();
      out.push_back(optimizer.lr());
    }
    optimizer.set_lr(1);
    return out;
  };
  using Rates = std::vector<double>;
  {
    ExponentialLR one(optimizer, 0.5);
    StepLR two(optimizer, {.step_size = 2, .gamma = 0.5});
    EXPECT_EQ(rates(one, two, 4), (Rates{1, 0.5, 0.125, 0.0625, 0.015625}));
  }
  {
    MultiStepLR one(optimizer, {.milestones = {1, 3, 3}, .gamma = 0.5});
    ExponentialLR two(optimizer, 0.5);
    EXPECT_EQ(rates(one, two, 4), (Rates{1, 0.25, 0.125, 0.015625, 0.0078125}));
  }
  {
    LambdaLR one(optimizer, [](int64_t epoch) { return 1.0 / static_cast<double>(1 + epoch); });
    ExponentialLR two(optimizer, 0.5);
    EXPECT_EQ(rates(one, two, 4), (Rates{1, 0.25, 0.5 / 3, 0.125, 0.1}));
  }
  {
    CosineAnnealingLR one(optimizer, {.t_max = 4, .eta_min = 0.125});
    ExponentialLR two(optimizer, 0.5);
    const Rates got = rates(one, two, 6);
    const Rates want = {1,      0.43592960838455724, 0.15356917382415922, 0.06668385864009951,
                        0.0625, 0.09532039161544271, 0.011833739263761127};
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-14) << i;
  }
  // A rate that was set by hand is where the schedule goes on.
  CosineAnnealingLR alone(optimizer, {.t_max = 4});
  alone.step();
  alone.step();
  optimizer.set_lr(0.25);
  alone.step();
  EXPECT_NEAR(optimizer.lr(), 0.07322330470336313, 1e-14);
  alone.set_epoch(2);
  EXPECT_NEAR(optimizer.lr(), 0.5, 1e-14);
}

TEST_P(DistOptimNumerics, DEF_31_a_state_dict_of_something_else_is_refused) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters, {.amsgrad = true});
  step(c, optimizer, input());
  const auto state = optimizer.state_dict();
  const auto refused = [&](const std::string& key, const at::Tensor& value,
                           const std::vector<std::string>& words) {
    SCOPED_TRACE(key);
    auto wrong = state;
    wrong.erase(key);
    if (value.defined()) wrong[key] = value;
    expect_error(error_of([&] { optimizer.load_state_dict(wrong); }), ErrorKind::kInvalidArgument,
                 words);
    const auto now = optimizer.state_dict();
    ASSERT_EQ(now.size(), state.size());
    for (const auto& [name, is] : state) expect_equal(now.at(name), is);
  };
  const at::Tensor none;
  refused("0.exp_avg", none, {"0.exp_avg", "is missing"});
  refused("0.max_exp_avg_sq", none, {"0.max_exp_avg_sq", "is missing"});
  refused("group.0.lr", none, {"group.0.lr", "is missing"});
  refused("group.0.beta2", none, {"group.0.beta2", "is missing"});
  refused("group.0.lr", torch::ones({2}), {"group.0.lr", "one number"});
  refused("0.step", none, {"0.step", "is missing"});
  refused("0.step", torch::tensor(-3), {"0.step", "-3"});
  refused("0.step", torch::tensor(2.5), {"0.step", "2.5"});
  refused("0.exp_avg", torch::ones({3, 3}, torch::kComplexDouble), {"0.exp_avg", "ComplexDouble"});
  refused("0.exp_avg", torch::ones({3, 3}, torch::kLong), {"0.exp_avg", "Long"});
  expect_error(error_of([&] { optimizer.load_state_dict({}); }), ErrorKind::kInvalidArgument,
               {"is missing"});
  optimizer.load_state_dict(state);
}

// Its buffers have a number for each row, and not the shape of the parameter.
TEST_P(DistOptimNumerics, DEF_31_state_of_row_wise_adagrad_can_be_loaded) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::RowWiseAdagrad> optimizer(c[0], c.parameters, {});
  step(c, optimizer, input());
  auto state = optimizer.state_dict();
  optimizer.load_state_dict(state);
  const auto now = optimizer.state_dict();
  for (const auto& [key, value] : state) expect_equal(now.at(key), value);
  state["0.sum"] = torch::ones({3, 3});
  expect_error(error_of([&] { optimizer.load_state_dict(state); }), ErrorKind::kInvalidArgument,
               {"0.sum", "[3, 3]"});
}

// Any option of a group, from the next step on; the figures are those of UpdateRule's golden test.
TEST_P(DistOptimNumerics, DEF_32_any_option_of_a_group_can_be_changed) {
  OptimCluster c = make(2);
  DistributedOptimizer<optim::SGD> optimizer(c[0], {c.parameters[0]}, {.lr = 0.5});
  optimizer.add_param_group({c.parameters[1]}, {.lr = 0.25});
  const at::Tensor ones = torch::ones({3}, torch::kFloat64);
  const auto step_both = [&] {
    DistAutogradContext context(c[0]);
    context.backward({c.weights[0].rpc_sync(&Weights::forward, ones).sum() +
                      c.weights[1].rpc_sync(&Weights::forward, ones).sum()});
    optimizer.step(context);
  };
  const std::vector<at::Tensor> before = values(c);
  auto options = optimizer.options(1);
  options.maximize = true;
  options.momentum = 0.5;
  optimizer.set_options(options, 1);
  step_both();
  step_both();
  expect_close(values(c)[0], before[0] - 1);
  expect_close(values(c)[1], before[1] + 0.25 * (1 + 1.5));
  EXPECT_EQ(optimizer.options(0).momentum, 0);
  EXPECT_EQ(optimizer.options(1).momentum, 0.5);
  options.momentum = -1;
  expect_error(error_of([&] { optimizer.set_options(options, 1); }), ErrorKind::kInvalidArgument,
               {"SGD", "momentum is -1"});
  expect_error(error_of([&] { optimizer.set_options({}, 2); }), ErrorKind::kInvalidArgument,
               {"group 2 of 2", "add_param_group()"});
  expect_error(error_of([&] { (void)optimizer.options(2); }), ErrorKind::kInvalidArgument,
               {"group 2 of 2"});
  EXPECT_EQ(optimizer.options(1).momentum, 0.5);
}

// Over parameters of others, with gradients that name rows, and its state.
TEST_P(DistOptimNumerics, DEF_32_sparse_adam_over_workers) {
  OptimCluster c = make(1);
  DistributedOptimizer<optim::SparseAdam> optimizer(c[0], c.parameters, {.lr = 0.5});
  const at::Tensor before = values(c)[0];
  const at::Tensor ids = torch::tensor({2, 0, 2}, torch::kLong);
  for (int i = 0; i < 2; ++i) {
    DistAutogradContext context(c[0]);
    context.backward({c.weights[0].rpc_sync(&Weights::rows, ids, true).sum()});
    optimizer.step(context);
  }
  // A gradient that stays the same moves by the rate.
  const at::Tensor after = values(c)[0];
  expect_equal(after[1], before[1]);
  EXPECT_TRUE(torch::allclose(after[0], before[0] - 1, 1e-6, 1e-6)) << after;
  EXPECT_TRUE(torch::allclose(after[2], before[2] - 1, 1e-6, 1e-6)) << after;
  const auto state = optimizer.state_dict();
  DistributedOptimizer<optim::SparseAdam> other(c[0], c.parameters, {.lr = 1});
  other.load_state_dict(state);
  EXPECT_EQ(other.options().lr, 0.5);
  DistAutogradContext context(c[0]);
  context.backward({c.weights[0].rpc_sync(&Weights::forward, input()).sum()});
  expect_error(error_of([&] { other.step(context); }), ErrorKind::kInvalidArgument,
               {"SparseAdam", "dense", "use Adam"});
  expect_equal(values(c)[0], after);
}

// What is one number in PyTorch is one for each row here: its state can be saved and loaded.
TEST_P(DistOptimNumerics, DEF_32_state_of_nadam_and_asgd_can_be_loaded) {
  OptimCluster c = make(1);
  const auto goes_on = [&]<class Tag>(Tag) {
    DistributedOptimizer<Tag> optimizer(c[0], c.parameters);
    step(c, optimizer, input());
    const auto state = optimizer.state_dict();
    const at::Tensor from = values(c)[0].clone();
    step(c, optimizer, input());
    const at::Tensor by = values(c)[0] - from;
    DistributedOptimizer<Tag> other(c[0], c.parameters);
    other.load_state_dict(state);
    const auto now = other.state_dict();
    for (const auto& [key, value] : state) expect_equal(now.at(key), value);
    const at::Tensor again = values(c)[0].clone();
    step(c, other, input());
    EXPECT_TRUE(torch::allclose(values(c)[0] - again, by, 1e-3, 1e-9)) << by;
  };
  goes_on(optim::NAdam());
  goes_on(optim::ASGD());
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimNumerics, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
