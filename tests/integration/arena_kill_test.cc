// A peer is killed in the middle of large messages through shared memory, again and again: its
// futures fail, and afterwards the survivor uses exactly as much as before (ARENA-3).

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/full.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/process.h"
#include "weft/tests/testing/environment.h"
#include "weft/weft.h"

namespace weft::integration {
namespace {

at::Tensor echo(const at::Tensor& x) { return x; }

int open_files() {
  int n = 0;
  DIR* const dir = opendir("/proc/self/fd");
  while (dir != nullptr && readdir(dir) != nullptr) ++n;
  if (dir != nullptr) closedir(dir);
  return n;
}

int shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int n = 0;
  for (std::string line; std::getline(maps, line);) n += absl::StrContains(line, "weft-arena");
  return n;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

struct Use {
  int64_t bytes, leases, blocks;
  int files, mappings;
};
std::ostream& operator<<(std::ostream& out, const Use& use) {
  return out << use.bytes << " bytes, " << use.leases << " leases, " << use.blocks << " blocks, "
             << use.files << " files, " << use.mappings << " mappings";
}

class ArenaKill : public ::testing::Test {
 protected:
  ArenaKill() {
    at::set_num_threads(1);
    Library library("kill");
    library.def("echo", &echo);
    worker = weft::join({.name = "survivor",
                         .dynamic = true,
                         .library = library,
                         .rendezvous = absl::StrCat("file://", dir.path("store"), "?run_id=kill"),
                         .heartbeat_interval = std::chrono::milliseconds(200),
                         .lease = std::chrono::seconds(3),
                         .log_level = Severity::kError});
  }

  Use use() const {
    const auto info = worker.debug_info();
    return {info.at("arena_bytes"), info.at("arena_leases"), info.at("arena_blocks"), open_files(),
            shared_mappings()};
  }
  // The end of a process is told by its sockets, which takes a moment.
  bool eventually(const std::function<bool(const Use&)>& wanted) const {
    const auto end = std::chrono::steady_clock::now() + kLimit;
    while (!wanted(use())) {
      if (std::chrono::steady_clock::now() >= end) return false;
      poll(nullptr, 0, 5);  // between two questions
    }
    return true;
  }

  // One life of a victim: large calls in both directions until the kill. How many completed.
  int live_and_die(std::mt19937* random) {
    Process victim(
        {.command = {WEFT_TEST_ARENA_VICTIM, dir.path("store"), "kill", absl::StrCat(++victims_)},
         .environment = {{"WEFT_LOG_LEVEL", "error"},
                         {"WEFT_HEARTBEAT_INTERVAL", "200ms"},
                         {"WEFT_LEASE", "3s"}},
         .error_file = dir.path("victim.log")});
    const std::string line = victim.read_line().value_or("");
    EXPECT_TRUE(absl::StartsWith(line, "joined ")) << line;
    const std::string name = line.substr(std::min<size_t>(7, line.size()));
    EXPECT_TRUE(eventually([&](const Use&) { return worker.try_get_worker_info(name).ok(); }));
    const int kill_after = static_cast<int>((*random)() % 30);
    std::deque<Future<at::Tensor>> under_way;
    int completed = 0;
    bool killed = false;
    bool failed = false;
    Status why;
    while (!failed) {
      if (!killed && completed >= kill_after) {
        victim.send_signal(SIGKILL);
        killed = true;
      }
      const int64_t elements = 30'000 + static_cast<int64_t>((*random)() % 2'000'000);
      under_way.push_back(rpc_async(worker, name, &echo, at::full({elements}, 2.0)));
      if (under_way.size() < 4) continue;
      const StatusOr<at::Tensor> got = under_way.front().try_wait();
      under_way.pop_front();
      if (got.ok()) {
        EXPECT_EQ(got->const_data_ptr<float>()[got->numel() - 1], 2.0f);
        ++completed;
      }
      failed = !got.ok();
      if (failed) why = got.status();
    }
    EXPECT_TRUE(killed) << "a call failed while the victim was alive: " << why;
    // Answers that were on their way may still count; what matters is that each call ends.
    for (auto& future : under_way) (void)future.try_wait();
    EXPECT_EQ(victim.wait_exit().value_or(-1), 128 + SIGKILL) << read_file(dir.path("victim.log"));
    return completed;
  }

  TempDir dir;
  Worker worker;

 private:
  int victims_ = 0;  // not a process number for a name: those come back within 1,000 kills
};

TEST_F(ArenaKill, nothing_is_left_over_of_peers_that_were_killed) {
  const int kills = weft::testing::environment_number("WEFT_ARENA_KILLS", 20);
  std::mt19937 random(weft::testing::environment_number("WEFT_ARENA_SEED", 1U));
  // What is made once and for all is made by the first.
  (void)live_and_die(&random);
  ASSERT_TRUE(eventually([](const Use& now) { return now.blocks == 0 && now.mappings == 1; }))
      << use();
  Use before = use();
  int completed = 0;
  for (int i = 0; i < kills; ++i) {
    completed += live_and_die(&random);
    // gRPC closes its own sockets when it gets to it, the first victim's perhaps after `before`.
    ASSERT_TRUE(eventually([&before](const Use& now) {
      return now.bytes == 0 && now.leases == 0 && now.blocks == 0 &&
             now.mappings == before.mappings && now.files <= before.files;
    })) << use()
        << " after " << i + 1 << " kills, before " << before;
    before.files = std::min(before.files, use().files);
    if (i % 100 == 99) std::cout << i + 1 << " kills" << std::endl;
  }
  const auto info = worker.debug_info();
  EXPECT_GT(info.at("arena_copies"), kills) << "the load went through shared memory";
  EXPECT_GT(completed, kills);
  RecordProperty("completed", completed);
  RecordProperty("arena_copies", static_cast<int>(info.at("arena_copies")));
  EXPECT_TRUE(worker.shutdown({.graceful = false}).status.ok());
}

}  // namespace
}  // namespace weft::integration
