// Ranks as processes: killed, stopped, two groups at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "weft/tests/integration/process.h"
#include "weft/tests/testing/environment.h"

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

// Also over hosts: rank 1 on one, the others on another.
class CollectiveDeaths : public CollectiveProcesses {};

TEST_P(CollectiveDeaths, CL_14_a_killed_rank_is_named) {
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

// Killed at some moment of an all_reduce of 64 MiB, one rank or two at once: the others have an error
// that names one of them, and go on as one group.
TEST_P(CollectiveDeaths, CL_23_survivors_of_a_large_all_reduce_go_on) {
  const int kills = weft::testing::environment_number("WEFT_COLLECTIVES_KILLS", 1);
  std::mt19937 random(23);
  for (int i = 0; i < kills && !HasFailure(); ++i) {
    std::vector<Process> ranks = start(4, "store" + std::to_string(i));
    tell_all(ranks, "loop 16777216 60000");
    for (Process& one : ranks) EXPECT_EQ(one.read_line(), "going");
    std::vector<int> places = {0, 1, 2, 3};
    std::shuffle(places.begin(), places.end(), random);
    const size_t dead = i % 2 == 0 ? 2 : 1;
    // Any moment will do; this one differs from life to life.
    const auto moment =
        std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 50'000);
    while (std::chrono::steady_clock::now() < moment) std::this_thread::yield();
    for (size_t k = 0; k < dead; ++k) ranks[static_cast<size_t>(places[k])].send_signal(SIGKILL);
    std::vector<int> living(places.begin() + static_cast<int>(dead), places.end());
    std::sort(living.begin(), living.end());
    std::string list;
    for (const int rank : living) list += (list.empty() ? "" : ",") + std::to_string(rank);
    for (const int rank : living) {
      Process& one = ranks[static_cast<size_t>(rank)];
      expect_line(one, {"error peer_lost", "all_reduce #", "rank "});
      EXPECT_TRUE(one.write_line("rebuild 30000"));
    }
    const std::string size = std::to_string(living.size());
    for (const int rank : living) {
      Process& one = ranks[static_cast<size_t>(rank)];
      EXPECT_EQ(one.read_line(), "rebuilt 2 " + size + " " + list);
      EXPECT_TRUE(one.write_line("sum 1000000"));
    }
    for (const int rank : living) {
      Process& one = ranks[static_cast<size_t>(rank)];
      expect_line(one, {"sum " + size + ".0"});
      EXPECT_TRUE(one.write_line("quit"));
      EXPECT_EQ(one.wait_exit(), 0);
    }
  }
}

TEST_P(CollectiveProcesses, CL_14_and_CL_23_a_stopped_rank_is_named_and_left_out) {
  std::vector<Process> ranks = start(3, "store");
  tell_all(ranks, "loop 1000 1000");
  for (Process& one : ranks) EXPECT_EQ(one.read_line(), "going");
  ASSERT_TRUE(ranks[1].stop());
  expect_line(ranks[0], {"error deadline", "all_reduce #"});
  expect_line(ranks[2], {"error deadline", "all_reduce #"});
  for (const size_t rank : {0u, 2u}) EXPECT_TRUE(ranks[rank].write_line("rebuild 300"));
  for (const size_t rank : {0u, 2u}) EXPECT_EQ(ranks[rank].read_line(), "rebuilt 2 2 0,2");
  // It goes on, hears that the group has failed and that the others have left it out, and disturbs
  // neither of them.
  ranks[1].send_signal(SIGCONT);
  expect_line(ranks[1], {"error deadline", "all_reduce #"});
  EXPECT_TRUE(ranks[1].write_line("rebuild 30000"));
  expect_line(ranks[1], {"error state", "came too late"});
  for (const size_t rank : {0u, 2u}) EXPECT_TRUE(ranks[rank].write_line("sum 1000"));
  for (const size_t rank : {0u, 2u}) expect_line(ranks[rank], {"sum 2.0"});
  tell_all(ranks, "quit");
  for (Process& one : ranks) EXPECT_EQ(one.wait_exit(), 0);
}

// Names of groups' private sockets by inode, as the kernel lists them.
std::map<std::string, std::string> private_sockets() {
  std::map<std::string, std::string> out;
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const size_t at = line.find("@weft-group-");
    if (at == std::string::npos) continue;
    const std::vector<std::string> words =
        absl::StrSplit(line.substr(0, at), ' ', absl::SkipEmpty());
    out[words.back()] = line.substr(at);
  }
  return out;
}

// Whether a process of this machine has the socket open.
bool is_open(const std::string& inode) {
  const std::string wanted = "socket:[" + inode + "]";
  std::error_code gone;  // a process that ends meanwhile
  for (const auto& process : std::filesystem::directory_iterator("/proc", gone)) {
    for (const auto& file : std::filesystem::directory_iterator(process.path() / "fd", gone)) {
      if (std::filesystem::read_symlink(file.path(), gone) == wanted) return true;
    }
  }
  return false;
}

// What of groups could stay behind on this machine: files of shared memory, and private sockets that
// no process has open. (Other tests run at the same time, with groups of their own.)
std::vector<std::string> leavings() {
  std::vector<std::string> out;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    out.push_back(file.path().string());
  }
  for (const auto& [inode, name] : private_sockets()) {
    if (!is_open(inode) && private_sockets().count(inode) > 0) out.push_back(name);
  }
  std::sort(out.begin(), out.end());
  return out;
}

TEST_P(CollectiveProcesses, CL_16_nothing_is_left_of_groups_that_crashed) {
  const int crashes = weft::testing::environment_number("WEFT_COLLECTIVES_CRASHES", 2);
  const std::vector<std::string> before = leavings();
  for (int i = 0; i < crashes; ++i) {
    std::vector<Process> ranks = start(2, "store" + std::to_string(i));
    tell_all(ranks, "loop 100000 60000");
    for (Process& one : ranks) EXPECT_EQ(one.read_line(), "going");
    // Both at once, or one of them, which the other one then leaves.
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (r == 0 || i % 2 == 0) ranks[r].send_signal(SIGKILL);
    }
    if (i % 2 != 0) {
      expect_line(ranks[1], {"error peer_lost", "rank 0"});
      EXPECT_TRUE(ranks[1].write_line("quit"));
    }
    for (Process& one : ranks) EXPECT_TRUE(one.wait_exit().has_value());
  }
  std::vector<std::string> more;
  const std::vector<std::string> after = leavings();
  std::set_difference(after.begin(), after.end(), before.begin(), before.end(),
                      std::back_inserter(more));
  // Other programs of this machine have files there, too; those of groups bear no name at all.
  for (const std::string& one : more) {
    EXPECT_EQ(one.find("weft"), std::string::npos) << one << " is left";
  }
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
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveDeaths, ::testing::Values("shm", "tcp", "shm+tcp"),
                         [](const auto& info) {
                           return info.param == "shm+tcp" ? std::string("hosts") : info.param;
                         });

}  // namespace
}  // namespace weft::testing
