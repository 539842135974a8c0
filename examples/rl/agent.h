#ifndef WEFT_EXAMPLES_RL_AGENT_H_
#define WEFT_EXAMPLES_RL_AGENT_H_

// Agent: has the policy. Observers hold an RRef to it, ask it what to do (act) and tell it what
// came of that (report); its own worker lets it learn between two rounds. A round is one episode by
// each observer.
//
// With `batch` the observers are answered in step: act() answers none of them before all that still
// play have asked, and then evaluates the policy once for all. No thread waits meanwhile: act()
// returns a future, and the last question completes those of all. An observer whose episode ends
// leaves the batch by its report.
//
// Its class is registered `concurrent`: calls on an object run one at a time otherwise, and the
// second of a batch would wait for the first, which waits for the second. So it locks for itself;
// any thread.

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "weft/examples/rl/cartpole.h"
#include "weft/examples/rl/policy.h"
#include "weft/weft.h"

namespace rl {

struct AgentOptions {
  int64_t observers = 1;
  uint64_t seed = 1;
  bool batch = true;
};

class Agent {
 public:
  explicit Agent(const AgentOptions& options);

  // ---- called by observers; errors: std::invalid_argument for one that does not play, asks again
  // before it has the answer, or reports other than one reward for each action -------------------
  // 0: push to the left, 1: to the right; drawn as the policy says.
  weft::Future<int64_t> act(int64_t observer, const State& state);
  // The end of the observer's episode, and the rewards of its steps.
  void report(int64_t observer, const std::vector<float>& rewards);

  // ---- called where it lives, one thread -------------------------------------------------------
  // Every observer plays.
  void begin_round();
  // Improves the policy by the episodes since the last time. REQUIRES: no observer plays.
  void learn();
  // No observer can go on: a call that waits for an answer, or asks from now on, gets `why`.
  void fail(const weft::Status& why);
  // The sum of rewards of each episode of the last round, by observer.
  std::vector<double> returns() const;
  // Answers that were given, and evaluations of the policy for them.
  int64_t answers() const;
  int64_t evaluations() const;

 private:
  struct Question {
    State state{};
    weft::Promise<int64_t> answer;
  };
  using Batch = std::map<int64_t, Question>;  // by observer: their order decides nothing
  struct Episode {
    std::vector<float> states;
    std::vector<int64_t> actions;
    std::vector<float> rewards;
  };

  void check_plays(int64_t observer) const;
  // The questions that are to be answered now; none as long as an observer has not asked.
  Batch take_batch();
  void answer(Batch batch);

  const AgentOptions options_;
  Policy policy_;

  mutable std::mutex mutex_;
  weft::Status failed_;
  std::set<int64_t> playing_;
  Batch waiting_;
  std::vector<Draws> draws_;  // by observer, as is the next
  std::vector<Episode> round_;
  int64_t answers_ = 0;
  int64_t evaluations_ = 0;
  std::vector<Episode> past_;  // rounds before this one, not learned from yet
};

}  // namespace rl

#endif  // WEFT_EXAMPLES_RL_AGENT_H_
