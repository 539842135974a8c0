// Many: processes that start at once under weftrun, and calls that must leave nothing behind.

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"
#include "weft/tests/testing/environment.h"

namespace weft::integration {
namespace {

// What the ranks of a job have said when each had called all others.
struct Met {
  int ranks = 0;                        // that said so, and left well
  std::map<std::string, int64_t> most;  // by phase, of the rank that needed most
  std::map<std::string, int64_t> sum;
  int64_t exit_code = -1;
  std::string text;  // for messages
};

Met meet(const std::vector<std::string>& launch, int processes, int rest_s) {
  TempDir dir;
  std::vector<std::string> command = {WEFT_TEST_WEFTRUN};
  command.insert(command.end(), launch.begin(), launch.end());
  command.insert(command.end(),
                 {"-n", absl::StrCat(processes), WEFT_TEST_WORKER, "meet", absl::StrCat(rest_s)});
  Process run({.command = std::move(command),
               .environment = {{"WEFT_JOIN_TIMEOUT", "300s"},
                               {"WEFT_RPC_TIMEOUT", "300s"},
                               {"WEFT_LOG_LEVEL", "warning"}},
               .error_file = dir.path("log")});
  Met met;
  const std::string out = run.read_all(std::chrono::seconds(600));
  met.exit_code = run.wait_exit().value_or(-1);
  met.text = absl::StrCat(out, read_file(dir.path("log")));
  const std::string all = absl::StrCat(" runs=", processes - 1, " served=", processes - 1, " ");
  for (absl::string_view line : absl::StrSplit(out, '\n', absl::SkipEmpty())) {
    if (!absl::StrContains(line, all) || !absl::EndsWith(line, " ok")) continue;
    ++met.ranks;
    for (absl::string_view word : absl::StrSplit(line, ' ')) {
      const std::pair<std::string, std::string> parts =
          absl::StrSplit(word, absl::MaxSplits('=', 1));
      int64_t ms = 0;
      if (!absl::EndsWith(parts.first, "_ms") || !absl::SimpleAtoi(parts.second, &ms)) continue;
      met.most[parts.first] = std::max(met.most[parts.first], ms);
      met.sum[parts.first] += ms;
    }
  }
  return met;
}

TEST(IntegrationMany, twenty_four_processes_start_meet_and_leave) {
  constexpr int kProcesses = 24;
  const int starts = weft::testing::environment_number("WEFT_INTEGRATION_STARTS", 2);
  ASSERT_GT(starts, 0);
  for (int start = 0; start < starts; ++start) {
    const Met met = meet({}, kProcesses, 0);
    ASSERT_EQ(met.exit_code, 0) << "start " << start << "\n" << met.text;
    ASSERT_EQ(met.ranks, kProcesses) << "start " << start << "\n" << met.text;
  }
}

// By both stores they all come, call each other, rest and leave; 64 at rest need less than 30 % of a core.
TEST(IntegrationMany, DEF_11_many_processes_join_call_all_to_all_rest_and_drain) {
  const int processes = weft::testing::environment_number("WEFT_INTEGRATION_PROCESSES", 12);
  const int rest_s = weft::testing::environment_number("WEFT_INTEGRATION_REST", 1);
  const int rounds = weft::testing::environment_number("WEFT_INTEGRATION_ROUNDS", 1);
  ASSERT_GT(processes, 1);
  for (int round = 0; round < rounds; ++round) {
    for (const std::string store : {"file", "tcp"}) {
      const QuietPort port;
      // weftrun's own choice is a file.
      const Met met = meet(
          store == "file"
              ? std::vector<std::string>()
              : std::vector<std::string>{"--rdzv", absl::StrCat("tcp://127.0.0.1:", port.port())},
          processes, rest_s);
      EXPECT_EQ(met.exit_code, 0) << store << ", round " << round << "\n" << met.text;
      ASSERT_EQ(met.ranks, processes) << store << ", round " << round << "\n" << met.text;
      const double cores = static_cast<double>(met.sum.at("rest_cpu_ms")) / (1000.0 * rest_s);
      std::cout << processes << " processes, " << store << ": " << 100 * cores
                << " % of a core at rest; of the slowest, ";
      for (const char* phase : {"join_ms", "barrier_ms", "all_to_all_ms", "leave_ms"}) {
        std::cout << phase << "=" << met.most.at(phase) << " ";
      }
      std::cout << std::endl;
      if (processes == 64 && rest_s >= 10) {
        EXPECT_LT(cores, 0.3) << store;
      }
    }
  }
}

TEST(IntegrationMany, small_calls_leave_neither_objects_nor_memory_behind) {
  const int calls = weft::testing::environment_number("WEFT_INTEGRATION_CALLS", 10'000);
  ASSERT_GT(calls, 0);
  Job job;
  job.environment["WEFT_RPC_TIMEOUT"] = "60s";
  job.start_group(2);
  const auto both_ways = [&job](int count) {
    for (size_t i : {0, 1}) {
      job[i].say(absl::StrCat("many worker", 1 - i, " ", count));
    }
    for (size_t i : {0, 1}) {
      const Answer answer = job[i].answer(std::chrono::minutes(60));
      ASSERT_EQ(answer.text, absl::StrCat(count)) << answer;
    }
  };
  // What is there once and for all: connections, pool threads, arenas, windows.
  both_ways(5'000);
  constexpr const char* kObjects[] = {
      "calls_pending", "handlers_running", "deadlines", "calls_waiting_for_connection",
      "answers_kept",  "receive_bytes",    "peers",     "connections"};
  const auto settled = [](const Info& i) {
    return i.at("calls_pending") == 0 && i.at("handlers_running") == 0 && i.at("connections") == 1;
  };
  Info before[2];
  int64_t resident[2];
  for (size_t i : {0, 1}) {
    ASSERT_TRUE(job[i].eventually(settled));
    before[i] = job[i].info();
    resident[i] = job[i].process().resident_kib();
    ASSERT_GT(resident[i], 0);
  }
  both_ways(calls);
  for (size_t i : {0, 1}) {
    ASSERT_TRUE(job[i].eventually(settled));
    Info after = job[i].info();
    EXPECT_EQ(after.at("calls_completed") - before[i].at("calls_completed"), calls);
    EXPECT_EQ(after.at("requests_served") - before[i].at("requests_served"), calls);
    for (const char* name : kObjects) EXPECT_EQ(after.at(name), before[i].at(name)) << name;
    const int64_t grown = job[i].process().resident_kib() - resident[i];
    RecordProperty(absl::StrCat("grown_kib_", i), absl::StrCat(grown));
    EXPECT_LT(grown, 8 * 1024) << "KiB in worker" << i;
  }
  job.shut_down();
}

}  // namespace
}  // namespace weft::integration
