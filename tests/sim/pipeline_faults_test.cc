// Random plans and faults: gradients are right, or there is one error everywhere; each action runs once;
// nothing is left over. And bugs that are planted in the runtime are found by these tests.

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/simulator.h"
#include "weft/tests/sim/pipeline_world.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using pipeline::internal::kRunnerBugs;
using pipeline::internal::RunnerBug;

TEST(PipelineFaults, SchedulesAreRightOrEndWithOneErrorEverywhere) {
  const int wanted = weft::testing::environment_number("WEFT_PIPELINE_SIM_SCHEDULES", 3000);
  int done = 0;
  int thrown = 0;
  int lost = 0;
  int skips = 0;
  int64_t faults = 0;
  for (; done < wanted; ++done) {
    const Scenario s = random_scenario(static_cast<uint64_t>(done) + 1);
    const Outcome got = run(s);
    ASSERT_EQ(wrong_with(s, got), "") << "schedule " << done << ": " << to_text(s);
    if (done % 50 == 0) {
      ASSERT_EQ(run(s).hash, got.hash) << "schedule " << done;
    }
    thrown += s.throw_stage >= 0 ? 1 : 0;
    lost += got.steps.back().ok() || s.lost_worker < 0 ? 0 : 1;
    skips += static_cast<int>(s.plan.edges.size()) >= s.plan.stages() ? 1 : 0;
    faults += got.faults;
  }
  std::printf("%d schedules: %d with skips, %d thrown, %d lost, %lld frames hit\n", done, skips,
              thrown, lost, static_cast<long long>(faults));
  EXPECT_GT(thrown, done / 5);
  EXPECT_GT(lost, done / 20);
  EXPECT_GT(skips, done / 10);
  EXPECT_GT(faults, done);
}

// After how many schedules of the test above a bug is found, or else after how many plans of
// PP_3_TheRunIsTheSimulation; 0: it is not.
int found_after(RunnerBug bug, std::string* how) {
  for (int k = 1; k <= 250; ++k) {
    Scenario s = random_scenario(static_cast<uint64_t>(k));
    s.bug = bug;
    *how = wrong_with(s, run(s));
    if (!how->empty()) {
      *how = "schedule: " + *how;
      return k;
    }
  }
  int k = 0;
  for (const std::string name : {"1f1b", "zb-h1", "interleaved:2", "zb-v"}) {
    for (const int m : {1, 3, 8}) {
      ++k;
      Scenario s;
      s.plan = *pipeline::make_schedule(name, 4, m);
      s.costs = costs_of(s.plan, true, 0, static_cast<uint64_t>(k));
      s.latency = absl::ZeroDuration();
      s.bug = bug;
      *how = differs_from_simulation(s);
      if (!how->empty()) {
        *how = "plan: " + *how;
        return k;
      }
    }
  }
  return 0;
}

TEST(PipelineFaults, PlantedBugsAreFound) {
  // With a sanitizer, some: their runs end with errors, whose memory it looks at.
  for (int bug = 1; bug <= kRunnerBugs; bug += fewer(1, 4)) {
    std::string how;
    const int after = found_after(static_cast<RunnerBug>(bug), &how);
    std::printf("bug %d: found after %d, %s\n", bug, after, how.substr(0, 120).c_str());
    EXPECT_GT(after, 0) << "bug " << bug;
  }
}

}  // namespace
}  // namespace weft::testing
