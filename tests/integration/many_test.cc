// Many: processes that start at once under weftrun, and calls that must leave nothing behind.

#include <cstdlib>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"

namespace weft::integration {
namespace {

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

TEST(IntegrationMany, twenty_four_processes_start_meet_and_leave) {
  constexpr int kProcesses = 24;
  const int starts = number_of("WEFT_INTEGRATION_STARTS", 2);
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

TEST(IntegrationMany, small_calls_leave_neither_objects_nor_memory_behind) {
  const int calls = number_of("WEFT_INTEGRATION_CALLS", 10'000);
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
