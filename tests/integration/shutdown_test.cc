// X12: leaving when a peer is dead, or stopped, or stuck, with real processes. Whatever happens,
// the others return, name who is missing, and their processes end.

#include <signal.h>

#include <chrono>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"

namespace weft::integration {
namespace {

using ::testing::HasSubstr;

class IntegrationShutdown : public ::testing::Test {
 protected:
  IntegrationShutdown() {
    job_.environment = short_lease();
    job_.environment["WEFT_SHUTDOWN_TIMEOUT"] = "8s";
  }

  void expect_named(const Answer& answer, const std::string& who) {
    EXPECT_FALSE(answer.ok) << answer;
    EXPECT_TRUE(answer.kind == "peer_lost" || answer.kind == "deadline") << answer;
    EXPECT_THAT(answer.text, HasSubstr(who + "=missing"));
    EXPECT_THAT(answer.text, HasSubstr("'" + who + "'"));
  }

  // Local state is down, and the process ends.
  void expect_ends(Player* player) {
    const Info info = player->info();
    EXPECT_EQ(info.at("connections"), 0) << player->name();
    EXPECT_EQ(info.at("calls_pending"), 0) << player->name();
    EXPECT_EQ(player->leave(), 0) << player->name();
  }

  Job job_;
};

TEST_F(IntegrationShutdown, X12_a_peer_that_was_killed_before) {
  job_.start_group(3);
  EXPECT_TRUE(job_[0].ask("call worker2 bump 1 60000 0").ok);
  job_[2].process().send_signal(SIGKILL);
  EXPECT_EQ(job_[2].process().wait_exit(), 128 + SIGKILL);
  for (size_t i : {0, 1}) job_[i].say("shutdown");
  for (size_t i : {0, 1}) expect_named(job_[i].answer(), "worker2");
  for (size_t i : {0, 1}) expect_ends(&job_[i]);
}

TEST_F(IntegrationShutdown, X12_a_peer_that_is_stopped_and_goes_on_later) {
  job_.host_store();
  job_.start_group(3);
  ASSERT_TRUE(job_[2].process().stop());
  for (size_t i : {0, 1}) job_[i].say("shutdown");
  for (size_t i : {0, 1}) expect_named(job_[i].answer(), "worker2");
  // It goes on, finds itself left behind, and says so.
  job_[2].process().send_signal(SIGCONT);
  const Answer own = job_[2].ask("shutdown");
  EXPECT_EQ(own.kind, "state") << own;
  EXPECT_THAT(own.text, HasSubstr("declared dead"));
  for (size_t i : {0, 1, 2}) expect_ends(&job_[i]);
}

// A key that the third worker writes in each phase of its shutdown: there it dies or stops.
struct Phase {
  const char* key;
  int signal;
};
void PrintTo(const Phase& phase, std::ostream* out) {
  *out << phase.key << (phase.signal == SIGKILL ? " killed" : " stopped");
}
class IntegrationShutdownPhase : public IntegrationShutdown,
                                 public ::testing::WithParamInterface<Phase> {};

TEST_P(IntegrationShutdownPhase, X12_a_peer_that_dies_in_the_middle_of_its_shutdown) {
  if (GetParam().signal == SIGSTOP) job_.host_store();
  for (int i = 0; i < 3; ++i) {
    PlayerOptions options{.name = absl::StrCat("worker", i), .rank = i, .world_size = 3};
    if (i == 2) {
      options.arguments = {"--signal-at", GetParam().key, absl::StrCat(GetParam().signal)};
    }
    job_.start(options);
  }
  for (size_t i : {0, 1, 2}) ASSERT_TRUE(job_[i].joined().ok);
  EXPECT_TRUE(job_[2].ask("call worker0 bump 1 60000 0").ok);
  for (size_t i : {0, 1, 2}) job_[i].say("shutdown");
  for (size_t i : {0, 1}) expect_named(job_[i].answer(), "worker2");
  for (size_t i : {0, 1}) expect_ends(&job_[i]);
}

INSTANTIATE_TEST_SUITE_P(Phases, IntegrationShutdownPhase,
                         ::testing::Values(Phase{"/arrived/", SIGKILL}, Phase{"/arrived/", SIGSTOP},
                                           Phase{"/drain/0/", SIGKILL}, Phase{"/drain/0/", SIGSTOP},
                                           Phase{"/drain/1/", SIGKILL}, Phase{"/done/", SIGKILL},
                                           Phase{"/done/", SIGSTOP}),
                         [](const auto& info) {
                           std::string name = info.param.key;
                           for (char& c : name) c = c == '/' ? '_' : c;
                           return absl::StrCat("at", name,
                                               info.param.signal == SIGKILL ? "killed" : "stopped");
                         });

TEST_F(IntegrationShutdown, X12_the_host_of_the_store_dies) {
  job_.host_store();
  job_.start_group(3);  // worker0 hosts the store
  job_[0].process().send_signal(SIGKILL);
  EXPECT_EQ(job_[0].process().wait_exit(), 128 + SIGKILL);
  // The two that are left can still call each other.
  const Answer between = job_[1].ask("call worker2 bump 1 60000 0");
  EXPECT_EQ(between.text, "1") << between;
  for (size_t i : {1, 2}) job_[i].say("shutdown");
  for (size_t i : {1, 2}) {
    const Answer answer = job_[i].answer();
    EXPECT_FALSE(answer.ok) << answer;
    EXPECT_THAT(answer.text, HasSubstr(job_.environment["WEFT_STORE"]));
  }
  for (size_t i : {1, 2}) expect_ends(&job_[i]);
}

TEST_F(IntegrationShutdown, DEF_16_a_deadline_holds_when_the_host_of_the_store_has_died) {
  job_.environment.erase("WEFT_SHUTDOWN_TIMEOUT");
  job_.host_store();
  job_.start_group(3);
  job_[0].process().send_signal(SIGKILL);
  EXPECT_EQ(job_[0].process().wait_exit(), 128 + SIGKILL);
  // By then the membership of both is in the middle of an operation that can only fail.
  ASSERT_TRUE(job_[1].eventually([](const Info& info) { return info.at("connections") == 0; }));
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i : {1, 2}) job_[i].say("shutdown 1000");
  for (size_t i : {1, 2}) EXPECT_FALSE(job_[i].answer().ok);
  // Against hanging: what it waited for before lasted 60 s.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  for (size_t i : {1, 2}) expect_ends(&job_[i]);
}

TEST_F(IntegrationShutdown, X12_a_stuck_handler_is_reported_and_holds_nobody) {
  job_.start_group(2);
  ASSERT_TRUE(job_[0].ask("start stuck worker1 hold 1 600000 0").ok);
  ASSERT_TRUE(job_[1].eventually([](const Info& i) { return i.at("held") == 1; }));
  for (size_t i : {0, 1}) job_[i].say("shutdown 2000");
  for (size_t i : {0, 1}) {
    const Answer answer = job_[i].answer();
    EXPECT_EQ(answer.kind, "deadline") << answer;
  }
  EXPECT_FALSE(job_[0].ask("wait stuck").ok);
  ASSERT_TRUE(job_[1].ask("open 1").ok);
  for (size_t i : {0, 1}) EXPECT_EQ(job_[i].leave(), 0);
}

TEST_F(IntegrationShutdown, X12_shutdown_by_two_threads_and_again_with_a_dead_peer) {
  job_.start_group(3);
  job_[2].process().send_signal(SIGKILL);
  for (size_t i : {0, 1}) job_[i].say("shutdown_by_two_threads");
  std::string first[2];
  for (size_t i : {0, 1}) {
    const Answer answer = job_[i].answer();
    expect_named(answer, "worker2");
    first[i] = answer.text;
  }
  for (size_t i : {0, 1}) EXPECT_EQ(job_[i].ask("shutdown").text, first[i]);
  for (size_t i : {0, 1}) expect_ends(&job_[i]);
}

}  // namespace
}  // namespace weft::integration
