// Processes that end in the middle of a hello, that stand still while large messages flow to them,
// and that have no descriptors left.

#include <signal.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"

namespace weft::integration {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// `byte`s of the next connection to worker1 pass in one direction, and no more.
void hold_at(RelayProcess* relay, const std::string& direction, int byte, Job* job) {
  const int next = relay->accepted();
  relay->tell(absl::StrCat("stall ", direction, " ", next, " ", byte, " 0 0"));
  ASSERT_TRUE((*job)[0].ask("start first worker1 bump 1 60000 0").ok);
  ASSERT_TRUE(eventually([&] { return relay->passed(next, direction) == byte; }));
}

// A connection begins with about 400 bytes, the last hundred of which are the hello.
constexpr int kInTheHello = 350;
constexpr int kInTheAnswer = 150;

TEST(Integration, BadInput_a_dialler_that_exits_in_the_middle_of_its_hello) {
  Job job;
  job.environment = short_lease();
  const auto relay = job.start_group_with_relay(3);
  ASSERT_NO_FATAL_FAILURE(hold_at(relay.get(), "to_target", kInTheHello, &job));
  job[0].process().send_signal(SIGKILL);
  ASSERT_EQ(job[0].process().wait_exit(), 128 + SIGKILL);
  relay->tell("cut_all");
  relay->tell("clear");
  expect_works(&job, 2, 1);
  expect_told_of_death(&job[1], "worker0");
  expect_works(&job, 1, 2);
  EXPECT_EQ(job[1].info().at("runs"), 1) << "what the dialler wanted never arrived";
}

TEST(Integration, BadInput_a_listener_that_exits_in_the_middle_of_its_answer) {
  Job job;
  job.environment = short_lease();
  const auto relay = job.start_group_with_relay(3);
  ASSERT_NO_FATAL_FAILURE(hold_at(relay.get(), "to_client", kInTheAnswer, &job));
  job[1].process().send_signal(SIGKILL);
  ASSERT_EQ(job[1].process().wait_exit(), 128 + SIGKILL);
  relay->tell("cut_all");
  relay->tell("clear");
  const Answer first = job[0].ask("wait first");
  EXPECT_EQ(first.kind, "peer_lost") << first;
  EXPECT_THAT(first.text, HasSubstr("'worker1'"));
  expect_told_of_death(&job[0], "worker1");
  expect_works(&job, 0, 2);
}

// 32 MiB each: more than all buffers between the two.
constexpr int64_t kElements = 4 << 20;
constexpr int64_t kBudget = 96 << 20;

class IntegrationStopped : public ::testing::TestWithParam<bool> {};

TEST_P(IntegrationStopped, BadInput_a_peer_that_is_stopped_while_large_messages_flow_to_it) {
  Job job;
  job.environment["WEFT_PEER_SEND_BUDGET"] = absl::StrCat(kBudget);
  // What lies in shared memory is charged there, until the receiver gives it back.
  job.environment["WEFT_ARENA_BYTES"] = absl::StrCat(kBudget);
  std::unique_ptr<RelayProcess> relay;
  if (GetParam()) {
    relay = job.start_pair_with_relay();  // over TCP, and not through shared memory
  } else {
    job.start_group(2);
  }
  EXPECT_EQ(job[0].ask(absl::StrCat("bulk worker1 ", kElements)).text, "equal");
  ASSERT_TRUE(job[1].process().stop());
  const int64_t before = job[0].process().resident_kib();
  // The deadlines are kept, and the budget is: what the transport still holds counts.
  int deadlines = 0;
  for (int i = 0; i < 12; ++i) {
    ASSERT_TRUE(job[0].ask(absl::StrCat("send s", i, " worker1 ", kElements, " 250")).ok);
    const Answer answer = job[0].ask(absl::StrCat("wait s", i));
    EXPECT_THAT(answer.kind, AnyOf("deadline", "resource")) << answer;
    EXPECT_THAT(answer.text, HasSubstr("worker1")) << answer;
    if (answer.kind == "deadline") ++deadlines;
  }
  EXPECT_GE(deadlines, 1);
  EXPECT_LE(job[0].info().at("send_bytes_peak"), kBudget);
  // It holds only those of twelve messages that fit: in tensors, in shared memory and on the way.
  EXPECT_LE(job[0].process().resident_kib() - before, 3 * kBudget / 1024);

  job[1].process().send_signal(SIGCONT);
  EXPECT_TRUE(job[0].eventually([](const Info& i) { return i.at("send_bytes") == 0; }));
  // What came late has run, too, and its answers take room there until they have gone.
  std::string text;
  EXPECT_TRUE(eventually([&] {
    text = job[0].ask(absl::StrCat("bulk worker1 ", kElements)).text;
    return !absl::StrContains(text, "there is no room for the result");
  }));
  EXPECT_EQ(text, "equal");
  job.shut_down();
}

INSTANTIATE_TEST_SUITE_P(Ways, IntegrationStopped, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "tcp" : "one_host"; });

TEST(Integration, BadInput_no_descriptors_left) {
  Job job;
  job.start_group(3);
  expect_works(&job, 0, 2);
  ASSERT_TRUE(job[0].ask("files 0").ok);
  const Answer dial = job[0].ask("call worker1 bump 1 2000 0");
  EXPECT_FALSE(dial.ok) << dial;
  EXPECT_THAT(dial.text, HasSubstr("Too many open files")) << dial;
  // A worker that is connected already goes on, in both directions.
  expect_works(&job, 0, 2);
  expect_works(&job, 2, 0);
  ASSERT_TRUE(job[0].ask("files -1").ok);
  expect_works(&job, 0, 1);
  expect_works(&job, 1, 0);
  job.shut_down();
}

TEST(Integration, DEF_12_a_caller_hears_of_the_limit_of_its_callee) {
  Job job;
  job.start_group(3);
  expect_works(&job, 2, 1);
  ASSERT_TRUE(job[1].ask("files 0").ok);
  const Answer dial = job[0].ask("call worker1 bump 1 3000 0");
  EXPECT_EQ(dial.kind, "deadline") << dial;
  EXPECT_THAT(dial.text,
              AllOf(HasSubstr("the worker that was dialled"), HasSubstr("RLIMIT_NOFILE")))
      << dial;
  EXPECT_GT(job[1].info().at("listener_refused"), 0);
  expect_works(&job, 2, 1);
  ASSERT_TRUE(job[1].ask("files -1").ok);
  expect_works(&job, 0, 1);
  job.shut_down();
}

// 63 workers of one process and that process's own.
TEST(Integration, DEF_12_64_peers_reach_a_worker_that_may_have_256_descriptors) {
  constexpr int kCrowd = 63;
  Job job;
  job.environment["WEFT_JOIN_TIMEOUT"] = "60s";
  job.environment["WEFT_SAME_USER"] = "0";  // over TCP, as from another host
  job.start({.name = "few", .arguments = {"--files", "256"}});
  job.start({.name = "many"});
  for (size_t i : {0, 1}) {
    const Answer joined = job[i].joined();
    ASSERT_TRUE(joined.ok) << joined;
  }
  const Answer all = job[1].ask(absl::StrCat("crowd ", kCrowd, " few"));
  ASSERT_EQ(all.text, absl::StrCat(kCrowd)) << all;
  expect_works(&job, 1, 0);
  // The same connections serve calls to them.
  for (int i = 0; i < kCrowd; ++i) {
    const Answer back = job[0].ask(absl::StrCat("call crowd", i, " bump 1 20000 0"));
    ASSERT_TRUE(back.ok) << i << ": " << back;
  }
  const Info info = job[0].info();
  EXPECT_EQ(info.at("descriptors_limit"), 256);
  EXPECT_LE(info.at("descriptors_open"), 256);
  EXPECT_EQ(info.at("connections"), kCrowd + 1);
  EXPECT_EQ(info.at("listener_refused"), 0);
  // What made room.
  EXPECT_GT(info.at("data_sockets_refused"), 0);
  EXPECT_TRUE(job[1].ask("crowd_leaves").ok);
  job.shut_down();
}

TEST(Integration, BadInput_no_descriptors_left_at_the_listener) {
  Job job;
  job.start_group(3);
  expect_works(&job, 2, 1);
  ASSERT_TRUE(job[1].ask("files 0").ok);
  const Answer dial = job[0].ask("call worker1 bump 1 500 0");
  EXPECT_EQ(dial.kind, "deadline") << dial;
  EXPECT_THAT(dial.text, HasSubstr("worker1")) << dial;
  ASSERT_TRUE(job[0].ask("start waits worker1 bump 1 60000 0").ok);
  EXPECT_TRUE(job[1].eventually([](const Info& i) { return i.at("listener_stalls") > 1; }));
  expect_works(&job, 2, 1);
  ASSERT_TRUE(job[1].ask("files -1").ok);
  // A connection that has waited is let in.
  const Answer waited = job[0].ask("wait waits");
  EXPECT_TRUE(waited.ok) << waited;
  expect_works(&job, 1, 0);
  EXPECT_EQ(job[1].info().at("runs"), 3) << "the call that ended at its deadline never ran";
  job.shut_down();
}

}  // namespace
}  // namespace weft::integration
