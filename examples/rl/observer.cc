#include "weft/examples/rl/observer.h"

#include <vector>

namespace rl {

Observer::Observer(int64_t number, uint64_t seed)
    : number_(number), game_(Draws(seed, 2 * static_cast<uint64_t>(number) + 2)) {}

void Observer::run_episode(const weft::RRef<Agent>& agent) {
  std::vector<float> rewards;
  CartPole::Step now{.state = game_.reset()};
  while (!now.ended) {
    now = game_.step(agent.rpc_sync(&Agent::act, number_, now.state));
    rewards.push_back(now.reward);
  }
  agent.rpc_sync(&Agent::report, number_, rewards);
}

weft::Library library() {
  weft::Library lib("rl");
  lib.class_<Observer>("Observer")
      .constructor<int64_t, uint64_t>()
      .def("run_episode", &Observer::run_episode);
  // Neither waits: act() returns a future. So they need no thread of the pool.
  lib.class_<Agent>("Agent", {.concurrent = true})
      .def("act", &Agent::act, {.inline_ok = true})
      .def("report", &Agent::report, {.inline_ok = true});
  return lib;
}

}  // namespace rl
