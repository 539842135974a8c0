// The update rules by themselves: against figures that PyTorch's own optimizers have given
// (golden.py).

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::internal {
namespace {

struct Golden {
  std::string name;
  std::map<std::string, double> options;
  bool sparse = false;
  std::vector<double> result;
  std::map<std::string, std::vector<double>> buffers;  // one number: the same everywhere
};
const Golden kGolden[] = {
#include "golden.inc"
};

template <class Tag>
PackedOptions defaults() {
  return pack_options<Tag>(typename Tag::Options());
}
PackedOptions defaults_of(const std::string& name) {
  if (name == "SGD") return defaults<optim::SGD>();
  if (name == "Adam") return defaults<optim::Adam>();
  if (name == "AdamW") return defaults<optim::AdamW>();
  if (name == "Adagrad") return defaults<optim::Adagrad>();
  if (name == "Adadelta") return defaults<optim::Adadelta>();
  if (name == "RMSprop") return defaults<optim::RMSprop>();
  if (name == "Adamax") return defaults<optim::Adamax>();
  if (name == "RowWiseAdagrad") return defaults<optim::RowWiseAdagrad>();
  if (name == "SparseAdam") return defaults<optim::SparseAdam>();
  if (name == "NAdam") return defaults<optim::NAdam>();
  if (name == "RAdam") return defaults<optim::RAdam>();
  if (name == "ASGD") return defaults<optim::ASGD>();
  if (name == "FTRL") return defaults<optim::FTRL>();
  if (name == "DelayCompensatedSGD") return defaults<optim::DelayCompensatedSGD>();
  return defaults<optim::Rprop>();
}
PackedOptions options_of(const Golden& golden) {
  const auto rule = make_update_rule(golden.name);
  PackedOptions out = defaults_of(golden.name);
  size_t set = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    auto at = golden.options.find(rule->option_names()[i]);
    if (at == golden.options.end()) continue;
    out[i] = at->second;
    ++set;
  }
  EXPECT_EQ(set, golden.options.size()) << golden.name;
  return out;
}
at::Tensor gradient(int step) {
  std::vector<double> g;
  for (int i = 0; i < 4; ++i) g.push_back(std::sin(1.3 * step + i));
  return torch::tensor(g, torch::kFloat64);
}
// Names some of the numbers, one of them twice.
at::Tensor sparse_gradient(int step) {
  const at::Tensor ids = torch::tensor({step % 4, (3 * step + 1) % 4, step % 4}, torch::kLong);
  return torch::sparse_coo_tensor(ids.unsqueeze(0), gradient(step).slice(0, 0, 3), {4});
}
at::Tensor start() { return torch::tensor({0.5, -1.0, 2.0, 0.25}, torch::kFloat64); }

void expect_golden(const at::Tensor& got, const std::vector<double>& numbers) {
  const at::Tensor want = torch::tensor(numbers, torch::kFloat64);
  const double most = std::max(want.abs().max().item<double>(), 1e-3);
  EXPECT_LE((got - want).abs().max().item<double>(), 1e-12 * most) << got << "\n" << want;
}

void expect_as_in_python(const Golden& golden) {
  SCOPED_TRACE(golden.name + (golden.sparse ? ", sparse" : ""));
  const auto rule = make_update_rule(golden.name);
  ASSERT_NE(rule, nullptr);
  const PackedOptions options = options_of(golden);
  ASSERT_TRUE(rule->check_options(options).ok());
  ASSERT_TRUE((golden.sparse ? rule->check_sparse(options) : rule->check_dense(options)).ok());
  at::Tensor p = start();
  ParameterState state;
  for (int step = 1; step <= 5; ++step) {
    const at::Tensor g = golden.sparse ? sparse_gradient(step) : gradient(step);
    const at::Tensor before = g.to_dense().clone();
    rule->prepare(options, p, &state);
    rule->update(options, p, g, &state);
    EXPECT_TRUE(torch::equal(g.to_dense(), before)) << "the gradient was written to";
  }
  expect_golden(p, golden.result);
  EXPECT_EQ(state.steps.load(), 5);
  size_t compared = 0;
  for (size_t b = 0; b < rule->buffer_names().size(); ++b) {
    SCOPED_TRACE(rule->buffer_names()[b]);
    const auto want = golden.buffers.find(rule->buffer_names()[b]);
    ASSERT_EQ(want != golden.buffers.end(), state.buffers[b].defined());
    if (!state.buffers[b].defined()) continue;
    expect_golden(state.buffers[b], want->second);
    ++compared;
  }
  // What else it has: ASGD's mu, which follows from the steps.
  EXPECT_EQ(compared + golden.buffers.count("mu"), golden.buffers.size());
}

TEST(UpdateRule, DA_53_equals_torch_optim) {
  for (const Golden& golden : kGolden) {
    if (!golden.options.empty() && !golden.sparse) expect_as_in_python(golden);
  }
}

// NAdam, RAdam, ASGD and SparseAdam are among those above; here with gradients that name some rows.
TEST(UpdateRule, DEF_32_sparse_gradients_as_in_python) {
  int seen = 0;
  for (const Golden& golden : kGolden) {
    if (!golden.sparse) continue;
    expect_as_in_python(golden);
    ++seen;
  }
  EXPECT_EQ(seen, 6);
}

// A group's options after two steps: the first gradient that its momentum takes is not dampened.
TEST(UpdateRule, DEF_32_momentum_that_begins_later_is_as_in_python) {
  const auto rule = make_update_rule("SGD");
  at::Tensor p = start();
  ParameterState state;
  for (int step = 1; step <= 5; ++step) {
    const PackedOptions options =
        step < 3 ? pack_options<optim::SGD>({.lr = 0.05})
                 : pack_options<optim::SGD>(
                       {.lr = 0.05, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.1});
    rule->prepare(options, p, &state);
    rule->update(options, p, gradient(step), &state);
  }
  for (const Golden& golden : kGolden) {
    if (golden.name == "momentum_turned_on") return expect_golden(p, golden.result);
  }
  FAIL() << "not in golden.inc";
}

TEST(UpdateRule, DEF_32_sparse_adam_takes_no_dense_gradient) {
  for (const std::string& name : update_rule_names()) {
    const Status s = make_update_rule(name)->check_dense(defaults_of(name));
    EXPECT_EQ(s.ok(), name != "SparseAdam") << name << s;
  }
  EXPECT_EQ(update_rule_names().size(), 15U);
}

TEST(UpdateRule, AnUnknownOneIsNone) { EXPECT_EQ(make_update_rule("LBFGS"), nullptr); }

// A sparse gradient that names a row twice gives what the dense one gives.
TEST(UpdateRule, SparseEqualsDense) {
  const at::Tensor ids = torch::tensor({2, 0, 2}, torch::kLong).unsqueeze(0);
  const at::Tensor values = torch::tensor({{1.0, 2.0}, {3.0, 4.0}, {5.0, 6.0}}, torch::kFloat64);
  const at::Tensor sparse = torch::sparse_coo_tensor(ids, values, {4, 2});
  for (const char* name : {"SGD", "Adagrad", "RowWiseAdagrad", "FTRL", "momentum"}) {
    SCOPED_TRACE(name);
    const bool momentum = std::string(name) == "momentum";
    const auto rule = make_update_rule(momentum ? "SGD" : name);
    const PackedOptions options =
        momentum ? pack_options<optim::SGD>({.momentum = 0.9, .nesterov = true})
                 : defaults_of(name);
    ASSERT_TRUE(rule->check_sparse(options).ok());
    at::Tensor a = torch::ones({4, 2}, torch::kFloat64);
    at::Tensor b = a.clone();
    ParameterState of_a;
    ParameterState of_b;
    for (int step = 0; step < 3; ++step) {
      rule->prepare(options, a, &of_a);
      rule->update(options, a, sparse, &of_a);
      rule->prepare(options, b, &of_b);
      rule->update(options, b, sparse.to_dense(), &of_b);
    }
    EXPECT_TRUE(torch::allclose(a, b, 1e-14, 0)) << a << "\n" << b;
    EXPECT_TRUE(torch::equal(a[1], torch::ones({2}, torch::kFloat64)));
  }
}

// One number for each row: with rows of one element, Adagrad; else by its formula.
TEST(UpdateRule, RowWiseAdagradCountsByRows) {
  const auto by_row = make_update_rule("RowWiseAdagrad");
  const auto plain = make_update_rule("Adagrad");
  at::Tensor a = torch::ones({4}, torch::kFloat64);
  at::Tensor b = a.clone();
  at::Tensor rows = torch::ones({2, 2}, torch::kFloat64);
  ParameterState of_a;
  ParameterState of_b;
  ParameterState of_rows;
  const PackedOptions options = defaults_of("RowWiseAdagrad");
  at::Tensor sums = torch::zeros({2, 1}, torch::kFloat64);
  at::Tensor want = rows.clone();
  for (int step = 1; step <= 3; ++step) {
    by_row->prepare(options, a, &of_a);
    by_row->update(options, a, gradient(step), &of_a);
    plain->prepare(defaults_of("Adagrad"), b, &of_b);
    plain->update(defaults_of("Adagrad"), b, gradient(step), &of_b);
    const at::Tensor g = gradient(step).reshape({2, 2});
    by_row->prepare(options, rows, &of_rows);
    by_row->update(options, rows, g, &of_rows);
    sums += (g * g).mean(1, true);
    want -= 1e-2 * g / (sums.sqrt() + 1e-10);
  }
  EXPECT_TRUE(torch::allclose(a, b, 1e-14, 0));
  EXPECT_TRUE(torch::allclose(rows, want, 1e-14, 0));
  EXPECT_EQ(of_rows.buffers[0].sizes(), (std::vector<int64_t>{2}));
}

TEST(UpdateRule, SparseOfTwoSparseDimensions) {
  const at::Tensor ids = torch::tensor({{0, 1, 0}, {1, 0, 1}}, torch::kLong);
  const at::Tensor sparse =
      torch::sparse_coo_tensor(ids, torch::tensor({1.0, 2.0, 3.0}, torch::kFloat64), {2, 2});
  const auto rule = make_update_rule("Adagrad");
  const PackedOptions options = defaults_of("Adagrad");
  at::Tensor a = torch::ones({2, 2}, torch::kFloat64);
  at::Tensor b = a.clone();
  ParameterState of_a;
  ParameterState of_b;
  rule->prepare(options, a, &of_a);
  rule->update(options, a, sparse, &of_a);
  rule->prepare(options, b, &of_b);
  rule->update(options, b, sparse.to_dense(), &of_b);
  EXPECT_TRUE(torch::allclose(a, b, 1e-14, 0)) << a << "\n" << b;
}

TEST(UpdateRule, WhatCannotTakeSparseGradientsSaysSo) {
  for (const std::string& name : update_rule_names()) {
    PackedOptions options = defaults_of(name);
    const auto rule = make_update_rule(name);
    const bool can = name == "SGD" || name == "Adagrad" || name == "RowWiseAdagrad";
    const bool always = name == "SparseAdam" || name == "FTRL";
    EXPECT_EQ(rule->check_sparse(options).ok(), can || always) << name;
    if (always) continue;
    for (size_t i = 0; i < options.size(); ++i) {
      if (rule->option_names()[i] == "weight_decay") options[i] = 0.1;
    }
    EXPECT_FALSE(rule->check_sparse(options).ok()) << name;
  }
}

// Each option out of its range is refused by name.
TEST(UpdateRule, OptionsAreChecked) {
  int refused = 0;
  for (const std::string& name : update_rule_names()) {
    const auto rule = make_update_rule(name);
    EXPECT_TRUE(rule->check_options(defaults_of(name)).ok()) << name;
    for (size_t i = 0; i < rule->option_names().size(); ++i) {
      PackedOptions options = defaults_of(name);
      options[i] = std::nan("");
      const Status s = rule->check_options(options);
      EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << name << " " << i;
      EXPECT_NE(std::string(s.message()).find(rule->option_names()[i]), std::string::npos) << s;
      ++refused;
    }
    EXPECT_FALSE(rule->check_options({0.1}).ok());
  }
  EXPECT_EQ(refused, 6 + 7 + 7 + 6 + 5 + 5 + 7 + 6 + 6 + 5 + 8 + 7 + 6 + 6 + 7);
  PackedOptions nesterov = pack_options<optim::SGD>({.lr = 0.1, .nesterov = true});
  EXPECT_FALSE(make_update_rule("SGD")->check_options(nesterov).ok());
}

}  // namespace
}  // namespace weft::internal
