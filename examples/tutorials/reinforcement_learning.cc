// Reinforcement learning: two observers play, and ask an agent at another worker what to do.
//   build/bin/weftrun --role agent:1 --role observer:2 build/bin/tutorial_reinforcement_learning

#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "ATen/Context.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/log_softmax.h"
#include "ATen/ops/relu.h"
#include "ATen/ops/tensor.h"
#include "weft/examples/rl/cartpole.h"
#include "weft/weft.h"

constexpr int kObservers = 2;
constexpr int kRounds = 60;

// Has the policy. Calls on one object run one at a time, so it needs no lock.
class Agent {
 public:
  // 0 pushes the cart to the left, 1 to the right.
  int64_t select_action(int64_t observer, const rl::State& state) {
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::tensor(std::vector<float>(state.begin(), state.end()));
    const double right = log_p(x)[1].exp().item<double>();
    const auto i = static_cast<size_t>(observer);
    const int64_t action = draws_[i].next() < right ? 1 : 0;
    states_[i].insert(states_[i].end(), state.begin(), state.end());
    actions_[i].push_back(action);
    return action;
  }

  // One step of REINFORCE, from an episode of each observer.
  void learn(const std::vector<std::vector<float>>& rewards) {
    std::vector<float> states;
    std::vector<int64_t> actions;
    std::vector<float> returns;
    for (size_t i = 0; i < rewards.size(); ++i) {
      std::vector<float> sums = rewards[i];
      for (size_t t = sums.size() - 1; t-- > 0;) sums[t] += 0.99F * sums[t + 1];
      returns.insert(returns.end(), sums.begin(), sums.end());
      states.insert(states.end(), states_[i].begin(), states_[i].end());
      actions.insert(actions.end(), actions_[i].begin(), actions_[i].end());
      states_[i].clear();
      actions_[i].clear();
    }
    const at::Tensor all = log_p(at::tensor(states).view({-1, 4}));
    const at::Tensor taken = all.gather(1, at::tensor(actions).unsqueeze(1)).squeeze(1);
    at::Tensor advantage = at::tensor(returns);
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6);
    optimizer_.zero_grad();
    (-taken * advantage).mean().backward();
    optimizer_.step();
  }

 private:
  // Logarithms of the probabilities of both actions.
  at::Tensor log_p(const at::Tensor& states) {
    return at::log_softmax(output_(at::relu(hidden_(states))), -1);
  }
  static std::vector<at::Tensor> together(std::vector<at::Tensor> a, std::vector<at::Tensor> b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  torch::nn::Linear hidden_{4, 64};
  torch::nn::Linear output_{64, 2};
  torch::optim::Adam optimizer_{together(hidden_->parameters(), output_->parameters()),
                                torch::optim::AdamOptions(0.02)};
  std::vector<rl::Draws> draws_ = {rl::Draws(1, 0), rl::Draws(1, 1)};  // by observer
  std::vector<std::vector<float>> states_ = std::vector<std::vector<float>>(kObservers);
  std::vector<std::vector<int64_t>> actions_ = std::vector<std::vector<int64_t>>(kObservers);
};

// Has a game of its own.
class Observer {
 public:
  explicit Observer(int64_t number) : number_(number), game_(rl::Draws(2, number)) {}

  // Returns the reward of each step.
  std::vector<float> run_episode(const weft::RRef<Agent>& agent) {
    std::vector<float> rewards;
    rl::CartPole::Step now{.state = game_.reset()};
    while (!now.ended) {
      now = game_.step(agent.rpc_sync(&Agent::select_action, number_, now.state));
      rewards.push_back(now.reward);
    }
    return rewards;
  }

 private:
  const int64_t number_;
  rl::CartPole game_;
};

weft::Library library() {
  weft::Library lib("rl");
  lib.class_<Agent>("Agent").def("select_action", &Agent::select_action);
  lib.class_<Observer>("Observer")
      .constructor<int64_t>()
      .def("run_episode", &Observer::run_episode);
  return lib;
}

bool lead(const weft::Worker& worker) {
  const auto agent = std::make_shared<Agent>();
  const auto shared = weft::RRef<Agent>::local(worker, agent);
  std::vector<weft::RRef<Observer>> observers;
  for (int64_t i = 0; i < kObservers; ++i) {
    observers.push_back(weft::remote<Observer>(worker, "observer" + std::to_string(i), i));
  }
  double early = 0;
  double late = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<weft::Future<std::vector<float>>> episodes;
    for (const auto& one : observers) {
      episodes.push_back(one.rpc_async(&Observer::run_episode, shared));
    }
    const std::vector<std::vector<float>> rewards = weft::when_all(episodes).wait();
    agent->learn(rewards);
    for (const auto& steps : rewards) {
      if (round < 10) early += static_cast<double>(steps.size()) / (10 * kObservers);
      if (round >= kRounds - 10) late += static_cast<double>(steps.size()) / (10 * kObservers);
    }
  }
  const bool learned = late > 2 * early;
  std::cout << "reinforcement_learning: " << (learned ? "ok" : "not learned")
            << " steps of an episode: " << early << " at first, " << late << " at last"
            << std::endl;
  return learned;
}

int main() {
  at::manual_seed(1);
  const weft::Worker worker = weft::join({.library = library()});
  const bool learned = worker.name() != "agent0" || lead(worker);
  return worker.shutdown().status.ok() && learned ? 0 : 1;
}
