// Random schedules: 3 to 5 workers that do all that a World can do, in an order drawn from a seed.
// WEFT_RREF_SCHEDULES says how many; WEFT_RREF_SEED runs one seed and prints its steps.

#include <algorithm>
#include <iostream>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/tests/rref/world.h"
#include "weft/tests/testing/environment.h"

namespace weft::test {
namespace {

struct Totals {
  std::string trace;  // what the worlds were, step by step, when it is asked for
  uint64_t steps = 0;
  uint64_t values = 0;
  uint64_t errors = 0;
  uint64_t crashes = 0;
  uint64_t sent[8] = {};
};

enum class Trace { kNone, kPrint, kKeep };

// Returns the violation, or nothing.
std::string run_schedule(uint64_t seed, Bug bug, Trace trace, Totals& totals) {
  std::mt19937_64 random(seed);
  const auto below = [&random](int bound) {
    return static_cast<int>(random() % static_cast<uint64_t>(bound));
  };
  const World::Budget budget = {.remotes = 1 + below(6),
                                .locals = below(3),
                                .shares = below(13),
                                .fetches = below(8),
                                .errors = below(2),
                                .returns = below(5),
                                .flushes = below(6),
                                .repeats = below(10),
                                .losses = below(2) * below(5),
                                .cancels = below(3),
                                .audits = below(3),
                                .crashes = below(2) * below(3),
                                .leaves = below(2),
                                .in_flight = 4 + below(12),
                                .roles = false};
  World world(3 + below(3), budget, bug);
  for (int step = 0; step < 300 && world.violation().empty(); ++step) {
    const std::vector<Step> steps = world.steps();
    if (steps.empty()) break;
    const Step& next = steps[random() % steps.size()];
    if (trace == Trace::kPrint) std::cout << step + 1 << ". " << world.describe(next) << "\n";
    if (trace == Trace::kKeep) totals.trace += world.describe(next) + "\n" + world.state() + "\n";
    world.apply(next);
    ++totals.steps;
  }
  if (world.violation().empty()) world.drain();
  for (size_t kind = 0; kind < 8; ++kind) {
    totals.sent[kind] += world.sent(static_cast<MessageKind>(kind));
  }
  totals.values += static_cast<uint64_t>(world.values());
  totals.errors += static_cast<uint64_t>(world.errors());
  for (int i = 0; i < world.size(); ++i) totals.crashes += !world.is_up(i);
  return world.violation();
}

TEST(RRefRandom, Schedules) {
  Totals totals;
  if (const uint64_t seed = weft::testing::environment_number<uint64_t>("WEFT_RREF_SEED", 0);
      seed != 0) {
    EXPECT_EQ(run_schedule(seed, Bug::kNone, Trace::kPrint, totals), "");
    return;
  }
  const uint64_t schedules =
      weft::testing::environment_number<uint64_t>("WEFT_RREF_SCHEDULES", 100'000);
  for (uint64_t seed = 1; seed <= schedules; ++seed) {
    const std::string violation = run_schedule(seed, Bug::kNone, Trace::kNone, totals);
    ASSERT_EQ(violation, "")
        << "again with: WEFT_RREF_SEED=" << seed
        << " build/tests/rref_protocol_test --gtest_filter=RRefRandom.Schedules";
  }
  std::cout << schedules << " schedules, " << totals.steps << " steps, " << totals.values
            << " values, " << totals.errors << " errors, " << totals.crashes << " crashes\n";
  // Nothing is left out: each kind of message was sent, in each schedule at least one step was
  // taken.
  for (MessageKind kind : {MessageKind::kKnown, MessageKind::kAbandon, MessageKind::kFork,
                           MessageKind::kDelete, MessageKind::kAccept, MessageKind::kAudit}) {
    EXPECT_GT(totals.sent[static_cast<size_t>(kind)], schedules / 50) << name(kind);
  }
  EXPECT_GT(totals.values, schedules / 50);
  EXPECT_GT(totals.errors, schedules / 50);
  EXPECT_GT(totals.crashes, schedules / 50);
}

// No order that can be seen comes from a hash table.
TEST(RRefRandom, TheSameSeedTakesTheSameWay) {
  const uint64_t schedules =
      weft::testing::environment_number<uint64_t>("WEFT_RREF_SCHEDULES", 100'000);
  for (uint64_t seed = 1; seed <= std::min<uint64_t>(200, schedules / 10); ++seed) {
    Totals first;
    Totals second;
    run_schedule(seed, Bug::kNone, Trace::kKeep, first);
    run_schedule(seed, Bug::kNone, Trace::kKeep, second);
    ASSERT_FALSE(first.trace.empty());
    ASSERT_TRUE(first.trace == second.trace) << "seed " << seed;
  }
}

TEST(RRefRandom, PlantedBugsAreFound) {
  for (Bug bug : {Bug::kDeleteWithoutTombstone, Bug::kParentGoesEarly, Bug::kRefusalIgnored}) {
    Totals totals;
    uint64_t seed = 1;
    while (seed <= 2000 && run_schedule(seed, bug, Trace::kNone, totals).empty()) ++seed;
    EXPECT_LE(seed, 2000U) << "planted bug " << static_cast<int>(bug);
    std::cout << "planted bug " << static_cast<int>(bug) << ": found by seed " << seed << "\n";
  }
}

}  // namespace
}  // namespace weft::test
