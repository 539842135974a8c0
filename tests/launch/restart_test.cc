// --max-restarts: after a failure all processes start again, on one node and on several.
#include <signal.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/launch/harness.h"
#include "weft/tests/launch/place.h"

namespace weft::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The values that follow `word` in the lines of `text`.
std::set<std::string> values_of(const std::string& word, const std::string& text) {
  std::set<std::string> out;
  for (const std::string& line : lines_of(text)) {
    const size_t at = line.find(word);
    if (at != std::string::npos) out.insert(line.substr(at + word.size()));
  }
  return out;
}

TEST(LaunchRestart, CL_18_AllStartAgainInALifeOfTheirOwn) {
  const Result result =
      run(sh({"-n", "2", "--max-restarts", "3"},
             "echo job=$WEFT_JOB_ID; echo store=$WEFT_STORE; echo life=$RANK:$WEFT_RESTART_COUNT; "
             "[ $WEFT_RESTART_COUNT = 2 ] && exit 0; "
             "[ $RANK = 1 ] || exec sleep 1000; exit 7"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("exit code 7"), HasSubstr("restart 1 of 3"),
                                HasSubstr("restart 2 of 3"), Not(HasSubstr("restart 3"))));
  EXPECT_EQ(values_of("job=", result.out).size(), 3u) << result.out;
  EXPECT_EQ(values_of("store=", result.out).size(), 3u) << result.out;
  EXPECT_THAT(values_of("life=", result.out),
              ::testing::IsSupersetOf({"1:0", "1:1", "0:2", "1:2"}));
}

TEST(LaunchRestart, WhenNoneIsLeftTheFailureIsTheJobs) {
  const Result result =
      run(sh({"-n", "1", "--max-restarts", "1"}, "echo life=$WEFT_RESTART_COUNT; kill -9 $$"));
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_EQ(values_of("life=", result.out), (std::set<std::string>{"0", "1"}));
  EXPECT_THAT(result.err, HasSubstr("no restart is left of 1"));
}

TEST(LaunchRestart, AStopOfTheUsersEndsTheJob) {
  for (const int signal : {SIGTERM, SIGHUP}) {
    Running running = Running::start(sh({"--max-restarts", "5"}, "echo up; exec sleep 1000"));
    ASSERT_TRUE(running.wait_for("up"));
    running.send(signal);
    const Result result = running.finish();
    EXPECT_EQ(result.code, 128 + signal) << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("restart")));
  }
}

TEST(LaunchRestart, AProgramThatCannotStartIsTriedOnce) {
  const Result result = run({"-n", "2", "--max-restarts", "5", "no-such-program-anywhere"});
  EXPECT_EQ(result.code, 127);
  EXPECT_THAT(result.err, Not(HasSubstr("restart")));
}

TEST(LaunchRestart, BadInput_a_count_that_is_none) {
  for (const char* bad : {"-1", "many", "", "1000001"}) {
    const Result result = run({absl::StrCat("--max-restarts=", bad), "true"});
    EXPECT_EQ(result.code, 2) << bad;
    EXPECT_THAT(result.err, HasSubstr("--max-restarts wants an integer from 0 to 1000000"));
  }
}

TEST(LaunchRestart, NothingOfALifeIsThereInTheNext) {
  TestDir dir;
  // What a rank leaves behind: a process in a session of its own.
  const Result result =
      run(sh({"--max-restarts", "1"},
             absl::StrCat("if [ $WEFT_RESTART_COUNT = 0 ]; then setsid sleep 1000 & echo $! > ",
                          dir.path("left"), "; exit 1; fi; kill -0 $(cat ", dir.path("left"),
                          ") && exit 9; exit 0")));
  EXPECT_EQ(result.code, 0) << result.err << "; 9: a process of the first life is there";
}

TEST(LaunchRestart, LogsOfAllLivesAreKept) {
  TestDir dir;
  const Result result = run(sh({"--max-restarts", "2", "--log-dir", dir.path("logs")},
                               "echo life $WEFT_RESTART_COUNT; exit $((2 - WEFT_RESTART_COUNT))"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(read_file(dir.path("logs/worker0.out")), "life 0\nlife 1\nlife 2\n");
}

TEST(LaunchRestart, EachLifeHasItsOwnCredentials) {
  const Result result =
      run(sh({"--max-restarts", "1", "--tls", "auto"},
             "test -r $WEFT_TLS_CA && echo ca=$WEFT_TLS_CA; exit $((1 - WEFT_RESTART_COUNT))"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(values_of("ca=", result.out).size(), 2u) << result.out;
}

// ---- several nodes -----------------------------------------------------------------------------

struct Ended {
  Result nodes[2];
};

Ended run_two(const Place& place, const std::vector<std::string>& options,
              const std::string& script) {
  Running first = place.start(0, 2, sh(options, script));
  EXPECT_TRUE(first.wait_for(kThere)) << first.err();
  Running second = place.start(1, 2, sh(options, script));
  Ended out;
  out.nodes[0] = first.finish();
  out.nodes[1] = second.finish();
  return out;
}

TEST(LaunchRestart, CL_18_AllNodesStartAgain) {
  for (const bool tcp : {false, true}) {
    for (const char* failing : {"0", "1"}) {
      const Place place(tcp);
      const Ended ended =
          run_two(place, {"--max-restarts", "2"},
                  absl::StrCat("echo job=$WEFT_JOB_ID; echo life=$RANK:", "$WEFT_RESTART_COUNT; ",
                               "[ $WEFT_RESTART_COUNT = 2 ] && exit 0; [ $RANK = ", failing,
                               " ] && exit 5; exec sleep 1000"));
      std::set<std::string> jobs;
      for (const Result& one : ended.nodes) {
        EXPECT_EQ(one.code, 0) << one.err;
        EXPECT_THAT(one.err, AllOf(HasSubstr("restart 1 of 2"), HasSubstr("restart 2 of 2")));
        jobs.merge(values_of("job=", one.out));
      }
      EXPECT_EQ(jobs.size(), 3u) << "each life has an id that all nodes share";
      EXPECT_THAT(values_of("life=", ended.nodes[1].out), ::testing::Contains("1:2"));
      EXPECT_TRUE(tcp || place.empty()) << "a meeting place has files left";
    }
  }
}

TEST(LaunchRestart, UsedUpOnAllNodes) {
  const Ended ended =
      run_two(Place(true), {"--max-restarts", "1"},
              "echo life=$WEFT_RESTART_COUNT; [ $RANK = 1 ] && exit 5; exec sleep 1000");
  for (const Result& one : ended.nodes) {
    EXPECT_EQ(one.code, 5) << one.err;
    EXPECT_THAT(one.err, AllOf(HasSubstr("restart 1 of 1"), HasSubstr("no restart is left of 1")));
  }
}

// A node whose processes have all ended well is still there when another one fails.
TEST(LaunchRestart, ANodeThatIsDoneStartsAgainWithTheOthers) {
  for (const int failing : {0, 1}) {
    const Place place(true);
    const std::string script =
        absl::StrCat("echo life=$WEFT_RESTART_COUNT; [ $WEFT_RESTART_COUNT = 1 ] && exit 0; ",
                     "[ $RANK = ", failing, " ] || exit 0; ",
                     "trap 'exit 31' USR1; echo up; while :; do sleep 0.05; done");
    Running first = place.start(0, 2, sh({"--max-restarts", "1"}, script));
    ASSERT_TRUE(first.wait_for(kThere)) << first.err();
    Running second = place.start(1, 2, sh({"--max-restarts", "1"}, script));
    Running& bad = failing == 0 ? first : second;
    Running& good = failing == 0 ? second : first;
    ASSERT_TRUE(bad.wait_for("up") && good.wait_for("life=0"));
    // The good node knows that its process has ended when it has reaped it.
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!children_named(good.pid(), "sh").empty() && absl::Now() < end) {
      std::this_thread::yield();
    }
    bad.send(SIGUSR1);
    for (Running* one : {&first, &second}) {
      const Result result = one->finish();
      EXPECT_EQ(result.code, 0) << result.err;
      EXPECT_EQ(values_of("life=", result.out), (std::set<std::string>{"0", "1"}));
    }
  }
}

TEST(LaunchRestart, AStopOfTheUsersOnOneNodeEndsTheJobOnAll) {
  for (const int stopped : {0, 1}) {
    const Place place(true);
    const auto args = sh({"--max-restarts", "5"}, "echo up; exec sleep 1000");
    Running first = place.start(0, 2, args);
    ASSERT_TRUE(first.wait_for(kThere)) << first.err();
    Running second = place.start(1, 2, args);
    ASSERT_TRUE(first.wait_for("[worker0] up") && second.wait_for("[worker1] up"));
    (stopped == 0 ? first : second).send(SIGTERM);
    for (Running* one : {&first, &second}) {
      const Result result = one->finish();
      EXPECT_EQ(result.code, 143) << result.err;
      EXPECT_THAT(result.err, Not(HasSubstr("restart ")));
    }
  }
}

TEST(LaunchRestart, ANodeThatFallsSilentEndsTheJob) {
  const Place place(false);
  const RunOptions lease{.set = {{"WEFT_LEASE", "2s"}}};
  const auto args = sh({"--grace", "1", "--max-restarts", "5"}, "echo up; exec sleep 1000");
  Running first = place.start(0, 2, args, lease);
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Running second = place.start(1, 2, args, lease);
  ASSERT_TRUE(first.wait_for("[worker0] up") && second.wait_for("[worker1] up"));
  second.send(SIGKILL);
  const Result survivor = first.finish();
  EXPECT_EQ(survivor.code, 1) << survivor.err;
  EXPECT_THAT(survivor.err, AllOf(HasSubstr("node 1 (host "), Not(HasSubstr("restart "))));
}

TEST(LaunchRestart, BadInput_nodes_that_disagree_about_restarts_do_not_start) {
  const Place place(true);
  Running first = place.start(0, 2, {"--max-restarts", "1", "true"});
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  const Result two = place.start(1, 2, {"--max-restarts", "2", "true"}).finish();
  const Result one = first.finish();
  for (const Result& node : {one, two}) {
    EXPECT_EQ(node.code, 1);
    EXPECT_THAT(node.err, HasSubstr("with --max-restarts 2, node 0 with --max-restarts 1"));
  }
}

}  // namespace
}  // namespace weft::launch
