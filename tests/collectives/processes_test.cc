// Ranks as processes: killed, stopped, two groups at once.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "weft/tests/integration/process.h"

namespace weft::testing {
namespace {

using integration::Process;
using integration::TempDir;

class CollectiveProcesses : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Process> start(int size, const std::string& store) {
    std::vector<Process> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(
          Process({.command = {WEFT_TEST_RANK, "file://" + dir_.path(store) + "?run_id=test",
                               std::to_string(rank), std::to_string(size), GetParam()},
                   .environment = {{"OMP_NUM_THREADS", "1"}},
                   .error_file = dir_.path("log")}));
    }
    for (Process& one : ranks) EXPECT_EQ(one.read_line(), "made " + GetParam());
    return ranks;
  }
  static void tell_all(std::vector<Process>& ranks, const std::string& line) {
    for (Process& one : ranks) EXPECT_TRUE(one.write_line(line));
  }
  static void expect_line(Process& of, const std::vector<std::string>& words) {
    const auto line = of.read_line();
    ASSERT_TRUE(line.has_value());
    for (const std::string& word : words) {
      EXPECT_NE(line->find(word), std::string::npos) << "'" << word << "' is not in: " << *line;
    }
  }

  TempDir dir_;
};

TEST_P(CollectiveProcesses, CL_14_a_killed_rank_is_named) {
  std::vector<Process> ranks = start(3, "store");
  tell_all(ranks, "loop 4000000 60000");
  for (Process& one : ranks) EXPECT_EQ(one.read_line(), "going");
  ranks[1].send_signal(SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  expect_line(ranks[0], {"error peer_lost", "all_reduce #", "rank 1"});
  expect_line(ranks[2], {"error peer_lost", "all_reduce #", "rank 1"});
  const auto took = std::chrono::steady_clock::now() - begin;
  RecordProperty("milliseconds", static_cast<int>(took / std::chrono::milliseconds(1)));
  for (const size_t survivor : {0u, 2u}) {
    EXPECT_TRUE(ranks[survivor].write_line("quit"));
    EXPECT_EQ(ranks[survivor].wait_exit(), 0);
  }
}

TEST_P(CollectiveProcesses, CL_14_a_stopped_rank_is_named_at_the_deadline) {
  std::vector<Process> ranks = start(3, "store");
  tell_all(ranks, "loop 1000 1000");
  for (Process& one : ranks) EXPECT_EQ(one.read_line(), "going");
  ASSERT_TRUE(ranks[1].stop());
  expect_line(ranks[0], {"error deadline", "all_reduce #"});
  expect_line(ranks[2], {"error deadline", "all_reduce #"});
  // It goes on, hears that the group has failed, and ends by itself.
  ranks[1].send_signal(SIGCONT);
  expect_line(ranks[1], {"error deadline", "all_reduce #"});
  tell_all(ranks, "quit");
  for (Process& one : ranks) EXPECT_EQ(one.wait_exit(), 0);
}

TEST_P(CollectiveProcesses, CL_20_two_jobs_at_once) {
  std::vector<Process> first = start(2, "store1");
  std::vector<Process> second = start(3, "store2");
  for (int i = 0; i < 5; ++i) {
    tell_all(first, "sum 100000");
    tell_all(second, "sum 100000");
    for (Process& one : first) expect_line(one, {"sum 2.0"});
    for (Process& one : second) expect_line(one, {"sum 3.0"});
  }
  tell_all(first, "quit");
  tell_all(second, "quit");
  for (Process& one : first) EXPECT_EQ(one.wait_exit(), 0);
  for (Process& one : second) EXPECT_EQ(one.wait_exit(), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, CollectiveProcesses, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace weft::testing
