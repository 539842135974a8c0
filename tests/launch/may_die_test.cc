// --may-die and --restart: failures of single processes that the job outlives.
#include <signal.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/launch/harness.h"
#include "weft/tests/launch/place.h"

namespace weft::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A rank that `head` does not end runs until the test makes the file, and fails when stopped.
std::string until(const std::string& file, const std::string& head) {
  return absl::StrCat("trap 'exit 31' TERM; ", head, "; while ! [ -e ", file,
                      " ]; do sleep 0.02; done; echo done=$WEFT_NAME");
}
void touch(const std::string& file) { std::ofstream(file) << "x"; }

TEST(LaunchMayDie, TheJobGoesOn) {
  TestDir dir;
  Running running =
      Running::start(sh({"--role", "ps:2", "--role", "trainer:1", "--may-die", "ps:1"},
                        until(dir.path("go"), "[ $WEFT_NAME = ps1 ] && kill -9 $$")));
  ASSERT_TRUE(running.wait_for("the job goes on without it (--may-die ps:1, 0 left)"))
      << running.err();
  EXPECT_THAT(running.err(), AllOf(HasSubstr("rank 1 (ps1, pid "), HasSubstr("(SIGKILL)")));
  touch(dir.path("go"));
  const Result result = running.finish();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("done=ps0"), HasSubstr("done=trainer0")));
  EXPECT_THAT(result.err, Not(HasSubstr("first failure")));
}

TEST(LaunchMayDie, OneMoreEndsTheJob) {
  TestDir dir;
  Running running = Running::start(sh(
      {"--role", "ps:2", "--role", "trainer:1", "--may-die", "ps:1"},
      until(dir.path("never"),
            absl::StrCat("[ $WEFT_NAME = ps0 ] && exit 3; [ $WEFT_NAME = ps1 ] && ",
                         "while ! [ -e ", dir.path("two"), " ]; do sleep 0.02; done && exit 4"))));
  ASSERT_TRUE(running.wait_for("goes on without it")) << running.err();
  touch(dir.path("two"));
  const Result result = running.finish();
  EXPECT_EQ(result.code, 4) << result.err;
  EXPECT_THAT(result.err, HasSubstr("first failure: rank 1 (ps1, pid "));
}

TEST(LaunchMayDie, AnotherRoleEndsTheJob) {
  TestDir dir;
  const Result result = run(sh({"--role", "ps:1", "--role", "trainer:1", "--may-die", "ps:1"},
                               until(dir.path("never"), "[ $WEFT_NAME = trainer0 ] && exit 6")));
  EXPECT_EQ(result.code, 6) << result.err;
}

TEST(LaunchMayDie, AJobOfWhichNothingIsLeftHasFailed) {
  const Result result = run(sh({"-n", "2", "--may-die", "worker:2"}, "exit 5"));
  EXPECT_EQ(result.code, 5) << result.err;
  EXPECT_THAT(result.err, HasSubstr("first failure: rank "));
}

TEST(LaunchMayDie, AStopOfTheUsersTakesNone) {
  for (const char* option : {"--may-die", "--restart"}) {
    Running running = Running::start(sh({option, "worker:5"}, "echo up; exec sleep 1000"));
    ASSERT_TRUE(running.wait_for("up"));
    running.send(SIGTERM);
    const Result result = running.finish();
    EXPECT_EQ(result.code, 143) << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr(option)));
  }
}

TEST(LaunchMayDie, OnAnotherNodeToo) {
  TestDir dir;
  const Place place(true);
  const auto args = sh({"--may-die", "worker:1"}, until(dir.path("go"), "[ $RANK = 1 ] && exit 7"));
  Running first = place.start(0, 2, sh({}, until(dir.path("go"), "true")));
  ASSERT_TRUE(first.wait_for(kThere)) << first.err();
  Running second = place.start(1, 2, args);
  ASSERT_TRUE(second.wait_for("goes on without it")) << second.err();
  touch(dir.path("go"));
  EXPECT_EQ(second.finish().code, 0);
  const Result result = first.finish();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("done=worker0"));
}

TEST(LaunchRestartOfOne, StartsAgainUnderItsNameInTheSameLife) {
  TestDir dir;
  const Result result =
      run(sh({"--role", "ps:1", "--role", "trainer:1", "--restart", "ps:2"},
             absl::StrCat("[ $WEFT_NAME = ps0 ] || exec sh -c 'while ! [ -e ", dir.path("go"),
                          " ]; do sleep 0.02; done'; ",
                          "echo me=$WEFT_NAME:$RANK:$WEFT_PROCESS_RESTARTS:$WEFT_RESTART_COUNT:"
                          "$WEFT_JOB_ID; [ $WEFT_PROCESS_RESTARTS = 2 ] || exit 3; echo > ",
                          dir.path("go"))));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("exit code 3"), HasSubstr("it starts again (--restart ps:2, 1 left)"),
                    HasSubstr("it starts again (--restart ps:2, 0 left)")));
  std::vector<std::string> jobs;
  int seen = 0;
  for (const std::string& line : lines_of(result.out)) {
    if (line.find("me=") == std::string::npos) continue;
    EXPECT_THAT(line, HasSubstr(absl::StrCat("[ps0] me=ps0:0:", seen, ":0:")));
    jobs.push_back(line.substr(line.rfind(':')));
    ++seen;
  }
  EXPECT_EQ(seen, 3) << result.out;
  EXPECT_THAT(jobs, ::testing::Each(jobs.front())) << "one life of the job";
}

TEST(LaunchRestartOfOne, ThenTheJobEndsOrGoesOn) {
  const std::string script = "echo life=$WEFT_PROCESS_RESTARTS; [ $RANK = 0 ] || exit 0; exit 8";
  const Result ends = run(sh({"-n", "2", "--restart", "worker:1"}, script));
  EXPECT_EQ(ends.code, 8) << ends.err;
  EXPECT_THAT(ends.out, HasSubstr("[worker0] life=1"));
  const Result goes_on =
      run(sh({"-n", "2", "--restart", "worker:1", "--may-die", "worker:1"}, script));
  EXPECT_EQ(goes_on.code, 0) << goes_on.err;
  EXPECT_THAT(goes_on.err, AllOf(HasSubstr("it starts again"), HasSubstr("goes on without it")));
}

TEST(LaunchRestartOfOne, OutputOfAllItsLivesIsKept) {
  TestDir dir;
  const Result result = run(sh({"--restart", "worker:2", "--log-dir", dir.path("logs")},
                               "printf 'life %s, no line end' $WEFT_PROCESS_RESTARTS; "
                               "[ $WEFT_PROCESS_RESTARTS = 2 ] || kill -9 $$"));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(read_file(dir.path("logs/worker0.out")),
            "life 0, no line endlife 1, no line endlife 2, no line end");
}

TEST(LaunchMayDie, BadInput_roles_and_counts_that_cannot_be) {
  for (const char* option : {"--may-die", "--restart"}) {
    const auto refused = [&](const std::vector<std::string>& args, const std::string& words) {
      const Result result = run(args);
      EXPECT_EQ(result.code, 2) << option;
      EXPECT_THAT(result.err, HasSubstr(words)) << option;
    };
    refused({"--role", "ps:1", option, "trainer:1", "true"},
            absl::StrCat(option, " trainer: this node starts no such role; it has ps"));
    refused({"--role", "ps:1", option, "ps", "true"},
            absl::StrCat(option, " wants NAME:COUNT, got 'ps'"));
    refused({option, "worker:0", "true"},
            absl::StrCat(option, " NAME:COUNT wants an integer from 1 to "));
    refused({option, "worker:1", option, "worker:2", "true"},
            absl::StrCat(option, " worker is given twice"));
  }
}

}  // namespace
}  // namespace weft::launch
