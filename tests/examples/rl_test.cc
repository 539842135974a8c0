// The agent and its observers of examples/rl as workers of one process: RPC-139.

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "ATen/ops/zeros.h"
#include "weft/examples/rl/agent.h"
#include "weft/examples/rl/observer.h"
#include "weft/examples/rl/report.h"
#include "weft/tests/rref/fixture.h"

namespace weft::testing {
namespace {

using rl::Agent;
using rl::Observer;

struct Played {
  std::vector<double> returns;  // round by round, by observer
  int64_t answers = 0;
  int64_t evaluations = 0;

  // The steps of all episodes; of the longest of each round. A step's reward is 1.
  int64_t steps() const {
    return static_cast<int64_t>(std::accumulate(returns.begin(), returns.end(), 0.0));
  }
  int64_t longest(int observers) const {
    double sum = 0;
    for (auto at = returns.begin(); at != returns.end(); at += observers) {
      sum += *std::max_element(at, at + observers);
    }
    return static_cast<int64_t>(sum);
  }
};

class ExampleRl : public RRefTest {
 protected:
  ExampleRl() { lib_.library.merge(rl::library()); }

  // worker0 is the agent's, the others are observers'. Learns after every round.
  Played play(Cluster& c, uint64_t seed, bool batch, int rounds) {
    const int64_t n = static_cast<int64_t>(c.size()) - 1;
    auto learner =
        std::make_shared<Agent>(rl::AgentOptions{.observers = n, .seed = seed, .batch = batch});
    Played played;
    {
      std::vector<RRef<Observer>> observers;
      for (int64_t i = 0; i < n; ++i) {
        observers.push_back(remote<Observer>(c[0], i + 1, i, seed));
      }
      const auto agent = RRef<Agent>::local(c[0], learner);
      for (int round = 0; round < rounds; ++round) {
        learner->begin_round();
        std::vector<Future<void>> episodes;
        for (const auto& o : observers) {
          episodes.push_back(o.rpc_async(&Observer::run_episode, agent));
        }
        when_all(episodes).wait();
        for (const double value : learner->returns()) played.returns.push_back(value);
        learner->learn();
      }
    }
    played.answers = learner->answers();
    played.evaluations = learner->evaluations();
    return played;
  }
};

TEST_P(ExampleRl, RPC_139_one_agent_with_observers) {
  constexpr int kObservers = 3;
  constexpr int kRounds = 8;
  auto c = make({.size = 1 + kObservers});
  const Played single = play(*c, 1, false, kRounds);
  ASSERT_EQ(single.returns.size(), size_t{kObservers * kRounds});
  EXPECT_EQ(single.answers, single.steps()) << "one reward for each answer";
  EXPECT_EQ(single.evaluations, single.steps());
  expect_nothing_left(*c);

  // The batch variant: the same answers by as many evaluations as the longest episode has steps.
  const Played batch = play(*c, 1, true, kRounds);
  EXPECT_EQ(batch.answers, batch.steps());
  EXPECT_EQ(batch.evaluations, batch.longest(kObservers));
  EXPECT_LT(batch.evaluations, batch.answers);
  const Played again = play(*c, 1, true, kRounds);
  EXPECT_EQ(again.returns, batch.returns) << "equal seeds give equal runs";
  EXPECT_EQ(again.evaluations, batch.evaluations);
  EXPECT_NE(play(*c, 2, true, kRounds).returns, batch.returns);
  expect_nothing_left(*c);
}

TEST_P(ExampleRl, AnObserverThatFailsFreesThoseWhoWaitForIt) {
  auto c = make({.size = 3});
  {
    auto learner =
        std::make_shared<Agent>(rl::AgentOptions{.observers = 2, .seed = 1, .batch = true});
    const auto agent = RRef<Agent>::local((*c)[0], learner);
    learner->begin_round();
    // Observer 1 never asks: observer 0 waits at its first step.
    auto observer = remote<Observer>((*c)[0], 1, int64_t{0}, uint64_t{1});
    auto episode = observer.rpc_async(&Observer::run_episode, agent);
    EXPECT_FALSE(episode.try_wait(absl::Milliseconds(1)).ok());
    learner->fail(make_error(ErrorKind::kPeerLost, "observer 1 is lost"));
    expect_error(error_of([&] { episode.wait(); }), ErrorKind::kPeerLost, {"observer 1 is lost"});
    EXPECT_EQ(learner->answers(), 0);
  }
  expect_nothing_left(*c);
}

TEST_P(ExampleRl, WhatDoesNotFitIsAnErrorOfTheCaller) {
  auto c = make({.size = 2});
  {
    auto learner =
        std::make_shared<Agent>(rl::AgentOptions{.observers = 2, .seed = 1, .batch = true});
    const auto agent = RRef<Agent>::local((*c)[0], learner);
    const auto act = [&](int64_t i) { return agent.rpc_async(&Agent::act, i, rl::State{}); };
    const auto report = [&](int64_t i, std::vector<float> rewards) {
      return Status(agent.try_rpc_sync(&Agent::report, i, rewards));
    };
    expect_error(report(0, {}), ErrorKind::kUser, {"observer 0 has no episode"});
    learner->begin_round();
    expect_error(report(7, {}), ErrorKind::kUser, {"observer 7 has no episode", "2 of 2"});
    expect_error(report(-1, {}), ErrorKind::kUser, {"observer -1 has no episode"});
    auto first = act(0);
    expect_error(error_of([&] { act(0).wait(); }), ErrorKind::kUser, {"observer 0 asks again"});
    expect_error(report(0, {}), ErrorKind::kUser, {"asked for one more"});
    act(1).wait();
    first.wait();
    expect_error(report(1, {1, 1}), ErrorKind::kUser, {"reports 2 rewards, and has had 1 actions"});
    EXPECT_TRUE(report(1, {1}).ok());
    // Observer 1 has left the batch, so observer 0 is answered alone.
    act(0).wait();
    EXPECT_EQ(learner->evaluations(), 2);
    EXPECT_TRUE(report(0, {1, 1}).ok());
    learner->learn();
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, ExampleRl, ::testing::ValuesIn(nets()), net_name);

TEST(ExampleRlPolicy, ItBeginsUndecidedAndLearnsWhatPays) {
  rl::Policy policy(3);
  const at::Tensor states = at::zeros({2, 4});
  // A pole that leans to one side and falls there.
  for (int i : {2, 3}) {
    states[0][i] = 0.1 * (2 * i - 3);
    states[1][i] = -0.1 * (2 * i - 3);
  }
  const at::Tensor before = policy.right(states);
  for (int i = 0; i < 2; ++i) EXPECT_NEAR(before[i].item<double>(), 0.5, 0.05);
  // Going to where the pole leans pays, the other way does not.
  const at::Tensor all = states.repeat({2, 1});
  const at::Tensor actions = at::zeros({4}, at::kLong);
  actions[0] = 1;
  actions[3] = 1;
  const at::Tensor returns = at::zeros({4});
  returns[0] = 20;
  returns[1] = 20;
  for (int i = 0; i < 300; ++i) policy.learn(all, actions, returns);
  const at::Tensor after = policy.right(states);
  EXPECT_GT(after[0].item<double>(), 0.9);
  EXPECT_LT(after[1].item<double>(), 0.1);
}

TEST(ExampleRlReport, ItIsSolvedByTheMeanOf100EpisodesAndNoFewer) {
  rl::LearningCurve curve;
  for (int i = 0; i < 99; ++i) curve.add(200);
  EXPECT_EQ(curve.mean(), 200);
  EXPECT_FALSE(curve.solved());
  curve.add(0);
  EXPECT_EQ(curve.mean(), 198);
  EXPECT_TRUE(curve.solved());
  for (int i = 0; i < 50; ++i) curve.add(0);
  EXPECT_EQ(curve.mean(), 98) << "the first 50 count no more";
  EXPECT_FALSE(curve.solved());
  const std::string svg = curve.svg("title");
  EXPECT_EQ(svg.rfind("<svg", 0), 0);
  EXPECT_NE(svg.find("</svg>"), std::string::npos);
  size_t points = 0;
  for (size_t at = svg.find("<circle"); at != std::string::npos; at = svg.find("<circle", at + 1)) {
    ++points;
  }
  EXPECT_EQ(points, 150);
}

}  // namespace
}  // namespace weft::testing
