#ifndef WEFT_EXAMPLES_RL_OBSERVER_H_
#define WEFT_EXAMPLES_RL_OBSERVER_H_

// Observer: has a CartPole, and plays it as the agent says. The agent makes it at another worker
// with weft::remote and has it play through the RRef.

#include <cstdint>

#include "weft/examples/rl/agent.h"
#include "weft/examples/rl/cartpole.h"
#include "weft/weft.h"

namespace rl {

class Observer {
 public:
  // The observer of this number, from 0, of those of the agent.
  Observer(int64_t number, uint64_t seed);

  // Asks `agent` for every step, and reports the rewards at the end.
  void run_episode(const weft::RRef<Agent>& agent);

 private:
  const int64_t number_;
  CartPole game_;
};

// What workers may call on each other: the same at agent and observers.
weft::Library library();

}  // namespace rl

#endif  // WEFT_EXAMPLES_RL_OBSERVER_H_
