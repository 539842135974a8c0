// The life of one call on its caller's side: CALL-4, over every pair of state and event.

#include "weft/rpc/internal/agent/call_state.h"

#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace weft::testing {
namespace {

using internal::call_step;
using internal::CallAction;
using internal::CallEvent;
using internal::CallState;
using internal::CallStep;

std::vector<CallState> all_states() {
  std::vector<CallState> out;
  for (int s = 0; s < internal::kCallStates; ++s) out.push_back(static_cast<CallState>(s));
  return out;
}
std::vector<CallEvent> all_events() {
  std::vector<CallEvent> out;
  for (int e = 0; e < internal::kCallEvents; ++e) out.push_back(static_cast<CallEvent>(e));
  return out;
}

TEST(CallTable, EveryPairHasOneStep) {
  for (const auto& a : internal::call_table::kRows) {
    int same = 0;
    for (const auto& b : internal::call_table::kRows) {
      const bool meet = a.guard == internal::CallGuard::kNone || a.guard == b.guard ||
                        b.guard == internal::CallGuard::kNone;
      same += a.from == b.from && a.event == b.event && meet ? 1 : 0;
    }
    EXPECT_EQ(same, 1) << "rows of state " << int(a.from) << ", event " << int(a.event);
  }
  int steps = 0;
  for (const CallState from : all_states()) {
    for (const CallEvent event : all_events()) {
      for (const bool once : {false, true}) {
        const CallStep step = call_step(from, event, once);
        if (step.action != CallAction::kImpossible) {
          ++steps;
          continue;
        }
        EXPECT_EQ(step.to, from) << "an event without a row changes nothing";
      }
    }
  }
  EXPECT_EQ(steps, 44) << "of " << 2 * internal::kCallStates * internal::kCallEvents;
}

TEST(CallTable, EveryStateIsReachedAndLeft) {
  std::set<CallState> reached = {CallState::kNoRoomUnstaged, CallState::kNoRoom,
                                 CallState::kUnstaged, CallState::kWaiting};
  for (size_t before = 0; before != reached.size();) {
    before = reached.size();
    for (const CallState from : std::vector<CallState>(reached.begin(), reached.end())) {
      for (const CallEvent event : all_events()) reached.insert(call_step(from, event, true).to);
    }
  }
  EXPECT_EQ(reached.size(), static_cast<size_t>(internal::kCallStates));
  for (const CallState from : all_states()) {
    bool left = false;
    for (const CallEvent event : all_events()) left |= call_step(from, event, true).to != from;
    EXPECT_TRUE(left) << "state " << int(from);
  }
}

// A world in which a connection may be lost at any moment: a frame that left may have run.
TEST(CallTable,
     CALL_4_what_may_have_run_is_sent_again_only_as_the_next_attempt_of_a_call_at_most_once) {
  std::mt19937 random(7);
  int again = 0, next = 0, failed = 0;
  for (int life = 0; life < 20'000; ++life) {
    const bool once = life % 2 == 0;
    CallState state = CallState::kWaiting;
    bool may_have_run = false;
    for (int i = 0; i < 12; ++i) {
      std::vector<CallEvent> possible;
      for (const CallEvent event : all_events()) {
        if (event == CallEvent::kNoRoomThere)
          continue;  // its own protocol tells what was delivered
        if (call_step(state, event, once).action != CallAction::kImpossible) {
          possible.push_back(event);
        }
      }
      ASSERT_FALSE(possible.empty());
      const CallEvent event = possible[random() % possible.size()];
      const CallState before = state;
      const CallStep step = call_step(state, event, once);
      // All frames accepted and the loss known, or the loss of what was accepted.
      const bool left = (event == CallEvent::kAccepted && before != CallState::kSendingUnsent) ||
                        (event == CallEvent::kLost && before == CallState::kSent);
      if (event == CallEvent::kTaken) may_have_run = false;
      may_have_run |= left;
      if (event == CallEvent::kLostUnsent || event == CallEvent::kRefused) may_have_run = false;
      state = step.to;
      if (step.action == CallAction::kSendAgain) {
        ++again;
        EXPECT_FALSE(may_have_run);
      }
      if (step.action == CallAction::kSendNext) {
        ++next;
        EXPECT_TRUE(once);
      }
      if (step.action == CallAction::kMaybeExecuted) {
        ++failed;
        EXPECT_FALSE(once);
        EXPECT_TRUE(may_have_run);
        break;
      }
      if (step.action == CallAction::kFails) break;
    }
  }
  EXPECT_GT(again, 1000);
  EXPECT_GT(next, 1000);
  EXPECT_GT(failed, 1000);
}

}  // namespace
}  // namespace weft::testing
