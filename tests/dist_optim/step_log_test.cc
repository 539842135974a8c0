// StepLog: OPT-8 and OPT-9, as a table.

#include "weft/dist_optim/spi/step_log.h"

#include <optional>
#include <random>

#include "gtest/gtest.h"

namespace weft::internal {
namespace {

using State = StepLog::State;
using Next = StepLog::Next;

constexpr absl::Time kStart = absl::UnixEpoch();
absl::Time at(int seconds) { return kStart + absl::Seconds(seconds); }
StepLog::Held thing() { return std::make_shared<int>(1); }

TEST(StepLog, PreparedAppliedAndToldAgain) {
  StepLog log;
  const StepLog::Held held = thing();
  EXPECT_EQ(log.prepare(1, held, at(10)), Next::kGo);
  EXPECT_EQ(log.prepared(), 1U);
  EXPECT_EQ(log.next_expiry(), at(10));
  EXPECT_EQ(log.prepare(1, thing(), at(20)), Next::kRefuse);
  EXPECT_EQ(log.begin(1), Next::kRefuse);
  StepLog::Answer first = log.apply(1, at(9));
  EXPECT_EQ(first.next, Next::kGo);
  EXPECT_EQ(first.step.held, held);
  EXPECT_EQ(log.prepared(), 0U);
  EXPECT_EQ(log.apply(1, at(9)).next, Next::kWait);
  EXPECT_EQ(log.cancel(1).next, Next::kWait);
  EXPECT_TRUE(log.expire(at(100)).empty());
  log.finish(1, State::kApplied, absl::OkStatus(), 3, 1);
  for (int i = 0; i < 2; ++i) {
    for (const StepLog::Answer& told : {log.apply(1, at(200)), log.cancel(1)}) {
      EXPECT_EQ(told.next, Next::kTell);
      EXPECT_EQ(told.step.state, State::kApplied);
      EXPECT_EQ(told.step.updated, 3);
      EXPECT_EQ(told.step.stale, 1);
    }
  }
  log.finish(1, State::kNotApplied, absl::OkStatus(), 0, 0);
  EXPECT_EQ(log.cancel(1).step.state, State::kApplied);
}

TEST(StepLog, OPT_9_what_is_cancelled_or_late_is_never_applied) {
  StepLog log;
  // The cancel overtakes all.
  EXPECT_EQ(log.cancel(1).next, Next::kTell);
  EXPECT_EQ(log.prepare(1, thing(), at(10)), Next::kRefuse);
  EXPECT_EQ(log.begin(1), Next::kRefuse);
  EXPECT_EQ(log.apply(1, at(0)).step.state, State::kNotApplied);
  // In order.
  EXPECT_EQ(log.prepare(2, thing(), at(10)), Next::kGo);
  EXPECT_EQ(log.cancel(2).next, Next::kDrop);
  EXPECT_EQ(log.apply(2, at(0)).step.state, State::kNotApplied);
  // Its time is over: when the second message comes, and when none comes.
  EXPECT_EQ(log.prepare(3, thing(), at(10)), Next::kGo);
  const StepLog::Answer late = log.apply(3, at(10));
  EXPECT_EQ(late.next, Next::kDrop);
  EXPECT_NE(late.step.held, nullptr);
  EXPECT_EQ(log.apply(3, at(5)).step.state, State::kNotApplied);
  EXPECT_EQ(log.prepare(4, thing(), at(10)), Next::kGo);
  EXPECT_TRUE(log.expire(at(9)).empty());
  EXPECT_EQ(log.expire(at(10)).size(), 1U);
  EXPECT_EQ(log.apply(4, at(5)).step.state, State::kNotApplied);
  EXPECT_EQ(log.next_expiry(), absl::InfiniteFuture());
}

// What is forgotten never begins.
TEST(StepLog, KeepsABoundedNumber) {
  StepLog log;
  EXPECT_EQ(log.prepare(7, thing(), at(10)), Next::kGo);
  for (uint64_t i = 10; i < 10 + 10 * StepLog::kKept; ++i) {
    EXPECT_EQ(log.begin(i), Next::kGo);
    log.finish(i, State::kApplied, absl::OkStatus(), 1, 0);
    EXPECT_LE(log.size(), StepLog::kKept + 1);
  }
  EXPECT_EQ(log.begin(11), Next::kRefuse);
  EXPECT_EQ(log.cancel(11).step.state, State::kNotApplied);
  EXPECT_EQ(log.apply(7, at(5)).next, Next::kGo) << "one that is prepared stays";
  EXPECT_EQ(log.drop_all().size(), 0U);
}

// Whatever comes in whatever order, a step is applied at most once, and its outcome never changes.
TEST(StepLog, OPT_8_any_order) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    StepLog log;
    int applied = 0;
    bool applying = false;
    std::optional<State> told;
    for (int i = 0; i < 12; ++i) {
      const absl::Time now = at(static_cast<int>(random() % 4));
      StepLog::Answer answer;
      switch (random() % 6) {
        case 0: log.prepare(5, thing(), at(2)); continue;
        case 1:
          if (log.begin(5) != Next::kGo) continue;
          answer.next = Next::kGo;
          break;
        case 2: answer = log.apply(5, now); break;
        case 3: answer = log.cancel(5); break;
        case 4: log.expire(now); continue;
        default:
          if (!applying) continue;
          log.finish(5, State::kApplied, absl::OkStatus(), 1, 0);
          applying = false;
          ++applied;
          continue;
      }
      if (answer.next == Next::kGo) {
        EXPECT_FALSE(applying);
        EXPECT_FALSE(told.has_value());
        applying = true;
      } else if (answer.next == Next::kWait) {
        EXPECT_TRUE(applying);
      } else {
        const State now_told = answer.next == Next::kDrop ? State::kNotApplied : answer.step.state;
        EXPECT_EQ(told.value_or(now_told), now_told);
        EXPECT_EQ(now_told == State::kApplied, applied == 1);
        told = now_told;
      }
    }
    EXPECT_LE(applied, 1);
  }
}

}  // namespace
}  // namespace weft::internal
