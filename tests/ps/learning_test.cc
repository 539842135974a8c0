// What consistency costs a model: logistic regression by four clients some of whose steps are slow, in virtual time;
// and delayed gradients, with compensation and without.

#include <algorithm>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "torch/types.h"
#include "weft/tests/ps/fixture.h"

namespace weft::testing {
namespace {

using ps::Consistency;
using ps::Table;

constexpr int kLearners = 4;
constexpr int64_t kSamples = 400;
constexpr int64_t kInputsOfModel = 8;

// Points on both sides of a plane, one of ten on the wrong one.
struct Points {
  at::Tensor x;  // [kSamples, kInputsOfModel]
  at::Tensor y;  // 1 or -1
};
Points points(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::bernoulli_distribution wrong(0.1);
  Points out{torch::empty({kSamples, kInputsOfModel}, torch::kFloat64),
             torch::empty({kSamples}, torch::kFloat64)};
  auto x = out.x.accessor<double, 2>();
  auto y = out.y.accessor<double, 1>();
  for (int64_t i = 0; i < kSamples; ++i) {
    double side = 0;
    for (int64_t k = 0; k < kInputsOfModel; ++k) {
      x[i][k] = normal(random);
      side += x[i][k] * (k % 2 == 0 ? 1.0 : -0.5);
    }
    y[i] = (side > 0) != wrong(random) ? 1 : -1;
  }
  return out;
}
double loss_at(const Points& p, const at::Tensor& w) {
  return torch::log1p((-p.y * p.x.matmul(w)).exp()).mean().item<double>();
}
at::Tensor gradient_at(const Points& p, const at::Tensor& w) {
  const at::Tensor margin = p.y * p.x.matmul(w);
  return -(p.x * (p.y * torch::sigmoid(-margin)).unsqueeze(1)).mean(0);
}
Points part_of(const Points& all, int64_t which) {
  constexpr int64_t kOfEach = kSamples / kLearners;
  return {all.x.narrow(0, which * kOfEach, kOfEach), all.y.narrow(0, which * kOfEach, kOfEach)};
}

ps::TableDefinition weights(const ps::RuleChoice& rule, const Consistency& consistency) {
  auto out = ps::dense({kInputsOfModel}, rule);
  out.dtype = torch::kFloat64;
  out.consistency = consistency;
  return out;
}

// The loss after as many steps of each; a push that is applied by itself counts for one of `kLearners`.
double learn(const Points& all, const Consistency& consistency, int steps) {
  double loss = 0;
  in_simulation(41, [&](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(2, kLearners + 1, Net::kInproc, sim);
    const double rate = consistency.mode == ps::Mode::kBsp ? 0.5 : 0.5 / kLearners;
    const auto definition = weights(ps::rule<optim::SGD>({.lr = rate}), consistency);
    std::vector<Table> tables;
    for (size_t c = 0; c < kLearners; ++c) {
      tables.push_back(job.clients[c].open_table("w", definition));
    }
    std::vector<std::function<void()>> bodies;
    for (int c = 0; c < kLearners; ++c) {
      bodies.emplace_back([&, c] {
        std::mt19937_64 random(static_cast<uint64_t>(c) + 1);
        std::bernoulli_distribution slow(0.1);
        const Points mine = part_of(all, c);
        const Table& table = tables[static_cast<size_t>(c)];
        at::Tensor w = table.pull().wait();
        for (int step = 0; step < steps; ++step) {
          const at::Tensor gradient = gradient_at(mine, w);
          sim->sleep(absl::Milliseconds(slow(random) ? 50 : 10));
          w = table.push_pull(gradient, {.advance = true}).wait();
        }
      });
    }
    side_by_side(*sim, std::move(bodies));
    loss = loss_at(
        all, job.clients[kLearners].open_table("w", definition, {.observer = true}).pull().wait());
  });
  return loss;
}

TEST_F(PsTest, PS_3_AsynchronousLearningIsNearlyAsGoodAsSynchronous) {
  const Points all = points(5);
  constexpr int kSteps = 100;
  const double before = loss_at(all, torch::zeros({kInputsOfModel}, torch::kFloat64));
  const double bsp = learn(all, Consistency::bsp(kLearners), kSteps);
  EXPECT_LT(bsp, 0.7 * before);
  EXPECT_LE(learn(all, Consistency::ssp(3, kLearners), kSteps), 1.01 * bsp);
  EXPECT_LE(learn(all, Consistency::asp(), kSteps), 1.02 * bsp);
}

// Each gradient is of the values of `delay` steps ago.
double learn_late(const Points& all, const ps::RuleChoice& rule, size_t delay, int steps) {
  PsJob job(2, 1);
  const Table table = job.clients[0].open_table("w", weights(rule, Consistency::asp()));
  const bool compensates = rule.name == optim::DelayCompensatedSGD::kName;
  std::deque<at::Tensor> values(delay + 1, table.pull().wait());
  double worst = 0;  // of the last steps
  for (int step = 0; step < steps; ++step) {
    ps::PushOptions options;
    if (compensates) options.computed_with = values.front();
    const at::Tensor gradient = gradient_at(all, values.front());
    values.pop_front();
    values.push_back(table.push_pull(gradient, options).wait().clone());
    if (step >= steps * 3 / 4) worst = std::max(worst, loss_at(all, values.back()));
  }
  return worst;
}

TEST_F(PsTest, PS_3_DelayedGradientsThatAreCompensatedConverge) {
  const Points all = points(6);
  constexpr int kSteps = 400;
  constexpr double kLr = 1;
  const double prompt = learn_late(all, ps::rule<optim::SGD>({.lr = kLr}), 0, kSteps);
  const double late = learn_late(all, ps::rule<optim::SGD>({.lr = kLr}), 20, kSteps);
  const double compensated =
      learn_late(all, ps::rule<optim::DelayCompensatedSGD>({.lr = kLr, .lambd = 2, .alpha = 0.95}),
                 20, kSteps);
  EXPECT_GE(late, 2 * compensated);
  EXPECT_LE(compensated, 1.1 * prompt);
}

}  // namespace
}  // namespace weft::testing
