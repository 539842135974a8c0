// Many: processes that start at once under weftrun, and calls that must leave nothing behind.

#include <iostream>
#include <map>
#include <set>
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

TEST(IntegrationMany, twenty_four_processes_start_meet_and_leave) {
  constexpr int kProcesses = 24;
  const int starts = weft::testing::environment_number("WEFT_INTEGRATION_STARTS", 2);
  ASSERT_GT(starts, 0);
  for (int start = 0; start < starts; ++start) {
    TempDir dir;
    Process run(
        {.command = {WEFT_TEST_WEFTRUN, "-n", absl::StrCat(kProcesses), WEFT_TEST_WORKER, "meet"},
         .environment = {{"WEFT_JOIN_TIMEOUT", "120s"}, {"WEFT_LOG_LEVEL", "warning"}},
         .error_file = dir.path("log")});
    const std::string out = run.read_all(std::chrono::seconds(120));
    const std::optional<int> code = run.wait_exit();
    std::set<std::string> met;
    for (absl::string_view line : absl::StrSplit(out, '\n', absl::SkipEmpty())) {
      if (absl::StrContains(line, "] met ") && absl::EndsWith(line, " runs=1 served=1 ok")) {
        met.insert(std::string(line));
      }
    }
    ASSERT_EQ(code.value_or(-1), 0) << "start " << start << "\n"
                                    << out << read_file(dir.path("log"));
    ASSERT_EQ(met.size(), static_cast<size_t>(kProcesses)) << "start " << start << "\n" << out;
  }
}

// A job of `processes` ranks that rests for `rest_s` seconds between two barriers; how much of
// a core its ranks needed together meanwhile.
double rest_of(int processes, int rest_s, const std::string& store) {
  TempDir dir;
  std::map<std::string, std::string> environment = {
      {"WEFT_JOIN_TIMEOUT", "300s"}, {"WEFT_RPC_TIMEOUT", "300s"}, {"WEFT_LOG_LEVEL", "warning"}};
  // weftrun's own choice is a file.
  const QuietPort port;

  std::vector<std::string> command = {WEFT_TEST_WEFTRUN};
  if (store == "tcp") {
    command.insert(command.end(), {"--rdzv", absl::StrCat("tcp://127.0.0.1:", port.port())});
  }
  command.insert(command.end(),
                 {"-n", absl::StrCat(processes), WEFT_TEST_WORKER, "meet", absl::StrCat(rest_s)});
  Process run(
      {.command = std::move(command), .environment = environment, .error_file = dir.path("log")});
  const std::string out = run.read_all(std::chrono::seconds(600));
  const std::optional<int> code = run.wait_exit();
  int met = 0;
  int64_t sum_ms = 0;
  for (absl::string_view line : absl::StrSplit(out, '\n', absl::SkipEmpty())) {
    const size_t at = line.find(" rest_ms=");
    int64_t ms = 0;
    if (at == absl::string_view::npos || !absl::EndsWith(line, " ok")) continue;
    const absl::string_view text = line.substr(at + 9);
    if (absl::SimpleAtoi(text.substr(0, text.find(' ')), &ms)) ++met;
    sum_ms += ms;
  }
  EXPECT_EQ(code.value_or(-1), 0) << store << "\n" << out << read_file(dir.path("log"));
  EXPECT_EQ(met, processes) << store << "\n" << out;
  return static_cast<double>(sum_ms) / (1000.0 * rest_s);
}

// By both stores they all come, rest and leave; 64 at rest need less than 30 % of a core.
TEST(IntegrationMany, DEF_11_many_processes_join_rest_and_drain) {
  const int processes = weft::testing::environment_number("WEFT_INTEGRATION_PROCESSES", 12);
  const int rest_s = weft::testing::environment_number("WEFT_INTEGRATION_REST", 1);
  const int rounds = weft::testing::environment_number("WEFT_INTEGRATION_ROUNDS", 1);
  ASSERT_GT(processes, 1);
  for (int round = 0; round < rounds; ++round) {
    for (const char* store : {"file", "tcp"}) {
      const double cores = rest_of(processes, rest_s, store);
      std::cout << processes << " processes, " << store << ": " << 100 * cores
                << " % of a core at rest\n";
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
