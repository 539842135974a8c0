// Answers that are kept for calls that are at most once (rpc/internal/agent/dedup.h), by themselves.

#include "weft/rpc/internal/agent/dedup.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace weft::testing {
namespace {

using internal::Answer;
using internal::CallWindow;
using internal::KeptAnswers;
using Begun = CallWindow::Seen;

constexpr uint64_t kCost = 1000;  // of an answer as answer_of() makes them
constexpr uint64_t kMuch = 1 << 20;

Answer answer_of(size_t bytes = 448) {
  auto message = std::make_shared<internal::OutMessage>();
  message->body.resize(bytes);
  message->bytes = bytes;
  return Answer{.message = std::move(message)};
}

class Windows : public ::testing::Test {
 protected:
  Begun begin(CallWindow& w, uint64_t id) {
    Answer answer;
    return w.begin(id, &answer);
  }
  void run(CallWindow& w, uint64_t id, const Answer& answer = answer_of()) {
    ASSERT_EQ(begin(w, id), Begun::kNew) << id;
    w.finish(id, answer, &dropped_);
  }

  std::vector<Answer> dropped_;
};

TEST_F(Windows, DEF_7_the_caller_that_is_idle_for_longest_loses_its_oldest_answer_first) {
  KeptAnswers kept(6 * kCost, kMuch);
  CallWindow a(&kept);
  CallWindow b(&kept);
  CallWindow c(&kept);
  for (uint64_t id : {3, 1, 2}) run(a, id);
  for (uint64_t id : {1, 2}) run(b, id);
  run(c, 1);
  EXPECT_EQ(kept.bytes(), 6 * kCost);
  run(c, 2);
  EXPECT_EQ(begin(a, 1), Begun::kAnswerDropped);  // and a is idle no longer
  EXPECT_EQ(begin(a, 2), Begun::kAnswered);
  run(c, 3);
  EXPECT_EQ(begin(b, 1), Begun::kAnswerDropped);
  EXPECT_EQ(begin(b, 2), Begun::kAnswered);
  EXPECT_EQ(begin(a, 3), Begun::kAnswered);
  EXPECT_EQ(kept.bytes(), 6 * kCost);
  EXPECT_EQ(dropped_.size(), 2U);
  // Those of one that is gone do not count, and what is acknowledged does not.
  a.close();
  EXPECT_EQ(kept.bytes(), 4 * kCost);
  EXPECT_EQ(a.bytes(), 0U);
  c.ack_below(3, &dropped_);
  EXPECT_EQ(kept.bytes(), 2 * kCost);
  EXPECT_EQ(c.answers(), 1U);
  EXPECT_EQ(begin(c, 2), Begun::kForgotten);
}

TEST_F(Windows, DEF_7_what_is_too_large_is_not_kept_and_costs_others_nothing) {
  KeptAnswers kept(4 * kCost, 2 * kCost);
  CallWindow a(&kept);
  CallWindow b(&kept);
  run(a, 1);
  run(b, 1, answer_of(3 * kCost));  // more than one caller may have
  EXPECT_EQ(begin(b, 1), Begun::kAnswerDropped);
  EXPECT_EQ(begin(a, 1), Begun::kAnswered);
  run(a, 2);
  run(a, 3);  // a has two already
  EXPECT_EQ(begin(a, 1), Begun::kAnswerDropped);
  EXPECT_EQ(begin(a, 3), Begun::kAnswered);
  EXPECT_EQ(kept.bytes(), 2 * kCost);
}

TEST_F(Windows, DEF_7_an_answer_of_all_that_a_caller_may_have_is_kept) {
  KeptAnswers kept(4 * kCost, 2 * kCost);
  CallWindow a(&kept);
  run(a, 1, answer_of(448 + kCost));
  EXPECT_EQ(begin(a, 1), Begun::kAnswered);
  EXPECT_EQ(kept.bytes(), 2 * kCost);
  run(a, 2, answer_of(448 + kCost + 1));
  EXPECT_EQ(begin(a, 2), Begun::kAnswerDropped);
  EXPECT_EQ(begin(a, 1), Begun::kAnswered);
}

TEST_F(Windows, DEF_7_an_answer_that_is_being_sent_again_stays_charged) {
  KeptAnswers kept(4 * kCost, kMuch);
  CallWindow a(&kept);
  run(a, 1);
  {
    Answer again;
    EXPECT_EQ(a.begin(1, &again), Begun::kAnswered);
    a.ack_below(2, &dropped_);
    EXPECT_EQ(a.answers(), 0U);
    EXPECT_EQ(kept.bytes(), kCost);
  }
  EXPECT_EQ(kept.bytes(), 0U);
}

TEST_F(Windows, DEF_7_a_caller_that_acknowledges_nothing_is_refused) {
  KeptAnswers kept(2 * kCost, kMuch);
  CallWindow a(&kept, /*most_facts=*/100);
  uint64_t id = 0;
  while (id < 1000 && begin(a, ++id) == Begun::kNew) a.finish(id, answer_of(), &dropped_);
  EXPECT_EQ(id, 103U);  // two answers are here, a hundred were dropped
  EXPECT_EQ(begin(a, id), Begun::kTooMany);
  EXPECT_EQ(begin(a, 1), Begun::kAnswerDropped);
  a.ack_below(50, &dropped_);
  EXPECT_EQ(begin(a, id), Begun::kNew);
}

// CALL-2, and the bounds, whatever comes in whatever order.
TEST_F(Windows, CALL_2_and_the_bounds_hold_in_any_order) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    KeptAnswers kept(9 * kCost, 4 * kCost);
    std::vector<std::unique_ptr<CallWindow>> windows(4);
    std::vector<std::map<uint64_t, bool>> calls(4);  // whether it has ended
    std::vector<uint64_t> acked(4);
    for (int step = 0; step < 2000; ++step) {
      const size_t at = random() % 4;
      std::unique_ptr<CallWindow>& w = windows[at];
      if (w == nullptr || random() % 200 == 0) {  // it is gone, and another one comes
        w = std::make_unique<CallWindow>(&kept);
        calls[at].clear();
        acked[at] = 0;
      }
      const uint64_t id = acked[at] - std::min<uint64_t>(acked[at], 3) + random() % 12;
      const auto known = calls[at].find(id);
      if (random() % 8 == 0) {
        w->ack_below(id, &dropped_);
        acked[at] = std::max(acked[at], id);
      } else if (known != calls[at].end() && !known->second && random() % 2 == 0) {
        w->finish(id, answer_of(random() % 2000), &dropped_);
        known->second = true;
      } else {
        const Begun seen = begin(*w, id);
        if (id < acked[at]) {
          ASSERT_EQ(seen, Begun::kForgotten);
        } else if (known == calls[at].end()) {
          ASSERT_EQ(seen, Begun::kNew);
          calls[at][id] = false;
        } else if (known->second) {
          ASSERT_TRUE(seen == Begun::kAnswered || seen == Begun::kAnswerDropped);
        } else {
          ASSERT_EQ(seen, Begun::kRunning);
        }
      }
      ASSERT_EQ(w->calls(), static_cast<size_t>(
                                std::distance(calls[at].lower_bound(acked[at]), calls[at].end())));
      uint64_t bytes = 0;
      for (const auto& one : windows) {
        if (one == nullptr) continue;
        ASSERT_LE(one->bytes(), 4 * kCost);
        bytes += one->bytes();
      }
      ASSERT_EQ(kept.bytes(), bytes);
      ASSERT_LE(bytes, 9 * kCost);
    }
    windows.clear();
    ASSERT_EQ(kept.bytes(), 0U);
  }
}

}  // namespace
}  // namespace weft::testing
