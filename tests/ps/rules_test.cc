// Rules whose tables need more than a gradient, or that torch.optim does not have.

#include <cmath>
#include <vector>

#include "torch/types.h"
#include "weft/ps/hogwild.h"
#include "weft/rpc/arena.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::Table;

// FTRL-Proximal of one element, in double precision.
struct FtrlElement {
  double w = 0;
  double z = 0;
  double n = 0;
  void update(double g, double lr, double beta, double l1, double l2) {
    const double sigma = (std::sqrt(n + g * g) - std::sqrt(n)) / lr;
    z += g - sigma * w;
    n += g * g;
    w = std::abs(z) <= l1 ? 0 : -(z - (z > 0 ? l1 : -l1)) / ((beta + std::sqrt(n)) / lr + l2);
  }
};

TEST_F(PsTest, PS_3_FtrlTablesEqualTheirFormula) {
  PsJob job(3, 1);
  const optim::FTRL::Options options{.lr = 0.3, .beta = 0.5, .l1 = 0.6, .l2 = 0.05};
  auto dense = ps::dense({6}, ps::rule<optim::FTRL>(options));
  dense.dtype = torch::kFloat64;
  auto sparse = ps::sparse(3, ps::rule<optim::FTRL>(options));
  sparse.dtype = torch::kFloat64;
  const Table of_elements = job.clients[0].open_table("d", dense);
  const Table of_rows = job.clients[0].open_table("s", sparse);
  const at::Tensor keys = keys_of({11, 1 << 22});
  std::vector<FtrlElement> want(6);
  std::vector<FtrlElement> want_rows(6);
  for (int step = 0; step < 100; ++step) {
    const at::Tensor g = (torch::arange(6, torch::kFloat64) * 1.7 + 0.3 * step).sin();
    of_elements.push(g).wait();
    // The second row is there in every other step.
    const int64_t rows = step % 2 == 0 ? 2 : 1;
    of_rows.push_rows(keys.narrow(0, 0, rows), g.view({2, 3}).narrow(0, 0, rows)).wait();
    for (int64_t i = 0; i < 6; ++i) {
      const auto at = static_cast<size_t>(i);
      const double one = g[i].item<double>();
      want[at].update(one, options.lr, options.beta, options.l1, options.l2);
      if (i < 3 * rows) want_rows[at].update(one, options.lr, options.beta, options.l1, options.l2);
    }
  }
  const auto expect = [](const at::Tensor& got, const std::vector<FtrlElement>& all) {
    for (int64_t i = 0; i < 6; ++i) {
      EXPECT_NEAR(got[i].item<double>(), all[static_cast<size_t>(i)].w, 1e-10) << i;
    }
  };
  expect(of_elements.pull().wait(), want);
  expect(of_rows.pull_rows(keys).wait().reshape({-1}), want_rows);
}

ps::TableDefinition compensating(const optim::DelayCompensatedSGD::Options& options) {
  auto out = ps::dense({10}, ps::rule<optim::DelayCompensatedSGD>(options));
  out.dtype = torch::kFloat64;
  out.init = ps::Init::uniform(-1, 1, 4);
  return out;
}

// Two clients, of which the second one's pushes come between a pull of the first and its push; over several parts and
// with a backup, which has the same bits.
TEST_F(PsTest, PS_3_APushIsCompensatedForWhatOthersDidSinceItsPull) {
  const optim::DelayCompensatedSGD::Options o{
      .lr = 0.1, .lambd = 0.7, .alpha = 0.9, .weight_decay = 0.02};
  for (const uint32_t copies : {1U, 2U}) {
    PsJob job(3, 2);
    auto definition = compensating(o);
    definition.copies = copies;
    const Table mine = job.clients[0].open_table("t", definition);
    const Table other = job.clients[1].open_table("t", definition);
    at::Tensor want = mine.pull().wait().clone();
    at::Tensor squares = torch::zeros_like(want);
    const auto update = [&](const at::Tensor& g, const at::Tensor& then) {
      squares = o.alpha * squares + (1 - o.alpha) * g * g;
      at::Tensor step = g + o.weight_decay * want;
      if (then.defined()) step = step + o.lambd * g * g * (want - then) / (squares + o.eps).sqrt();
      want = want - o.lr * step;
    };
    at::Tensor then = want;
    for (int step = 0; step < 20; ++step) {
      const at::Tensor g = (torch::arange(10, torch::kFloat64) + step).cos();
      // The other one has pulled nothing: what it was computed with is not known.
      other.push(2 * g).wait();
      update(2 * g, {});
      const bool given = step % 2 == 0;  // or what was pulled last
      ps::PushOptions options;
      if (given) options.computed_with = then;
      at::Tensor now;
      if (step % 3 == 0) {
        mine.push(g, options).wait();
        update(g, then);
        now = mine.pull().wait();
      } else {
        now = mine.push_pull(g, options).wait();
        update(g, then);
      }
      EXPECT_TRUE(torch::allclose(now, want, 1e-12, 1e-13)) << now << want;
      then = want;
    }
    // An assignment is none of it.
    mine.assign(torch::ones({10}, torch::kFloat64)).wait();
    EXPECT_TRUE(torch::equal(other.pull().wait(), torch::ones({10}, torch::kFloat64)));
  }
}

// As with a gradient: once its push is kept for a step, the client may write into what it gave.
TEST_P(PsTest, WhatAGradientWasComputedWithCountsAsItWas) {
  constexpr int64_t kLong = 1 << 18;
  PsJob job(1, 2, GetParam());
  auto definition = ps::dense({kLong}, ps::rule<optim::DelayCompensatedSGD>({.lr = 1, .lambd = 1}));
  definition.consistency = ps::Consistency::bsp(2);
  const Table one = job.clients[0].open_table("t", definition);
  const Table other = job.clients[1].open_table("t", definition);
  at::Tensor given = move_to_arena(job.worker(0), torch::full({kLong}, -1.F));
  one.push(torch::ones({kLong}), {.advance = true, .computed_with = given}).wait();
  given.fill_(100);
  other.advance().wait();
  // The step is divided by its clients: half of the gradient, and its square times the delay.
  EXPECT_TRUE(torch::equal(other.pull().wait(), torch::full({kLong}, -0.75F)));
}

TEST_F(PsTest, BadInput_rules_that_compensate_a_delay_and_rates_that_cannot_be) {
  PsJob job(1, 1);
  const auto wrong = ErrorKind::kInvalidArgument;
  ps::Client& client = job.clients[0];
  const auto compensated = compensating({});
  const Table t = client.open_table("t", compensated);
  const at::Tensor ones = torch::ones({10}, torch::kFloat64);
  expect_ps_error(
      t.push(ones, {.computed_with = torch::ones({9}, torch::kFloat64)}).try_wait().status(), wrong,
      {"table 't'", "computed_with", "[9]"});
  expect_ps_error(t.push(ones, {.computed_with = ones * NAN}).try_wait().status(), wrong,
                  {"not finite"});
  const Table plain = client.open_table("p", ps::dense({10}, ps::rule<optim::SGD>()));
  expect_ps_error(
      plain.push(torch::ones({10}), {.computed_with = torch::ones({10})}).try_wait().status(),
      wrong, {"table 'p'", "computed_with", "SGD"});
  expect_ps_error(ps_error_of([&] {
                    (void)client.open_table("s",
                                            ps::sparse(2, ps::rule<optim::DelayCompensatedSGD>()));
                  }),
                  wrong, {"dense tables only"});
  auto own = compensated;
  own.rule = {"DelayCompensatedSGD", pack_options<optim::DelayCompensatedSGD>({.own_state = true})};
  expect_ps_error(ps_error_of([&] { (void)client.open_table("o", own); }), wrong, {"own_state"});
  expect_ps_error(ps_error_of([&] {
                    ps::Hogwild hogwild({torch::ones({2})}, ps::rule<optim::DelayCompensatedSGD>());
                  }),
                  wrong, {"Hogwild", "DelayCompensatedSGD"});
  // A rate that the rule cannot have is refused, and nothing of the push is done.
  const Table ftrl = client.open_table("f", ps::dense({3}, ps::rule<optim::FTRL>()));
  expect_ps_error(ftrl.push(torch::ones({3}), {.rate = 0.0}).try_wait().status(), wrong,
                  {"table 'f'", "lr is 0"});
  const Table ftrl_rows = client.open_table("fr", ps::sparse(3, ps::rule<optim::FTRL>()));
  expect_ps_error(
      ftrl_rows.push_rows(keys_of({1}), torch::ones({1, 3}), {.rate = 0.0}).try_wait().status(),
      wrong, {"table 'fr'", "lr is 0"});
  EXPECT_EQ(ftrl.pull().wait().abs().sum().item<double>(), 0);
}

}  // namespace
}  // namespace weft::testing
