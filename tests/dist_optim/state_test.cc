// Saving and restoring the state of an optimizer whose parts are at several owners.

#include <torch/types.h>

#include "weft/tests/dist_optim/fixture.h"

namespace weft::testing {
namespace {

using DistOptimState = DistOptimTest;

template <class T>
void train(OptimCluster& c, DistributedOptimizer<T>& optimizer, const at::Tensor& x) {
  for (int i = 0; i < 3; ++i) {
    DistAutogradContext context(c[0]);
    at::Tensor y = x;
    for (const RRef<Weights>& w : c.weights) y = w.rpc_sync(&Weights::forward, y);
    context.backward({y.sum()});
    optimizer.step(context);
  }
}

// Three steps, saved, three more; and three from what was saved.
TEST_P(DistOptimState, GoesOnAsIfNothingHadBeen) {
  std::map<std::string, at::Tensor> saved;
  std::vector<at::Tensor> at_saving;
  std::vector<at::Tensor> at_end;
  {
    OptimCluster c = make();
    DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters, {.lr = 0.1, .amsgrad = true});
    train(c, optimizer, input());
    saved = optimizer.state_dict();
    at_saving = values(c);
    train(c, optimizer, input());
    at_end = values(c);
  }
  EXPECT_EQ(saved.size(), 2U * 4 + 7);
  EXPECT_EQ(saved.at("1.step").item<int64_t>(), 3);
  EXPECT_EQ(saved.at("group.0.lr").item<double>(), 0.1);
  OptimCluster c = make();
  for (size_t i = 0; i < 2; ++i) {
    const at::AutoGradMode no_grad(false);
    c.weights[i] = remote<Weights>(c[0], static_cast<int>(i) + 1, at_saving[i]);
    c.parameters[i] = c.weights[i].rpc_sync(&Weights::parameter);
  }
  DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters);
  optimizer.load_state_dict(saved);
  EXPECT_EQ(optimizer.lr(), 0.1);
  train(c, optimizer, input());
  for (size_t i = 0; i < 2; ++i) expect_equal(values(c)[i], at_end[i]);
}

TEST_P(DistOptimState, WhatDoesNotFitIsRefusedAndNothingChanges) {
  OptimCluster c = make();
  DistributedOptimizer<optim::Adam> optimizer(c[0], c.parameters, {.lr = 0.1});
  train(c, optimizer, input());
  const auto state = optimizer.state_dict();
  const auto refused = [&](std::map<std::string, at::Tensor> wrong, const std::string& word) {
    expect_error(error_of([&] { optimizer.load_state_dict(wrong); }), ErrorKind::kInvalidArgument,
                 {word});
    const auto now = optimizer.state_dict();
    ASSERT_EQ(now.size(), state.size());
    for (const auto& [key, value] : state) expect_equal(now.at(key), value);
  };
  auto wrong = state;
  wrong["0.step"] = torch::tensor(77);
  wrong["1.exp_avg"] = torch::ones({2});
  refused(wrong, "shape [2]");
  wrong = state;
  wrong["0.step"] = torch::tensor(77);
  wrong["1.momentum_buffer"] = torch::ones({3, 3});
  refused(wrong, "momentum_buffer");
  wrong = state;
  wrong.erase("1.step");
  refused(wrong, "is missing");
  wrong = state;
  wrong["9.step"] = torch::tensor(1);
  refused(wrong, "9.step");
  wrong = state;
  wrong["group.0.lr"] = torch::tensor(-1.0);
  refused(wrong, "lr");
}

INSTANTIATE_TEST_SUITE_P(Nets, DistOptimState, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
