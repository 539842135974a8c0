// Pipelines among processes: one is killed, stopped, or fails, and every other one has an error that
// says which.
#include <poll.h>

#include <chrono>
#include <csignal>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/process.h"
#include "weft/tests/testing/environment.h"

namespace weft::testing {
namespace {

using integration::Process;
using integration::TempDir;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// So long that no lease ends within the test's time: what is known then, a transport has said.
constexpr int kEndlessMs = 600'000;
// Number of steps: the test that starts them ends them long before.
constexpr int kEndless = 1'000'000;

// "gradients 1.5 2": the numbers.
std::vector<double> numbers_of(const std::string& line) {
  std::istringstream in(line);
  std::string word;
  in >> word;
  std::vector<double> out;
  for (double one = 0; in >> one;) out.push_back(one);
  return out;
}

class PipelineProcesses : public ::testing::Test {
 protected:
  void start(int size, int lease_ms, int us = 200, int throws = -1) {
    members_.clear();
    ++round_;
    for (int rank = 0; rank < size; ++rank) {
      members_.push_back(
          Process({.command = {WEFT_TEST_PIPELINE_MEMBER, dir_.path(absl::StrCat("store", round_)),
                               std::to_string(rank), std::to_string(size), std::to_string(lease_ms),
                               std::to_string(us), std::to_string(throws)},
                   .environment = {{"OMP_NUM_THREADS", "1"}},
                   .error_file = dir_.path(absl::StrCat("log", round_, ".", rank))}));
    }
    for (Process& one : members_) ASSERT_EQ(one.read_line(), "joined");
  }
  std::string ask(int rank, const std::string& line) {
    if (!members_[rank].write_line(line)) return "nobody reads";
    return members_[rank].read_line().value_or("no answer");
  }
  // A part's error reaches it by a message, so it is asked again until it has one.
  std::string error_of(int rank) {
    const auto end = std::chrono::steady_clock::now() + integration::kLimit;
    std::string last;
    do {
      last = ask(rank, "part");
      if (last.find("is gone") != std::string::npos || last.find("rpc '") != std::string::npos ||
          last.find("told to fail") != std::string::npos) {
        break;
      }
      poll(nullptr, 0, 5);  // between two questions, so that the asked one gets the core
    } while (std::chrono::steady_clock::now() < end);
    return last;
  }
  void expect_all_end(int but) {
    std::vector<int> all;
    for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
      if (rank != but) all.push_back(rank);
    }
    expect_end(all);
  }
  void expect_end(const std::vector<int>& ranks) {
    for (int rank : ranks) {
      EXPECT_EQ(ask(rank, "slots"), "0") << rank;
      EXPECT_TRUE(members_[rank].write_line("quit"));
    }
    for (int rank : ranks) EXPECT_EQ(members_[rank].wait_exit(), 0) << rank;
  }

  enum class Trouble { kKill, kThrow, kStop };
  // A training that goes through so many troubles, each time with the workers that are left, until
  // two are; then with others.
  void train_through(const std::vector<Trouble>& troubles, int lease_ms, unsigned seed) {
    const std::vector<std::string> schedules = {"1f1b",          "zb-v",  "gpipe",
                                                "interleaved:2", "zb-h1", "1f1b+1",
                                                "looped_bfs:2",  "zb-h2", "1f1b+split"};
    std::mt19937 random(seed);
    std::vector<int> left;
    for (size_t k = 0; k < troubles.size(); ++k) {
      if (left.size() < 2) {
        expect_end(left);
        start(5, lease_ms, /*us=*/0);
        left = {0, 1, 2, 3, 4};
      }
      const Trouble trouble = troubles[k];
      const size_t at = 1 + random() % (left.size() - 1);
      const int victim = left[at];
      const int throws = trouble == Trouble::kThrow ? static_cast<int>(random() % 8) : -1;
      std::string line = absl::StrCat("resume ", schedules[random() % schedules.size()], " ",
                                      1 + random() % 6, " ", random() % 8, " ", throws);
      for (int rank : left) absl::StrAppend(&line, " ", rank);
      SCOPED_TRACE(absl::StrCat("round ", k, ": ", line,
                                throws >= 0 ? "" : absl::StrCat(", w", victim, " is lost")));
      ASSERT_TRUE(members_[0].write_line(line));
      ASSERT_EQ(members_[0].read_line(), "going");
      if (trouble == Trouble::kKill) members_[victim].send_signal(SIGKILL);
      if (trouble == Trouble::kStop) {
        ASSERT_TRUE(members_[victim].stop());
      }
      const std::string ended = members_[0].read_line().value_or("nothing");
      if (trouble == Trouble::kThrow) {
        EXPECT_THAT(ended, AllOf(HasSubstr("ended user pipeline step"), HasSubstr("action F"),
                                 HasSubstr("this layer is broken")));
      } else {
        EXPECT_THAT(
            ended, AllOf(HasSubstr("ended peer_lost"), HasSubstr(absl::StrCat("'w", victim, "'"))));
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(at));
      }
      EXPECT_EQ(members_[0].read_line().value_or("nothing"), "as undisturbed");
      if (trouble == Trouble::kStop) members_[victim].send_signal(SIGKILL);
      if (HasFailure()) return;
    }
    expect_end(left);
  }

  TempDir dir_;
  std::vector<Process> members_;
  int round_ = 0;
};

// The transports know that a process has ended, long before its lease has.
TEST_F(PipelineProcesses, PP_9_AKilledWorkerIsNamedByAllOthers) {
  const std::vector<std::string> schedules = {"1f1b", "zb-v", "gpipe", "interleaved:2"};
  const int rounds = weft::testing::environment_number("WEFT_PIPELINE_ROUNDS", 2);
  std::mt19937 random(7);
  for (int k = 0; k < rounds; ++k) {
    const int victim = 1 + static_cast<int>(random() % 3);
    const std::string schedule = schedules[k % schedules.size()];
    SCOPED_TRACE(absl::StrCat("round ", k, ": ", schedule, ", w", victim, " is killed"));
    start(4, kEndlessMs, /*us=*/100 + static_cast<int>(random() % 2000));
    ASSERT_TRUE(members_[0].write_line(absl::StrCat("run ", schedule, " 6 ", kEndless, " -1")));
    ASSERT_EQ(members_[0].read_line(), "going");
    // Somewhere in a step: after a number of questions that its neighbour has answered.
    for (unsigned i = random() % 50; i > 0; --i) ask(victim % 3 + 1, "slots");
    members_[victim].send_signal(SIGKILL);
    const std::string name = absl::StrCat("'w", victim, "'");
    const std::string ended = members_[0].read_line().value_or("nothing");
    EXPECT_THAT(ended, AllOf(HasSubstr("ended peer_lost"), HasSubstr(name)));
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(error_of(rank),
                  AllOf(HasSubstr(name), HasSubstr(absl::StrCat("worker 'w", rank, "'"))));
    }
    // The others go on without it, as they are.
    ASSERT_TRUE(members_[0].write_line(absl::StrCat("run ", schedule, " 6 10 ", victim)));
    EXPECT_EQ(members_[0].read_line(), "going");
    EXPECT_EQ(members_[0].read_line(), "ended by itself");
    expect_all_end(victim);
    if (HasFailure()) return;
  }
}

// The maker, which has the first stage: it tells no worker.
TEST_F(PipelineProcesses, PP_9_AKilledMakerIsNamedByAllOthers) {
  start(3, kEndlessMs, /*us=*/500);
  ASSERT_TRUE(members_[0].write_line(absl::StrCat("run 1f1b 6 ", kEndless, " -1")));
  ASSERT_EQ(members_[0].read_line(), "going");
  members_[0].send_signal(SIGKILL);
  for (int rank : {1, 2}) {
    EXPECT_THAT(error_of(rank), AllOf(HasSubstr("'w0'"), HasSubstr("ended")));
  }
  expect_all_end(0);
}

TEST_F(PipelineProcesses, PP_9_AStoppedWorkerIsNamedWithItsLease) {
  start(3, /*lease_ms=*/2000);
  ASSERT_TRUE(members_[0].write_line(absl::StrCat("run zb-h1 6 ", kEndless, " -1")));
  ASSERT_EQ(members_[0].read_line(), "going");
  ASSERT_TRUE(members_[1].stop());
  EXPECT_THAT(members_[0].read_line().value_or("nothing"),
              AllOf(HasSubstr("ended peer_lost"), HasSubstr("'w1'")));
  for (int rank : {0, 2}) {
    EXPECT_THAT(error_of(rank), AllOf(HasSubstr("'w1'"), HasSubstr("is dead")));
  }
  members_[1].send_signal(SIGKILL);
  expect_all_end(1);
}

TEST_F(PipelineProcesses, PP_9_AStageThatFailsIsNamedByAll) {
  start(3, kEndlessMs, /*us=*/200, /*throws=*/1);
  ASSERT_TRUE(members_[0].write_line(absl::StrCat("run 1f1b 4 ", kEndless, " -1")));
  ASSERT_EQ(members_[0].read_line(), "going");
  const std::string what =
      "pipeline step 2, worker 'w1', stage 1, micro-batch 1, action F1.1: vcompute was told to "
      "fail";
  EXPECT_EQ(members_[0].read_line().value_or("nothing"), "ended user " + what);
  for (int rank : {0, 1, 2}) EXPECT_THAT(error_of(rank), HasSubstr(what));
  EXPECT_EQ(ask(0, "close"), "closed");
  for (int rank : {0, 1, 2}) EXPECT_THAT(ask(rank, "part"), Not(HasSubstr("told to fail")));
  expect_all_end(-1);
}

// Training goes on after each with every loss that it would have had, bit for bit.
TEST_F(PipelineProcesses, PP_9_KillsAndThrowsChangeNoLoss) {
  std::vector<Trouble> troubles;
  const int rounds = weft::testing::environment_number("WEFT_PIPELINE_KILLS", 10) * 4 / 5;
  for (int k = 0; k < rounds; ++k)
    troubles.push_back(k % 2 == 0 ? Trouble::kKill : Trouble::kThrow);
  train_through(troubles, kEndlessMs, 11);
}

TEST_F(PipelineProcesses, PP_9_StopsChangeNoLoss) {
  const int rounds = weft::testing::environment_number("WEFT_PIPELINE_KILLS", 10) / 5;
  train_through(std::vector<Trouble>(static_cast<size_t>(rounds), Trouble::kStop),
                /*lease_ms=*/3000, 13);
}

// Two replicas of two stages, reduced by process groups between their processes.
TEST_F(PipelineProcesses, PP_11_TwoReplicasOfTwoProcessesEqualOneProcess) {
  start(4, kEndlessMs, /*us=*/0);
  for (const std::string schedule : {"sequential", "gpipe", "1f1b", "1f1b+1", "1f1b+split",
                                     "interleaved:2", "looped_bfs:2", "zb-h1", "zb-h2", "zb-v"}) {
    SCOPED_TRACE(schedule);
    const std::string plan = absl::StrCat(" ", schedule, " 4");
    for (Process& one : members_) {
      ASSERT_TRUE(one.write_line("groups" + plan));
    }
    for (Process& one : members_) {
      ASSERT_EQ(one.read_line(), "grouped");
    }
    for (int rank : {0, 2}) {
      ASSERT_TRUE(members_[rank].write_line("train" + plan));
    }
    const std::string first = members_[0].read_line().value_or("nothing");
    EXPECT_EQ(members_[2].read_line().value_or("nothing"), first);
    const std::vector<double> got = numbers_of(first);
    const std::vector<double> want = numbers_of(ask(0, "alone" + plan));
    ASSERT_EQ(got.size(), want.size()) << first;
    ASSERT_GE(got.size(), 2u) << first;
    for (size_t s = 0; s < got.size(); ++s) EXPECT_NEAR(got[s], want[s], 1e-6) << "stage " << s;
    if (HasFailure()) return;
  }
  // Over calls: the loss of one process ends both replicas, without a lease or a deadline.
  for (Process& one : members_) {
    ASSERT_TRUE(one.write_line("ungroup"));
    ASSERT_EQ(one.read_line(), "ungrouped");
  }
  for (int rank : {0, 2}) {
    ASSERT_TRUE(members_[rank].write_line("calls 1f1b 4"));
  }
  for (int rank : {0, 2}) ASSERT_EQ(members_[rank].read_line(), "going");
  members_[3].send_signal(SIGKILL);
  const auto killed = std::chrono::steady_clock::now();
  for (int rank : {0, 2}) {
    EXPECT_THAT(members_[rank].read_line().value_or("nothing"),
                AllOf(HasSubstr("ended peer_lost"), HasSubstr("'w3'")))
        << rank;
  }
  const std::chrono::duration<double> known = std::chrono::steady_clock::now() - killed;
  RecordProperty("known_after_s", absl::StrCat(known.count()));
  EXPECT_LT(known.count(), 20) << "it takes one second, and 60 by a deadline";
  expect_all_end(3);
}

}  // namespace
}  // namespace weft::testing
