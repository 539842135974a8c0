// weft::spawn between real processes: spawn_program.cc starts its own ranks.
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/store/internal/launch/spawn_report.h"
#include "weft/tests/launch/harness.h"

namespace weft::launch {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

class Spawn : public ::testing::Test {
 protected:
  RunOptions options(const std::map<std::string, std::string>& set = {}) const {
    RunOptions result{.set = set, .program = WEFT_TEST_SPAWN_PROGRAM};
    result.set["TMPDIR"] = dir_.path("");
    return result;
  }
  Result run_program(const std::vector<std::string>& args) const { return run(args, options()); }
  // What calls have left in the directory for temporary files.
  std::vector<std::string> left() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir_.path(""))) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  TestDir dir_;
};

// The last line that is not of a rank: what the call threw.
std::string error_in(const Result& result) {
  const size_t at = result.out.find("\nerror ");
  if (absl::StartsWith(result.out, "error ")) return result.out;
  return at == std::string::npos ? "" : result.out.substr(at + 1);
}

TEST_F(Spawn, RanksMeetInAStoreOfTheirOwn) {
  const Result result = run_program({"meet", "3", "two words"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(lines_of(result.out),
              UnorderedElementsAre("[worker0] rank 0 of 3, argument two words, sum 3",
                                   "[worker1] rank 1 of 3, argument two words, sum 3",
                                   "[worker2] rank 2 of 3, argument two words, sum 3", "spawned"));
  EXPECT_EQ(lines_of(result.out).back(), "spawned") << "after all ranks";
  EXPECT_EQ(result.err, "");
  EXPECT_TRUE(left().empty());
}

TEST_F(Spawn, ManyRanks) {
  const Result result = run_program({"meet", "48", "x"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(lines_of(result.out).size(), 49u);
}

TEST_F(Spawn, RanksFindTheVariablesOfALauncherAndNoneOfOneAround) {
  const Result result = run({"environment"}, options({{"OMPI_COMM_WORLD_RANK", "9"},
                                                      {"RANK", "9"},
                                                      {"WORLD_SIZE", "10"},
                                                      {"WEFTRUN_TAG", "outer"},
                                                      {"KEPT", "yes"}}));
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_THAT(lines_of(result.out),
              AllOf(Contains("[worker1] RANK=1"), Contains("[worker1] LOCAL_RANK=1"),
                    Contains("[worker1] WORLD_SIZE=2"), Contains("[worker1] LOCAL_WORLD_SIZE=2"),
                    Contains("[worker1] WEFT_NAME=worker1"), Contains("[worker1] KEPT=yes"),
                    Contains("[worker0] RANK=0"), Contains("[worker0] MASTER_ADDR=127.0.0.1"),
                    Contains(StartsWith("[worker0] WEFTRUN_TAG=outer:")),
                    Contains(StartsWith("[worker0] WEFT_STORE=file:///")),
                    Contains(StartsWith("[worker0] OMP_NUM_THREADS="))));
  EXPECT_THAT(result.out, Not(HasSubstr("OMPI_COMM_WORLD_RANK")));
}

TEST_F(Spawn, SeveralCallsAndLoopsOfCalls) {
  const Result result = run_program({"several"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_THAT(lines_of(result.out),
              UnorderedElementsAre("[worker0] first call, rank 0", "[worker1] first call, rank 1",
                                   "[worker0] second call, rank 0", "[worker1] second call, rank 1",
                                   "[worker0] size 1, rank 0", "[worker0] size 2, rank 0",
                                   "[worker1] size 2, rank 1", "[worker0] size 3, rank 0",
                                   "[worker1] size 3, rank 1", "[worker2] size 3, rank 2",
                                   "[worker0] rate 0.1", "[worker0] rate 0.2", "spawned"));
}

TEST_F(Spawn, NothingIsLeftOfTwentyCalls) {
  const Result result = run_program({"rounds", "20"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_THAT(lines_of(result.out),
              AllOf(Contains("[worker1] round 19 rank 1"), Contains("descriptors more: 0")));
  EXPECT_EQ(lines_of(result.out).size(), 42u);
  EXPECT_TRUE(left().empty());
}

TEST_F(Spawn, BadInput_a_number_of_ranks_or_an_option_that_is_not_possible) {
  for (const char* count : {"0", "-3", "4097"}) {
    const Result result = run_program({"count", count});
    EXPECT_EQ(result.code, 3);
    EXPECT_THAT(result.out, AllOf(StartsWith("error invalid_argument"),
                                  HasSubstr(absl::StrCat(count, " ranks: expected 1 to 4096"))));
  }
  for (const char* option : {"name", "long-name", "grace"}) {
    const Result result = run_program({"bad-option", option});
    EXPECT_THAT(result.out, StartsWith("error invalid_argument: ")) << option;
  }
}

TEST_F(Spawn, BadInput_a_function_that_throws_in_a_rank) {
  struct Case {
    std::vector<std::string> arguments;
    std::string start;
    std::string text;
  };
  const std::vector<Case> cases = {
      {{"fail", "throw"}, "error user rank 1 code 1 signal 0: UNKNOWN", "): the data is gone [at"},
      {{"fail", "error"}, "error user rank 1 code 1 signal 0: NOT_FOUND", "): no such row [at"},
      {{"fail", "number"}, "error user rank 1 code 1 signal 0: UNKNOWN", "not derived from"},
      {{"return", "5"}, "error user rank 1 code 5 signal 0: ", "its function returned 5"},
      {{"return", "256"}, "error user rank 1 code 1 signal 0: ", "its function returned 256"},
      {{"return", "-1"}, "error user rank 1 code 1 signal 0: ", "its function returned -1"}};
  for (const Case& c : cases) {
    const Result result = run_program(c.arguments);
    EXPECT_EQ(result.code, 3);
    EXPECT_THAT(error_in(result),
                AllOf(StartsWith(c.start), HasSubstr(" (user): rank 1 of "),
                      HasSubstr(" (worker1, pid "), HasSubstr(c.text),
                      HasSubstr("[at worker worker1]"), Not(HasSubstr("failed as well"))))
        << result.out;
    for (const int pid : numbers_after("pid", result.out)) EXPECT_NE(kill(pid, 0), 0) << pid;
    EXPECT_TRUE(left().empty());
  }
}

TEST_F(Spawn, TheCauseIsNamedBeforeWhatFailedForItsSake) {
  for (const char* how : {"slow", "lost"}) {
    const Result result = run_program({"both-throw", how});
    EXPECT_THAT(error_in(result), AllOf(StartsWith("error user rank 1 code 1 signal 0: "),
                                        HasSubstr("): the cause\n"),
                                        HasSubstr("failed as well: rank 0 of 2 (worker0, pid "),
                                        HasSubstr("): the consequence")))
        << result.out;
  }
}

TEST_F(Spawn, BadInput_a_rank_that_is_killed_or_ends_early) {
  struct Case {
    std::string how;
    std::string start;
    std::string text;
  };
  const std::vector<Case> cases = {
      {"signal", "error peer_lost rank 1 code 137 signal 9: ", "killed by signal 9 (SIGKILL)"},
      {"abort", "error peer_lost rank 1 code 134 signal 6: ", "killed by signal 6 (SIGABRT)"},
      {"exit",
       "error peer_lost rank 1 code 7 signal 0: ", "exit code 7; its last lines:\n| rank 1"},
      {"early", "error peer_lost rank 1 code 0 signal 0: ",
       "exit code 0, before its function had returned"}};
  for (const Case& c : cases) {
    const Result result = run_program({"fail", c.how});
    EXPECT_EQ(result.code, 3);
    EXPECT_THAT(error_in(result),
                AllOf(StartsWith(c.start), HasSubstr("\n| rank 1 pid "), HasSubstr(c.text)))
        << result.out;
    for (const int pid : numbers_after("pid", result.out)) EXPECT_NE(kill(pid, 0), 0) << pid;
    EXPECT_TRUE(left().empty());
  }
}

TEST_F(Spawn, ARankThatDoesNotHeedSigtermIsKilled) {
  const Result result = run_program({"stubborn"});
  EXPECT_THAT(error_in(result), AllOf(StartsWith("error user rank 1 "), HasSubstr("the cause")));
}

TEST_F(Spawn, BadInput_a_call_inside_of_a_function_that_spawn_runs) {
  const Result result = run_program({"nested"});
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(error_in(result), AllOf(StartsWith("error state rank 1 code 1 signal 0: "),
                                      HasSubstr("cannot start ranks of its own")));
  EXPECT_THAT(result.out, Not(HasSubstr("a rank of a rank")));
}

TEST_F(Spawn, BadInput_more_ranks_than_there_are_descriptors_for) {
  const Result result = run_program({"few-descriptors", "20", "30"});
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.out, AllOf(StartsWith("error resource: RESOURCE_EXHAUSTED"),
                                HasSubstr("20 ranks: cannot start worker"),
                                HasSubstr("Too many open files"), HasSubstr("no child is left")));
  EXPECT_TRUE(left().empty());
}

TEST_F(Spawn, NothingIsLeftWhenTheProgramIsKilled) {
  for (const int signal : {SIGKILL, SIGTERM, SIGINT}) {
    Running running = Running::start({"forever", "family"}, options());
    for (const char* line : {"rank 0 pid", "rank 1 pid"}) ASSERT_TRUE(running.wait_for(line));
    std::vector<Watched> watched;
    for (const int pid : numbers_after("pid", running.out())) watched.emplace_back(pid);
    const std::vector<int> guards = children_named(running.pid(), "weft-guard");
    ASSERT_EQ(guards.size(), 1u);
    watched.emplace_back(guards[0]);
    ASSERT_EQ(watched.size(), 5u) << "two ranks, a child of each, the guard";
    EXPECT_EQ(left().size(), 1u);
    running.send(signal);
    for (const Watched& process : watched) EXPECT_TRUE(process.ended());
    EXPECT_EQ(running.finish().code, 128 + signal);
    EXPECT_TRUE(left().empty());
  }
}

TEST_F(Spawn, RanksEndWithTheProgramAlsoWithoutItsGuard) {
  Running running = Running::start({"forever", "alone"}, options());
  for (const char* line : {"rank 0 pid", "rank 1 pid"}) ASSERT_TRUE(running.wait_for(line));
  std::vector<Watched> watched;
  for (const int pid : numbers_after("pid", running.out())) watched.emplace_back(pid);
  ASSERT_EQ(watched.size(), 2u);
  const std::vector<int> guards = children_named(running.pid(), "weft-guard");
  ASSERT_EQ(guards.size(), 1u);
  const Watched guard(guards[0]);
  ASSERT_EQ(kill(guards[0], SIGKILL), 0);
  ASSERT_TRUE(guard.ended());
  running.send(SIGKILL);
  for (const Watched& rank : watched) EXPECT_TRUE(rank.ended());
}

TEST_F(Spawn, WhatRanksLeaveBehindIsEnded) {
  const Result result = run_program({"leave-children"});
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_EQ(lines_of(result.out).back(), "spawned");
  const std::vector<int> pids = numbers_after("pid", result.out);
  EXPECT_EQ(pids.size(), 4u);
  for (const int pid : pids) {
    const std::string stat = read_file(absl::StrCat("/proc/", pid, "/stat"));
    EXPECT_TRUE(stat.empty() || absl::StrContains(stat, ") Z ")) << stat;
  }
}

TEST_F(Spawn, TheChildrenOfTheProgramStayItsOwn) {
  const Result result = run_program({"other-children"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("spawned", "own child kept"));
}

TEST_F(Spawn, AProgramThatIgnoresTheEndOfItsChildren) {
  EXPECT_EQ(run_program({"ignored-sigchld", "ok"}).out, "spawned\n");
  const Result result = run_program({"ignored-sigchld", "fail"});
  EXPECT_THAT(result.out, AllOf(StartsWith("error peer_lost rank 1 code 0 signal 0: "),
                                HasSubstr("another part of this program took its exit status")));
}

TEST_F(Spawn, OnAThreadOfTheProgram) {
  EXPECT_THAT(lines_of(run_program({"thread"}).out),
              UnorderedElementsAre("[worker0] rank 0", "[worker1] rank 1", "spawned"));
}

TEST_F(Spawn, LinesWithoutNames) {
  EXPECT_EQ(run_program({"plain-output"}).out, "plain\nspawned\n");
}

TEST_F(Spawn, BadInput_the_reader_of_the_output_goes_away) {
  RunOptions no_reader = options();
  no_reader.close_output = true;
  const Result result = run({"chatter"}, no_reader);
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.err, AllOf(StartsWith("error cancelled: "), HasSubstr("no reader any more")));
  EXPECT_TRUE(left().empty());
}

TEST_F(Spawn, UnderWeftrunAndStoppedWithIt) {
  RunOptions outer = options();
  outer.program = WEFT_TEST_WEFTRUN;
  Result result = run({"-q", WEFT_TEST_SPAWN_PROGRAM, "meet", "2", "x"}, outer);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_THAT(lines_of(result.out), Contains("[worker0] [worker1] rank 1 of 2, argument x, sum 1"));
  Running running = Running::start({"-q", WEFT_TEST_SPAWN_PROGRAM, "forever", "family"}, outer);
  for (const char* line : {"rank 0 pid", "rank 1 pid"}) ASSERT_TRUE(running.wait_for(line));
  std::vector<Watched> watched;
  for (const int pid : numbers_after("pid", running.out())) watched.emplace_back(pid);
  running.send(SIGTERM);
  EXPECT_EQ(running.finish().code, 128 + SIGTERM);
  for (const Watched& process : watched) EXPECT_TRUE(process.ended());
}

TEST(SpawnReport, ComesBackAsItWasWritten) {
  const Status status = with_details(
      make_error(absl::StatusCode::kDataLoss, ErrorKind::kUser, std::string("a\nb\0c", 5)),
      {.kind = ErrorKind::kUser, .origin = "ps0", .remote_trace = "at x", .payload = "\n\1"});
  const StatusOr<SpawnReport> back =
      decode_report(encode_report({.at_ns = 77, .exit_code = 5, .status = status}));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->at_ns, 77);
  EXPECT_EQ(back->exit_code, 5);
  EXPECT_EQ(back->status, status);
  const StatusOr<SpawnReport> good =
      decode_report(encode_report({.at_ns = 1, .exit_code = 0, .status = absl::OkStatus()}));
  ASSERT_TRUE(good.ok());
  EXPECT_TRUE(good->status.ok());
}

TEST(SpawnReport, LongTextsAreCut) {
  constexpr size_t kLong = 100'000;
  ErrorDetails details;
  details.kind = ErrorKind::kUser;
  details.payload = std::string(kLong, 'p');
  const Status status =
      with_details(make_error(ErrorKind::kUser, std::string(kLong, 'm')), details);
  const std::string bytes = encode_report({.at_ns = 1, .exit_code = 1, .status = status});
  EXPECT_LT(bytes.size(), kLong);
  const StatusOr<SpawnReport> back = decode_report(bytes);
  ASSERT_TRUE(back.ok());
  EXPECT_THAT(std::string(back->status.message()), ::testing::EndsWith("mm... (34464 more bytes)"));
  EXPECT_EQ(error_details(back->status).payload, "");
}

TEST(SpawnReport, BadInput_a_report_of_a_rank_that_is_broken) {
  const std::string good =
      encode_report({.at_ns = 1, .exit_code = 1, .status = make_error(ErrorKind::kUser, "text")});
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_EQ(decode_report(good.substr(0, length)).status().code(), absl::StatusCode::kDataLoss)
        << length;
  }
  for (const char* bytes : {"1 1 99 1 0 0 0 0\n", "1 1 2 99 0 0 0 0\n", "1 1 2 1 -1 0 0 0\n",
                            "1 1 2 1 0 0 0 9223372036854775807\n", "a b c d e f g h\n", "\n"}) {
    EXPECT_FALSE(decode_report(bytes).ok()) << bytes;
  }
}

}  // namespace
}  // namespace weft::launch
