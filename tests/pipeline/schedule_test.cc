// Schedules: complete for every size, and bad sizes.
#include "weft/pipeline/schedule.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/pipeline/internal/planted.h"
#include "weft/pipeline/simulator.h"
#include "weft/pipeline/verifier.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::pipeline {
namespace {

using ::testing::HasSubstr;

TEST(Schedule, EveryOneIsCompleteForEverySize) {
  for (const std::string& name : schedule_names()) {
    for (int p : {1, 2, 3, 4, 8}) {
      for (int m = 1; m <= 4 * p; m += testing::fewer(1, 3)) {
        const Plan plan = *make_schedule(name, p, m);
        std::set<Action> seen;
        for (size_t w = 0; w < plan.workers.size(); ++w) {
          for (const Action& a : plan.workers[w]) {
            EXPECT_TRUE(seen.insert(a).second) << name << " " << to_text(plan, a);
            EXPECT_EQ(plan.placement[a.stage], static_cast<int>(w));
          }
        }
        for (int s = 0; s < plan.stages(); ++s) {
          for (int i = 0; i < m; ++i) {
            EXPECT_TRUE(seen.count({ActionKind::kForward, s, i})) << name << p << m;
            const bool whole = seen.count({ActionKind::kBackward, s, i}) > 0;
            const bool split = seen.count({ActionKind::kInputGrad, s, i}) > 0 &&
                               seen.count({ActionKind::kWeightGrad, s, i}) > 0;
            EXPECT_NE(whole, split) << name << " " << p << " " << m;
          }
        }
        // Runs to its end, with latency too.
        const auto s = simulate(plan, Costs::uniform(plan, 60, 60, 60, 12, 60));
        EXPECT_GE(s.makespan, 180 * m);
        if (name == "zb-v" || name == "zb-h1" || name == "1f1b") {
          EXPECT_LE(s.peak_memory(), 60 * std::min(m, p)) << name << " " << p << " " << m;
        }
      }
    }
  }
}

// Gradients of a stage are summed in the order of micro-batches: what bitwise equality needs.
TEST(Schedule, GradientsComeInTheOrderOfMicroBatches) {
  for (const std::string& name : schedule_names()) {
    const Plan plan = *make_schedule(name, 4, 9);
    std::map<std::pair<int, bool>, int> next;
    for (const auto& list : plan.workers) {
      for (const Action& a : list) {
        if (a.kind == ActionKind::kBackward || a.kind == ActionKind::kInputGrad) {
          const int expected = next[{a.stage, false}]++;
          EXPECT_EQ(a.micro_batch, expected) << name;
        } else if (a.kind == ActionKind::kWeightGrad) {
          const int expected = next[{a.stage, true}]++;
          EXPECT_EQ(a.micro_batch, expected) << name;
        }
      }
    }
  }
}

TEST(Schedule, PipeDreamKeepsSoManyVersions) {
  const Plan plan = pipedream(4, 12);
  for (int r = 0; r < 4; ++r) {
    int live = 0;
    int most = 0;
    for (const Action& a : plan.workers[r]) {
      if (a.kind == ActionKind::kForward) most = std::max(most, ++live);
      if (a.kind == ActionKind::kStep) --live;
    }
    EXPECT_EQ(most, 4 - r);
    EXPECT_EQ(live, 0);
  }
}

// What the published forms say of a plan with F = B = W = 60 and 12 per hop of a chain: "" if it is so.
std::string wrong_with(const std::string& name, int p, int m, const StatusOr<Plan>& plan) {
  if (!plan.ok()) return plan.status().ToString();
  const Verdict v = verify(*plan);
  if (!v.ok()) return v.problems[0].text;
  const Simulation s = simulate(*plan, Costs::uniform(*plan, 60, 60, 60, 0, 60));
  const int64_t want = 180 * m + (p - 1) * (name == "zb-h1" ? 60 : 180);
  if ((name == "1f1b" || name == "zb-h1") && m >= p && s.makespan != want) {
    return "a makespan of " + std::to_string(s.makespan) + " instead of " + std::to_string(want);
  }
  const int64_t live = name == "1f1b+1" ? std::min(m, p + 1) : std::min(m, p);
  if (name != "interleaved:2" && s.peak_memory() > 60 * live) {
    return "a peak of " + std::to_string(s.peak_memory());
  }
  // Section "Plans" of docs/pipeline.md: 34.2 for 1f1b+1.
  if (name == "1f1b+1" && p == 4 && m == 8) {
    const Simulation late = simulate(*plan, Costs::uniform(*plan, 100, 120, 80, 20));
    if (late.makespan != 3420) return "with latency " + std::to_string(late.makespan);
  }
  return "";
}

TEST(Schedule, PlantedBugsAreFound) {
  using internal::ScheduleBug;
  const auto found_after = [](ScheduleBug bug, std::string* how) {
    int plans = 0;
    for (const std::string name : {"1f1b", "1f1b+1", "zb-h1", "interleaved:2"}) {
      for (int p = 2; p <= 4; ++p) {
        for (int m = 1; m <= 8; ++m) {
          ++plans;
          *how = wrong_with(name, p, m, internal::make_schedule_with(bug, name, p, m));
          if (!how->empty()) {
            *how = name + " p=" + std::to_string(p) + " m=" + std::to_string(m) + ": " + *how;
            return plans;
          }
        }
      }
    }
    return 0;
  };
  std::string how;
  EXPECT_EQ(found_after(ScheduleBug::kNone, &how), 0) << how;
  for (int bug = 1; bug <= internal::kScheduleBugs; ++bug) {
    const int after = found_after(static_cast<ScheduleBug>(bug), &how);
    std::printf("bug %d: found after %d plans, %s\n", bug, after, how.c_str());
    EXPECT_GT(after, 0) << "bug " << bug;
  }
}

TEST(Schedule, BadInput_SizesAndNames) {
  for (const std::string& name : schedule_names()) {
    for (const auto& [p, m] : {std::pair(0, 4), std::pair(4, 0), std::pair(-1, 4),
                               std::pair(5000, 1), std::pair(2, 1 << 20), std::pair(4096, 65536)}) {
      const auto plan = make_schedule(name, p, m);
      ASSERT_FALSE(plan.ok()) << name << p << " " << m;
      EXPECT_EQ(error_kind(plan.status()), ErrorKind::kInvalidArgument);
    }
  }
  EXPECT_THAT(std::string(make_schedule("2f2b", 4, 8).status().message()),
              HasSubstr("no schedule is called '2f2b'; there are sequential, gpipe, 1f1b"));
  EXPECT_FALSE(make_schedule("1f1b+-1", 4, 8).ok());
  EXPECT_FALSE(make_schedule("interleaved:0", 4, 8).ok());
  EXPECT_FALSE(make_schedule("interleaved:x", 4, 8).ok());
  EXPECT_THAT(std::string(make_schedule("zb-v+split", 4, 8).status().message()),
              HasSubstr("the plan zb-v has no whole backward"));
  EXPECT_THAT(std::string(make_schedule("pipedream+split", 4, 8).status().message()),
              HasSubstr("asynchronous"));
  for (const std::string name :
       {"+split", "split", "2f2b+split", "1f1b+split+split", "1f1b+split+1"}) {
    EXPECT_THAT(std::string(make_schedule(name, 4, 8).status().message()),
                HasSubstr("no schedule is called"));
  }
}

}  // namespace
}  // namespace weft::pipeline
