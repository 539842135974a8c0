// PartProtocol alone: the rows of its table, and random schedules against a model.

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "weft/ps/internal/part_protocol.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::ps::internal {
namespace {

using Verdict = PartProtocol::Verdict;

ClientKey client(uint32_t worker, uint64_t number = 1) {
  return {WorkerKey{WorkerId(worker), Incarnation(100 + worker)}, number};
}
PushHeader push(uint64_t number, uint64_t floor = 1, uint64_t clock = 0, uint64_t version = 0) {
  return {number, floor, clock, version};
}

// What a protocol says, in words.
struct Desk {
  explicit Desk(const Consistency& consistency) : protocol(consistency) {}

  Verdict push_of(const ClientKey& who, const PushHeader& header, Status accepted = {}) {
    const PartProtocol::Judgement judged = protocol.judge(who, header);
    told = judged.told;
    dropped = judged.dropped;
    if (judged.verdict == Verdict::kApply || judged.verdict == Verdict::kHold) {
      protocol.commit(who, header, judged, accepted, ++token, &effects);
    } else if (judged.verdict == Verdict::kDrop) {
      protocol.after_drop(&effects);
    }
    return judged.verdict;
  }
  // Tokens of the steps that were applied, and of pulls that became ready, in order.
  std::vector<std::vector<uint64_t>> steps() const {
    std::vector<std::vector<uint64_t>> out;
    for (const PartEffect& e : effects) {
      if (const auto* step = std::get_if<ApplyStep>(&e)) out.push_back(step->tokens);
    }
    return out;
  }
  std::vector<uint64_t> ready() const {
    std::vector<uint64_t> out;
    for (const PartEffect& e : effects) {
      if (const auto* pull = std::get_if<PullReady>(&e)) out.push_back(pull->token);
    }
    return out;
  }

  PartProtocol protocol;
  PartEffects effects;
  Status told;
  bool dropped = false;
  uint64_t token = 0;
};

TEST(PsProtocol, PSR_1_and_PSR_2_A_copy_is_not_done_again_and_is_told_the_same) {
  Desk desk(Consistency::asp());
  ASSERT_TRUE(desk.protocol.enter(client(1), 0, &desk.effects).ok());
  EXPECT_EQ(desk.push_of(client(1), push(1)), Verdict::kApply);
  EXPECT_EQ(desk.push_of(client(1), push(1)), Verdict::kSame);
  EXPECT_TRUE(desk.told.ok());
  const Status bad = make_error(ErrorKind::kInvalidArgument, "NaN");
  EXPECT_EQ(desk.push_of(client(1), push(2), bad), Verdict::kApply);
  EXPECT_EQ(desk.push_of(client(1), push(2)), Verdict::kSame);
  EXPECT_EQ(desk.told, bad);
  EXPECT_EQ(desk.protocol.version(), 1U);
  EXPECT_EQ(desk.steps().size(), 1U);
}

TEST(PsProtocol, PSR_3_What_its_client_has_given_up_is_not_accepted) {
  Desk desk(Consistency::asp());
  ASSERT_TRUE(desk.protocol.enter(client(1), 0, &desk.effects).ok());
  EXPECT_EQ(desk.push_of(client(1), push(5, 4)), Verdict::kApply);
  EXPECT_EQ(desk.push_of(client(1), push(3)), Verdict::kRefused);
  EXPECT_EQ(error_kind(desk.told), ErrorKind::kState);
  EXPECT_EQ(desk.push_of(client(1), push(4, 2)), Verdict::kApply);
  EXPECT_EQ(desk.protocol.remembered(), 2U);
  EXPECT_EQ(desk.push_of(client(1), push(6, 6)), Verdict::kApply);
  EXPECT_EQ(desk.protocol.remembered(), 1U);
  EXPECT_EQ(desk.push_of(client(1), push(6 + PartProtocol::kMostOpen, 6)), Verdict::kRefused);
  EXPECT_EQ(error_kind(desk.told), ErrorKind::kProtocol);
}

TEST(PsProtocol, PSR_4_Only_those_who_have_entered) {
  Desk desk(Consistency::asp());
  EXPECT_EQ(desk.push_of(client(1), push(1)), Verdict::kRefused);
  ASSERT_TRUE(desk.protocol.enter(client(1), 0, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.enter(client(2), 0, &desk.effects).ok());
  desk.protocol.leave(client(1), &desk.effects);
  EXPECT_EQ(desk.push_of(client(1), push(1)), Verdict::kRefused);
  EXPECT_FALSE(desk.protocol.enter(client(1), 0, &desk.effects).ok()) << "a late copy";
  desk.protocol.worker_gone(client(2).worker, &desk.effects);
  EXPECT_EQ(desk.push_of(client(2), push(1)), Verdict::kRefused);
  EXPECT_FALSE(desk.protocol.enter(client(2, 9), 0, &desk.effects).ok());
  EXPECT_FALSE(desk.protocol.advance(client(2), 1, &desk.effects).ok());
  EXPECT_EQ(desk.protocol.clients(), 0U);
}

TEST(PsProtocol, PSR_5_A_step_ends_once_in_order_of_clients) {
  Desk desk(Consistency::bsp(2));
  ASSERT_TRUE(desk.protocol.enter(client(2), 0, &desk.effects).ok());
  EXPECT_EQ(desk.push_of(client(2), push(1)), Verdict::kHold);  // token 1
  ASSERT_TRUE(desk.protocol.advance(client(2), 1, &desk.effects).ok());
  EXPECT_TRUE(desk.steps().empty()) << "one of two is there";
  ASSERT_TRUE(desk.protocol.enter(client(1), 0, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.pull(client(2), {.clock = 1}, 77, &desk.effects).ok());
  EXPECT_EQ(desk.push_of(client(1), push(1)), Verdict::kHold);        // token 2
  EXPECT_EQ(desk.push_of(client(2), push(2, 1, 1)), Verdict::kHold);  // of the next step
  EXPECT_TRUE(desk.ready().empty());
  ASSERT_TRUE(desk.protocol.advance(client(1), 1, &desk.effects).ok());
  EXPECT_EQ(desk.steps(), (std::vector<std::vector<uint64_t>>{{2, 1}}));
  EXPECT_EQ(desk.ready(), std::vector<uint64_t>{77});
  EXPECT_TRUE(std::holds_alternative<ApplyStep>(desk.effects[0])) << "the pull comes after";
  ASSERT_TRUE(desk.protocol.advance(client(1), 1, &desk.effects).ok());  // a copy
  EXPECT_EQ(desk.protocol.version(), 1U);
  EXPECT_EQ(desk.protocol.held(), 1U);
}

TEST(PsProtocol, PSR_6_A_pull_waits_for_those_that_are_too_far_behind) {
  Desk desk(Consistency::ssp(2, 2));
  ASSERT_TRUE(desk.protocol.enter(client(1), 0, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.pull(client(1), {.clock = 2}, 1, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.pull(client(1), {.clock = 3}, 2, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.enter(client(2), 0, &desk.effects).ok());
  EXPECT_EQ(desk.ready(), std::vector<uint64_t>{1});
  ASSERT_TRUE(desk.protocol.advance(client(1), 3, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.advance(client(2), 1, &desk.effects).ok());
  EXPECT_EQ(desk.ready(), (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(std::get<PullReady>(desk.effects.back()).lag, 2U);
}

TEST(PsProtocol, PSR_7_The_first_K_make_a_step_and_later_ones_are_dropped) {
  Desk desk(Consistency::batch(2, 3));
  for (uint32_t w = 1; w <= 3; ++w) {
    ASSERT_TRUE(desk.protocol.enter(client(w), 0, &desk.effects).ok());
  }
  EXPECT_EQ(desk.push_of(client(3), push(1)), Verdict::kHold);
  EXPECT_EQ(desk.push_of(client(3), push(2)), Verdict::kHold);
  EXPECT_TRUE(desk.steps().empty()) << "twice the same client";
  ASSERT_TRUE(desk.protocol.pull(client(3), {.clock = 1, .at_least = 1}, 9, &desk.effects).ok());
  EXPECT_EQ(desk.push_of(client(1), push(1)), Verdict::kHold);
  EXPECT_EQ(desk.steps(), (std::vector<std::vector<uint64_t>>{{3, 1, 2}}));
  EXPECT_EQ(desk.ready(), std::vector<uint64_t>{9});
  EXPECT_EQ(desk.push_of(client(2), push(1)), Verdict::kDrop);
  EXPECT_EQ(desk.push_of(client(2), push(1)), Verdict::kSame);
  EXPECT_TRUE(desk.dropped) << "a copy is told the same";
  EXPECT_EQ(desk.push_of(client(2), push(2, 1, 0, 7)), Verdict::kRefused);
  EXPECT_EQ(error_kind(desk.told), ErrorKind::kProtocol);
}

TEST(PsProtocol, PSR_8_Who_dies_or_leaves_holds_nobody_up_and_its_pushes_stay) {
  for (const bool dies : {true, false}) {
    Desk bsp(Consistency::bsp(2));
    ASSERT_TRUE(bsp.protocol.enter(client(1), 0, &bsp.effects).ok());
    ASSERT_TRUE(bsp.protocol.enter(client(2), 0, &bsp.effects).ok());
    EXPECT_EQ(bsp.push_of(client(2), push(1)), Verdict::kHold);
    EXPECT_EQ(bsp.push_of(client(1), push(1)), Verdict::kHold);
    ASSERT_TRUE(bsp.protocol.advance(client(1), 1, &bsp.effects).ok());
    EXPECT_TRUE(bsp.steps().empty());
    if (dies) {
      bsp.protocol.worker_gone(client(2).worker, &bsp.effects);
    } else {
      bsp.protocol.leave(client(2), &bsp.effects);
    }
    EXPECT_EQ(bsp.steps(), (std::vector<std::vector<uint64_t>>{{2, 1}}));
    EXPECT_EQ(std::get<ApplyStep>(bsp.effects[0]).divisor, 2U) << "it has taken part in this one";
  }
  Desk batch(Consistency::batch(2, 2));
  ASSERT_TRUE(batch.protocol.enter(client(1), 0, &batch.effects).ok());
  ASSERT_TRUE(batch.protocol.enter(client(2), 0, &batch.effects).ok());
  EXPECT_EQ(batch.push_of(client(1), push(1)), Verdict::kHold);
  batch.protocol.worker_gone(client(2).worker, &batch.effects);
  EXPECT_EQ(batch.steps().size(), 1U);
}

// One that has come and gone before the others came is not waited for either.
TEST(PsProtocol, PSR_8_Who_dies_before_the_others_have_come_holds_nobody_up) {
  Desk bsp(Consistency::bsp(2));
  ASSERT_TRUE(bsp.protocol.enter(client(1), 0, &bsp.effects).ok());
  bsp.protocol.worker_gone(client(1).worker, &bsp.effects);
  ASSERT_TRUE(bsp.protocol.enter(client(2), 0, &bsp.effects).ok());
  EXPECT_EQ(bsp.push_of(client(2), push(1)), Verdict::kHold);
  ASSERT_TRUE(bsp.protocol.advance(client(2), 1, &bsp.effects).ok());
  EXPECT_EQ(bsp.steps().size(), 1U);
  Desk batch(Consistency::batch(2, 3));
  for (uint32_t w = 1; w <= 2; ++w) {
    ASSERT_TRUE(batch.protocol.enter(client(w), 0, &batch.effects).ok());
    batch.protocol.leave(client(w), &batch.effects);
  }
  ASSERT_TRUE(batch.protocol.enter(client(3), 0, &batch.effects).ok());
  EXPECT_EQ(batch.push_of(client(3), push(1)), Verdict::kHold);
  EXPECT_EQ(batch.steps().size(), 1U);
}

TEST(PsProtocol, PSR_9_A_pull_that_waits_ends_once) {
  Desk desk(Consistency::bsp(1));
  ASSERT_TRUE(desk.protocol.enter(client(1), 0, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.pull(client(1), {.clock = 1}, 1, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.pull(client(1), {.clock = 1}, 2, &desk.effects).ok());
  EXPECT_TRUE(desk.protocol.cancel_pull(1));
  EXPECT_FALSE(desk.protocol.cancel_pull(1));
  ASSERT_TRUE(desk.protocol.advance(client(1), 1, &desk.effects).ok());
  EXPECT_EQ(desk.ready(), std::vector<uint64_t>{2});
  EXPECT_FALSE(desk.protocol.cancel_pull(2));
  EXPECT_EQ(desk.protocol.parked(), 0U);
}

// A clock that jumps would end very many steps, one by one.
TEST(PsProtocol, NonsenseClocksAreRefused) {
  Desk desk(Consistency::bsp(1));
  EXPECT_FALSE(desk.protocol.enter(client(1), uint64_t{1} << 60, &desk.effects).ok());
  ASSERT_TRUE(desk.protocol.enter(client(1), 3, &desk.effects).ok());
  EXPECT_FALSE(desk.protocol.advance(client(1), uint64_t{1} << 60, &desk.effects).ok());
  EXPECT_EQ(desk.push_of(client(1), push(1, 1, uint64_t{1} << 60)), Verdict::kRefused);
  EXPECT_EQ(desk.protocol.held(), 0U);
}

// ---- random schedules --------------------------------------------------------------------------

// Clients that push, advance, pull, leave and die, with copies of everything, late ones too; a model
// says what must have been applied.
class RandomWorld {
 public:
  RandomWorld(uint64_t seed, const Consistency& consistency)
      : random_(seed), consistency_(consistency), desk_(consistency) {
    const auto count = static_cast<uint32_t>(consistency.clients == 0 ? 3 : consistency.clients);
    for (uint32_t w = 1; w <= count; ++w) {
      EXPECT_TRUE(desk_.protocol.enter(client(w), 0, &desk_.effects).ok());
      clocks_[w] = 0;
    }
  }

  void run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
      step();
      judge_effects();
    }
    EXPECT_LE(applied_.size(), accepted_.size());
    if (consistency_.mode == Mode::kAsp || consistency_.mode == Mode::kSsp) {
      EXPECT_EQ(applied_, accepted_);
    }
    EXPECT_EQ(applied_.size() + desk_.protocol.held(), accepted_.size());
  }

 private:
  struct Sent {
    ClientKey who;
    PushHeader header;
  };
  uint64_t below(uint64_t n) { return random_() % n; }

  void step() {
    if (clocks_.empty()) return;
    auto at = clocks_.begin();
    std::advance(at, static_cast<int64_t>(below(clocks_.size())));
    const ClientKey who = client(at->first);
    switch (below(12)) {
      case 0:
      case 1:
      case 2: {
        PushHeader header = push(++numbers_[at->first], 1, at->second, desk_.protocol.version());
        if (below(3) == 0) header.version -= std::min<uint64_t>(header.version, below(3));
        if (numbers_[at->first] > 5 && below(2) == 0) header.floor = numbers_[at->first] - below(4);
        floors_[at->first] = std::max(floors_[at->first], header.floor);
        sent_.push_back({who, header});
        deliver(sent_.back());
        break;
      }
      case 3:
      case 4:
      case 5:
        if (!sent_.empty()) deliver(sent_[below(sent_.size())]);  // a copy
        break;
      case 6:
      case 7:
      case 8: EXPECT_TRUE(desk_.protocol.advance(who, ++at->second, &desk_.effects).ok()); break;
      case 9:
      case 10: {
        const uint64_t token = 1'000'000 + ++pulls_;
        clock_of_pull_[token] = at->second;
        EXPECT_TRUE(desk_.protocol.pull(who, {.clock = at->second}, token, &desk_.effects).ok());
        break;
      }
      default:
        if (below(20) != 0) break;
        if (below(2) == 0) {
          desk_.protocol.leave(who, &desk_.effects);
        } else {
          desk_.protocol.worker_gone(who.worker, &desk_.effects);
        }
        clocks_.erase(at);
    }
  }

  void deliver(const Sent& sent) {
    const uint32_t worker = sent.who.worker.id.value();
    const auto id = std::pair(worker, sent.header.number);
    const Verdict verdict = desk_.push_of(sent.who, sent.header);
    const bool living = clocks_.contains(worker);
    if (verdict == Verdict::kApply || verdict == Verdict::kHold) {
      EXPECT_TRUE(living) << "PSR-4";
      EXPECT_TRUE(accepted_.insert(id).second) << "PSR-1";
      EXPECT_GE(sent.header.number, floors_[worker]) << "PSR-3";
      by_token_[desk_.token] = {id, sent.header.clock};
    }
    if (verdict == Verdict::kSame && !desk_.dropped) {
      EXPECT_TRUE(accepted_.contains(id)) << "PSR-2";
    }
  }

  void judge_effects() {
    for (const PartEffect& effect : desk_.effects) {
      if (const auto* step = std::get_if<ApplyStep>(&effect)) {
        std::vector<std::pair<uint32_t, uint64_t>> order;
        for (const uint64_t token : step->tokens) {
          order.push_back(by_token_.at(token).first);
          EXPECT_TRUE(applied_.insert(order.back()).second) << "applied twice";
          if (consistency_.mode == Mode::kBsp) {
            EXPECT_LE(by_token_.at(token).second, steps_);
          }
        }
        EXPECT_TRUE(std::is_sorted(order.begin(), order.end())) << "PSR-5";
        EXPECT_TRUE(step->steps == 1 || step->tokens.empty());
        steps_ += step->steps;
        if (consistency_.mode != Mode::kBsp) continue;
        for (const auto& [worker, clock] : clocks_) EXPECT_GE(clock, steps_) << "PSR-5";
      } else {
        const uint64_t token = std::get<PullReady>(effect).token;
        const auto pull = clock_of_pull_.extract(token);
        ASSERT_FALSE(pull.empty()) << "PSR-9";
        if (consistency_.mode == Mode::kBsp) {
          EXPECT_GE(steps_, pull.mapped()) << "PSR-5";
        }
        if (consistency_.mode == Mode::kSsp) {
          EXPECT_LE(std::get<PullReady>(effect).lag, consistency_.bound) << "PSR-6";
        }
      }
    }
    desk_.effects.clear();
  }

  std::mt19937_64 random_;
  const Consistency consistency_;
  Desk desk_;
  std::map<uint32_t, uint64_t> clocks_;  // of the living
  std::map<uint32_t, uint64_t> numbers_;
  std::map<uint32_t, uint64_t> floors_;
  std::vector<Sent> sent_;
  std::set<std::pair<uint32_t, uint64_t>> accepted_;
  std::set<std::pair<uint32_t, uint64_t>> applied_;
  std::map<uint64_t, std::pair<std::pair<uint32_t, uint64_t>, uint64_t>> by_token_;
  std::map<uint64_t, uint64_t> clock_of_pull_;
  uint64_t pulls_ = 0;
  uint64_t steps_ = 0;
};

// Two parts of a table, and a batch of 2 of 3. Client 2 is too late at the first part and client 1 at the
// second, so each of them waits for a step at the part where it was in time. When client 3 leaves, neither
// can push before the other's step ends (seed 2297 of ps_sim_test).
TEST(PsProtocol, PSR_7_AStepDoesNotWaitForAClientThatWaitsForIt) {
  for (const bool leaves_last : {true, false}) {
    Desk part(Consistency::batch(2, 3));
    for (uint32_t c : {1, 2, 3}) {
      ASSERT_TRUE(part.protocol.enter(client(c), 0, &part.effects).ok());
    }
    EXPECT_EQ(part.push_of(client(1), push(1)), Verdict::kHold);
    EXPECT_EQ(part.push_of(client(3), push(1)), Verdict::kHold);
    ASSERT_EQ(part.steps().size(), 1U);
    EXPECT_EQ(part.push_of(client(1), push(2, 1, 1, 1)), Verdict::kHold);
    if (!leaves_last) part.protocol.leave(client(3), &part.effects);
    EXPECT_EQ(part.push_of(client(2), push(1)), Verdict::kDrop) << "it also is at another part";
    if (leaves_last) {
      EXPECT_EQ(part.steps().size(), 1U) << "client 3 may push";
      part.protocol.leave(client(3), &part.effects);
    }
    EXPECT_EQ(part.steps().size(), 2U) << "client 2 waits elsewhere for client 1, which waits here";
    EXPECT_EQ(part.push_of(client(2), push(2, 1, 1, 2)), Verdict::kHold);
    EXPECT_EQ(part.push_of(client(1), push(3, 1, 2, 2)), Verdict::kHold);
    EXPECT_EQ(part.steps().size(), 3U) << "both of them again";
    EXPECT_EQ(part.steps().back().size(), 2U);
  }
}

// A client may be any number of steps ahead of one that leaves. What has no push ends in one effect; a held
// push and a pull in between see exactly the steps below them.
TEST(PsProtocol, PSR_5_StepsWithoutPushesEndInOneGo) {
  Desk bsp(Consistency::bsp(2));
  EXPECT_TRUE(bsp.protocol.enter(client(1), 0, &bsp.effects).ok());
  EXPECT_TRUE(bsp.protocol.enter(client(2), 0, &bsp.effects).ok());
  constexpr uint64_t kAhead = PartProtocol::kMostOpen - 1;
  for (uint64_t clock = kAhead; clock <= 1000 * kAhead; clock += kAhead) {
    ASSERT_TRUE(bsp.protocol.advance(client(1), clock, &bsp.effects).ok());
    if (clock == kAhead) {
      EXPECT_TRUE(bsp.protocol.pull(client(1), {.clock = 1000}, 77, &bsp.effects).ok());
      EXPECT_EQ(bsp.push_of(client(1), push(1, 1, kAhead, 0)), Verdict::kHold);
    }
  }
  bsp.effects.clear();
  bsp.protocol.leave(client(2), &bsp.effects);
  ASSERT_EQ(bsp.effects.size(), 5U);
  EXPECT_EQ(std::get<ApplyStep>(bsp.effects[0]).steps, 1000U);
  EXPECT_EQ(std::get<PullReady>(bsp.effects[1]).token, 77U);
  EXPECT_EQ(std::get<ApplyStep>(bsp.effects[2]).steps, kAhead - 1000);
  EXPECT_EQ(std::get<ApplyStep>(bsp.effects[3]).tokens.size(), 1U);
  EXPECT_EQ(std::get<ApplyStep>(bsp.effects[4]).steps, 999 * kAhead - 1);
  EXPECT_EQ(bsp.protocol.version(), 1000 * kAhead);
}

TEST(PsProtocol, RandomSchedulesKeepTheInvariants) {
  const auto schedules = weft::testing::environment_number<uint64_t>(
      "WEFT_PS_PROTOCOL_SCHEDULES", weft::testing::fewer<uint64_t>(100'000, 300));
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    const Consistency all[] = {Consistency::asp(), Consistency::bsp(3),
                               Consistency::ssp(seed % 4, 3), Consistency::batch(1 + seed % 3, 3)};
    RandomWorld(seed, all[seed % 4]).run(150);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace weft::ps::internal
