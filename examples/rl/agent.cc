#include "weft/examples/rl/agent.h"

#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/tensor.h"

namespace rl {
namespace {

constexpr float kDiscount = 0.99F;

// The sum of the rewards from each step on, later ones counting less.
void append_returns(const std::vector<float>& rewards, std::vector<float>* returns) {
  const size_t begin = returns->size();
  returns->resize(begin + rewards.size());
  float sum = 0;
  for (size_t i = rewards.size(); i > 0; --i) {
    sum = rewards[i - 1] + kDiscount * sum;
    (*returns)[begin + i - 1] = sum;
  }
}

}  // namespace

Agent::Agent(const AgentOptions& options) : options_(options), policy_(options.seed) {
  for (int64_t i = 0; i < options.observers; ++i) {
    draws_.emplace_back(options.seed, 2 * static_cast<uint64_t>(i) + 1);
  }
}

void Agent::check_plays(int64_t observer) const {
  weft::throw_if_error(failed_);
  if (playing_.count(observer) == 0) {
    throw std::invalid_argument("observer " + std::to_string(observer) + " has no episode; " +
                                std::to_string(playing_.size()) + " of " +
                                std::to_string(options_.observers) + " observers play");
  }
}

weft::Future<int64_t> Agent::act(int64_t observer, const State& state) {
  weft::Future<int64_t> action;
  Batch batch;
  {
    std::lock_guard lock(mutex_);
    check_plays(observer);
    auto [question, first] = waiting_.try_emplace(observer);
    if (!first) {
      throw std::invalid_argument("observer " + std::to_string(observer) +
                                  " asks again before it has the answer");
    }
    question->second.state = state;
    action = question->second.answer.future();
    batch = take_batch();
  }
  answer(std::move(batch));
  return action;
}

void Agent::report(int64_t observer, const std::vector<float>& rewards) {
  Batch batch;
  {
    std::lock_guard lock(mutex_);
    check_plays(observer);
    Episode& episode = round_[static_cast<size_t>(observer)];
    if (waiting_.count(observer) != 0 || rewards.size() != episode.actions.size()) {
      throw std::invalid_argument("observer " + std::to_string(observer) + " reports " +
                                  std::to_string(rewards.size()) + " rewards, and has had " +
                                  std::to_string(episode.actions.size()) + " actions" +
                                  (waiting_.count(observer) != 0 ? " and asked for one more" : ""));
    }
    episode.rewards = rewards;
    playing_.erase(observer);
    // The others may have waited for this one only.
    batch = take_batch();
  }
  answer(std::move(batch));
}

Agent::Batch Agent::take_batch() {
  const bool complete = !options_.batch || waiting_.size() == playing_.size();
  return complete ? std::exchange(waiting_, {}) : Batch();
}

void Agent::answer(Batch batch) {
  if (batch.empty()) return;
  const auto n = static_cast<int64_t>(batch.size());
  at::Tensor states = at::empty({n, 4}, at::kFloat);
  auto* number = states.data_ptr<float>();
  for (const auto& [observer, question] : batch) {
    number = std::copy(question.state.begin(), question.state.end(), number);
  }
  const at::Tensor right = policy_.right(states);
  const auto* probability = right.data_ptr<float>();
  std::vector<int64_t> actions;
  {
    std::lock_guard lock(mutex_);
    answers_ += n;
    ++evaluations_;
    for (const auto& [observer, question] : batch) {
      const auto index = static_cast<size_t>(observer);
      actions.push_back(draws_[index].next() < static_cast<double>(*probability++) ? 1 : 0);
      Episode& episode = round_[index];
      episode.states.insert(episode.states.end(), question.state.begin(), question.state.end());
      episode.actions.push_back(actions.back());
    }
  }
  // Outside the lock: completing a promise may run code of others.
  auto action = actions.begin();
  for (auto& [observer, question] : batch) question.answer.try_set(*action++);
}

void Agent::begin_round() {
  std::lock_guard lock(mutex_);
  past_.insert(past_.end(), std::make_move_iterator(round_.begin()),
               std::make_move_iterator(round_.end()));
  round_.assign(static_cast<size_t>(options_.observers), {});
  for (int64_t i = 0; i < options_.observers; ++i) playing_.insert(i);
}

void Agent::learn() {
  std::vector<float> states;
  std::vector<int64_t> actions;
  std::vector<float> returns;
  {
    std::lock_guard lock(mutex_);
    past_.insert(past_.end(), std::make_move_iterator(round_.begin()),
                 std::make_move_iterator(round_.end()));
    round_.clear();
    for (const Episode& episode : past_) {
      states.insert(states.end(), episode.states.begin(), episode.states.end());
      actions.insert(actions.end(), episode.actions.begin(), episode.actions.end());
      append_returns(episode.rewards, &returns);
    }
    past_.clear();
  }
  policy_.learn(at::tensor(states).view({-1, 4}), at::tensor(actions), at::tensor(returns));
}

void Agent::fail(const weft::Status& why) {
  Batch batch;
  {
    std::lock_guard lock(mutex_);
    failed_ = why;
    batch = std::exchange(waiting_, {});
  }
  for (auto& [observer, question] : batch) question.answer.try_set(why);
}

std::vector<double> Agent::returns() const {
  std::lock_guard lock(mutex_);
  std::vector<double> sums;
  for (const Episode& episode : round_) {
    sums.push_back(std::accumulate(episode.rewards.begin(), episode.rewards.end(), 0.0));
  }
  return sums;
}

int64_t Agent::answers() const {
  std::lock_guard lock(mutex_);
  return answers_;
}

int64_t Agent::evaluations() const {
  std::lock_guard lock(mutex_);
  return evaluations_;
}

}  // namespace rl
