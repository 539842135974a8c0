// Rules that torch.optim does not have, against their formulas: FTRL and delay compensation.

#include <torch/types.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/update_rule.h"

namespace weft::testing {
namespace {

constexpr int64_t kElements = 12;
constexpr int kUpdates = 60;

at::Tensor begins() { return torch::linspace(-1, 1, kElements, torch::kFloat64); }
at::Tensor gradient_of(int step) {
  return (torch::arange(kElements, torch::kFloat64) * 1.3 + 0.7 * step).sin();
}

struct Updated {
  at::Tensor values;
  ParameterState state{};
  void update(const UpdateRule& rule, const PackedOptions& options, const at::Tensor& gradient) {
    if (!rule.prepared(options, state)) rule.prepare(options, values, &state);
    rule.update(options, values, gradient, &state);
  }
};

// Algorithm 1 of the paper, element by element; z begins so that the first values follow from it.
std::vector<double> ftrl_by_formula(const optim::FTRL::Options& o, const at::Tensor& first) {
  std::vector<double> out;
  for (int64_t i = 0; i < kElements; ++i) {
    double w = first[i].item<double>();
    double n = o.initial_accumulator_value;
    const double sign = w > 0 ? 1 : (w < 0 ? -1 : 0);
    double z = -w * ((o.beta + std::sqrt(n)) / o.lr + o.l2) - o.l1 * sign;
    for (int step = 0; step < kUpdates; ++step) {
      const double g = gradient_of(step)[i].item<double>() * (o.maximize ? -1 : 1);
      const double sigma = (std::sqrt(n + g * g) - std::sqrt(n)) / o.lr;
      z += g - sigma * w;
      n += g * g;
      w = std::abs(z) <= o.l1
              ? 0
              : -(z - (z > 0 ? o.l1 : -o.l1)) / ((o.beta + std::sqrt(n)) / o.lr + o.l2);
    }
    out.push_back(w);
  }
  return out;
}

TEST(RulesOfTables, PS_3_FtrlEqualsItsFormula) {
  const auto rule = make_update_rule("FTRL");
  int zeros = 0;
  for (const optim::FTRL::Options& o :
       {optim::FTRL::Options{}, optim::FTRL::Options{.lr = 5, .l1 = 4, .l2 = 0.1},
        optim::FTRL::Options{.lr = 0.2, .beta = 0, .l1 = 0.4, .maximize = true},
        optim::FTRL::Options{.lr = 0.3, .l2 = 2, .initial_accumulator_value = 0.1}}) {
    Updated one{begins()};
    const PackedOptions options = pack_options<optim::FTRL>(o);
    for (int step = 0; step < kUpdates; ++step) one.update(*rule, options, gradient_of(step));
    const at::Tensor want = torch::tensor(ftrl_by_formula(o, begins()), torch::kFloat64);
    EXPECT_LE((one.values - want).abs().max().item<double>(), 1e-12) << one.values << want;
    EXPECT_TRUE(torch::equal(one.values.eq(0), want.eq(0)));
    if (o.l1 > 0) zeros += one.values.eq(0).sum().item<int>();
  }
  EXPECT_GT(zeros, 0) << "l1 makes some elements exactly 0";
}

// Without penalties it is Adagrad with eps `beta`, whatever values the parameter begins with.
TEST(RulesOfTables, FtrlWithoutPenaltiesIsAdagrad) {
  const auto ftrl = make_update_rule("FTRL");
  const auto adagrad = make_update_rule("Adagrad");
  Updated a{begins()};
  Updated b{begins()};
  for (int step = 0; step < kUpdates; ++step) {
    a.update(*ftrl, pack_options<optim::FTRL>({.lr = 0.3, .beta = 0.5}), gradient_of(step));
    b.update(*adagrad, pack_options<optim::Adagrad>({.lr = 0.3, .eps = 0.5}), gradient_of(step));
  }
  EXPECT_TRUE(torch::allclose(a.values, b.values, 1e-12, 1e-13)) << a.values << b.values;
}

TEST(RulesOfTables, FtrlWantsARate) {
  const auto rule = make_update_rule("FTRL");
  const Status none = rule->check_options(pack_options<optim::FTRL>({.lr = 0}));
  EXPECT_EQ(error_kind(none), ErrorKind::kInvalidArgument);
  EXPECT_NE(std::string(none.message()).find("lr is 0, it must be above 0"), std::string::npos)
      << none;
}

// One trainer whose gradients are always of the values that its last step left: between them others have moved the
// parameter, by `others`.
TEST(RulesOfTables, PS_3_DelayCompensationEqualsItsFormula) {
  const auto rule = make_update_rule("DelayCompensatedSGD");
  ASSERT_TRUE(rule->compensates_delay());
  for (const double alpha : {0.0, 0.9}) {
    for (const bool own_state : {true, false}) {
      const optim::DelayCompensatedSGD::Options o{
          .lr = 0.1, .lambd = 0.5, .alpha = alpha, .weight_decay = 0.01, .own_state = own_state};
      const PackedOptions options = pack_options<optim::DelayCompensatedSGD>(o);
      Updated one{begins()};
      at::Tensor want = begins();
      at::Tensor then = want.clone();
      at::Tensor squares = torch::zeros_like(want);
      for (int step = 0; step < 20; ++step) {
        const at::Tensor others = 0.1 * gradient_of(step + 100);
        if (step > 0) {
          one.values.add_(others);
          want.add_(others);
        }
        const at::Tensor g = gradient_of(step);
        squares = alpha * squares + (1 - alpha) * g * g;
        at::Tensor by = o.lambd * g * g * (want - then);
        if (alpha > 0) by = by / (squares + o.eps).sqrt();
        want = want - o.lr * (g + o.weight_decay * want + by);
        if (own_state) {
          one.update(*rule, options, g);
        } else {
          if (!rule->prepared(options, one.state)) rule->prepare(options, one.values, &one.state);
          rule->update_delayed(options, one.values, g, then, &one.state);
        }
        then = want.clone();
        EXPECT_TRUE(torch::allclose(one.values, want, 1e-12, 1e-13)) << one.values << want;
      }
    }
  }
  EXPECT_FALSE(rule->check_sparse(pack_options<optim::DelayCompensatedSGD>({})).ok());
  EXPECT_FALSE(make_update_rule("SGD")->compensates_delay());
}

// Without another trainer it is SGD.
TEST(RulesOfTables, DelayCompensationOfOneTrainerIsSgd) {
  const auto rule = make_update_rule("DelayCompensatedSGD");
  const auto sgd = make_update_rule("SGD");
  Updated a{begins()};
  Updated b{begins()};
  for (int step = 0; step < kUpdates; ++step) {
    a.update(*rule, pack_options<optim::DelayCompensatedSGD>({.lr = 0.1, .lambd = 3}),
             gradient_of(step));
    b.update(*sgd, pack_options<optim::SGD>({.lr = 0.1}), gradient_of(step));
  }
  EXPECT_TRUE(torch::equal(a.values, b.values));
}

}  // namespace
}  // namespace weft::testing
