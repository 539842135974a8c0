// The whole of distributed autograd under the seeded scheduler, with faults: two to four workers
// record a random computation and run one or two passes over it. For every schedule:
//   LIVE-1, LIVE-4  gradients are bit by bit those of one worker, or there is a clear error and
//                   nothing of the failed pass in them; without lost messages, no error
//   LIVE-2, LIVE-3  what runs, how often, and not before when: hooks on all sends and recvs
//   LIVE-5          a pass ends in time; then none is left anywhere, after the release no context
//   LIVE-6, LIVE-8  every message of passes that succeed: an interceptor reads them all
//   LIVE-7          two passes at once, from one root or two
//   SIM-3           no deadlock
// A seed that fails is printed; WEFT_AUTOGRAD_SIM_SEED=<seed> runs it alone, with the last events.

#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "weft/tests/sim/autograd_world.h"
#include "weft/tests/testing/environment.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

// The schedules are shared out among so many tests, which can run side by side.
constexpr uint64_t kParts = 4;
// One seed in a hundred is run twice.
constexpr uint64_t kCompared = 100;

class AutogradSim : public ::testing::Test {
 protected:
  AutogradSim() { at::set_num_threads(1); }
};
class AutogradSimPart : public AutogradSim, public ::testing::WithParamInterface<uint64_t> {};

TEST_P(AutogradSimPart, RandomSchedulesWithFaultsKeepTheInvariants) {
  const uint64_t only = weft::testing::environment_number<uint64_t>("WEFT_AUTOGRAD_SIM_SEED", 0);
  if (only != 0) {
    if (only % kParts != GetParam()) return;
    const Outcome out = run_autograd_schedule(only, 2000);
    for (const std::string& event : out.events) std::printf("%s\n", event.c_str());
    ASSERT_TRUE(out.status.ok()) << "seed " << only << " (" << name_of(trouble_of(only))
                                 << "): " << out.status;
    return;
  }
  const uint64_t schedules =
      weft::testing::environment_number<uint64_t>("WEFT_AUTOGRAD_SIM_SCHEDULES", 10'000);
  struct Sum {
    int64_t schedules = 0;
    Outcome all{};
    int64_t acted = 0;
  };
  std::map<Trouble, Sum> sums;
  for (uint64_t seed = GetParam() == 0 ? kParts : GetParam(); seed <= schedules; seed += kParts) {
    const Outcome out = run_autograd_schedule(seed);
    ASSERT_TRUE(out.status.ok()) << "seed " << seed << " (" << name_of(trouble_of(seed))
                                 << "): " << out.status;
    if (seed / kParts % kCompared == 0) {
      ASSERT_EQ(run_autograd_schedule(seed).hash, out.hash) << "seed " << seed;
    }
    Sum& sum = sums[trouble_of(seed)];
    ++sum.schedules;
    sum.acted += out.acted ? 1 : 0;
    sum.all.passes += out.passes;
    sum.all.failed += out.failed;
    sum.all.hits += out.hits;
    sum.all.messages += out.messages;
    sum.all.closes += out.closes;
    sum.all.runs += out.runs;
  }
  for (const auto& [trouble, sum] : sums) {
    std::printf(
        "%-8s %5d schedules, %5d passes right, %5d failed, %5d faults hit, %6d messages, "
        "%5d of them close, %6d runs of sends and recvs\n",
        name_of(trouble), static_cast<int>(sum.schedules), static_cast<int>(sum.all.passes),
        static_cast<int>(sum.all.failed), static_cast<int>(sum.all.hits),
        static_cast<int>(sum.all.messages), static_cast<int>(sum.all.closes),
        static_cast<int>(sum.all.runs));
    // Each trouble occurs often enough, passes are more than nothing, and what is to fail does.
    if (sum.schedules < 50) continue;
    EXPECT_GT(sum.all.messages, 4 * sum.schedules);
    EXPECT_GT(sum.all.runs, 2 * sum.schedules);
    const bool frames = trouble == Trouble::kOrder || trouble == Trouble::kNetwork;
    const bool acts = trouble != Trouble::kNone && !frames;
    EXPECT_GE(sum.all.hits, frames ? 5 * sum.schedules : 0);
    EXPECT_GE(sum.acted, acts ? sum.schedules / 3 : 0);
    EXPECT_GE(sum.all.failed, acts || trouble == Trouble::kNetwork ? sum.schedules / 5 : 0);
    EXPECT_GE(sum.all.passes, acts ? 1 : sum.schedules);
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, AutogradSimPart, ::testing::Range<uint64_t>(0, kParts));

// ---- one seed, one trace -----------------------------------------------------------------------

std::string trace_line(uint64_t seed, uint64_t hash) {
  return absl::StrFormat("trace %d %016x", seed, hash);
}

// Each trouble more than once; with a sanitizer, once.
constexpr uint64_t kTraces = fewer(2, 1) * 3 * kTroubles;

// Run by the test below in a second process.
TEST_F(AutogradSim, PrintTraceHashes) {
  for (uint64_t seed = 1; seed <= kTraces; ++seed) {
    std::printf("%s\n", trace_line(seed, run_autograd_schedule(seed).hash).c_str());
  }
}

// Event for event the same, with other addresses, other hash seeds and another time of day.
TEST_F(AutogradSim, AnotherProcessHasTheSameTraces) {
  char path[4096] = {0};
  ASSERT_GT(::readlink("/proc/self/exe", path, sizeof path - 1), 0);
  const std::string run = absl::StrCat("env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX '", path,
                                       "' --gtest_filter=AutogradSim.PrintTraceHashes");
  FILE* pipe = ::popen(run.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  EXPECT_EQ(::pclose(pipe), 0) << output;
  std::vector<std::string> theirs;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    if (absl::StartsWith(line, "trace ")) theirs.emplace_back(line);
  }
  std::vector<std::string> ours;
  for (uint64_t seed = kTraces; seed >= 1; --seed) {  // the other way round: none knows of others
    ours.insert(ours.begin(), trace_line(seed, run_autograd_schedule(seed).hash));
  }
  EXPECT_EQ(theirs, ours);
  EXPECT_NE(run_autograd_schedule(3).hash, run_autograd_schedule(6).hash);
}

}  // namespace
}  // namespace weft::testing
