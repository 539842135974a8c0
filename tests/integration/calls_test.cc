// Calls between real processes: over a connection that breaks (X1), and nested deeply (X8).

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"

namespace weft::integration {
namespace {

using ::testing::HasSubstr;

// What X1 asks for after everything: the same worker, one connection, nothing under way.
void expect_settled(Job* job, const std::string& identity) {
  EXPECT_EQ((*job)[0].ask("who worker1").text, identity);
  EXPECT_TRUE((*job)[0].eventually([](const Info& i) {
    return i.at("connections") == 1 && i.at("calls_pending") == 0 && i.at("deadlines") == 0;
  }));
  EXPECT_TRUE((*job)[1].eventually([](const Info& i) { return i.at("handlers_running") == 0; }));
}

TEST(Integration, X1_twenty_cuts_in_a_row_lose_no_call_and_run_none_twice) {
  Job job;
  const auto relay = job.start_pair_with_relay();
  int64_t held = 0;
  int64_t bumped = 0;
  for (int cut = 1; cut <= 20; ++cut) {
    // A call that is sure to be running at the cut, and others that may be anywhere on their way.
    job[0].say(absl::StrCat("start held worker1 hold ", cut, " 60000 1"));
    ASSERT_TRUE(job[0].answer().ok);
    ++held;
    ASSERT_TRUE(job[1].eventually([held](const Info& i) { return i.at("held") == held; })) << cut;
    constexpr int kOthers = 8;
    for (int i = 0; i < kOthers; ++i) {
      job[0].say(absl::StrCat("start b", i, " worker1 bump ", 1000 + ++bumped, " 60000 1"));
    }
    relay->tell(cut % 2 == 0 ? "reset_all" : "cut_all");
    for (int i = 0; i < kOthers; ++i) ASSERT_TRUE(job[0].answer().ok);
    ASSERT_TRUE(job[1].ask(absl::StrCat("open ", cut)).ok);
    for (int i = 0; i < kOthers; ++i) {
      const Answer b = job[0].ask(absl::StrCat("wait b", i));
      EXPECT_EQ(b.text, "1") << b;
    }
    const Answer a = job[0].ask("wait held");
    EXPECT_EQ(a.text, "1") << a;
  }
  const Info there = job[1].info();
  EXPECT_EQ(there.at("runs"), held + bumped);
  EXPECT_EQ(there.at("ids"), held + bumped);
  EXPECT_EQ(there.at("runs_of_one"), 1);
  EXPECT_EQ(there.at("held"), held);
  EXPECT_EQ(job[0].info().at("reconnects"), 20);
  expect_settled(&job, job[1].identity());
  job.shut_down();
}

TEST(Integration, X1_calls_in_flight_at_a_cut_say_that_they_may_have_run) {
  Job job;
  const auto relay = job.start_pair_with_relay();
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(job[0].ask(absl::StrCat("start h", i, " worker1 hold ", i, " 60000 0")).ok);
  }
  ASSERT_TRUE(job[1].eventually([](const Info& i) { return i.at("held") == 5; }));
  relay->tell("reset_all");
  for (int i = 0; i < 5; ++i) {
    const Answer a = job[0].ask(absl::StrCat("wait h", i));
    EXPECT_EQ(a.kind, "maybe_executed") << a;
    EXPECT_THAT(a.text, HasSubstr("'worker1'"));
  }
  for (int i = 0; i < 6; ++i) {
    const Answer a = job[0].ask(absl::StrCat("call worker1 bump ", 100 + i, " 60000 0"));
    EXPECT_EQ(a.text, "1") << a;
  }
  EXPECT_EQ(job[0].info().at("reconnects"), 1);
  ASSERT_TRUE(job[1].ask("open 5").ok);
  expect_settled(&job, job[1].identity());
  EXPECT_EQ(job[1].info().at("runs"), 11);
  job.shut_down();
}

TEST(Integration, X1_a_call_issued_while_the_link_is_down_waits_for_the_reconnect) {
  Job job;
  const auto relay = job.start_pair_with_relay();
  EXPECT_EQ(job[0].ask("call worker1 bump 1 60000 0").text, "1");
  relay->tell("refuse");
  relay->tell("reset_all");
  ASSERT_TRUE(job[0].eventually([](const Info& i) { return i.at("connections") == 0; }));
  const int64_t dials = job[0].info().at("dials");
  ASSERT_TRUE(job[0].ask("start waiting worker1 bump 2 60000 0").ok);
  // One that has less time than the link takes: its own deadline ends it, and says why.
  const Answer late = job[0].ask("call worker1 bump 3 300 0");
  EXPECT_EQ(late.kind, "deadline") << late;
  EXPECT_THAT(late.text, HasSubstr("could not be sent"));
  ASSERT_TRUE(job[0].eventually([dials](const Info& i) { return i.at("dials") >= dials + 3; }));
  EXPECT_EQ(job[0].info().at("calls_pending"), 1);
  relay->tell("accept");
  EXPECT_EQ(job[0].ask("wait waiting").text, "1");
  expect_settled(&job, job[1].identity());
  EXPECT_EQ(job[1].info().at("ids"), 2);  // the late one never arrived
  job.shut_down();
}

// The bytes at which a connection breaks, from its first: within the handshake, within a request
// or an answer, and within a bulk transfer.
TEST(Integration, X1_a_cut_at_any_byte_of_either_direction) {
  Job job;
  const auto relay = job.start_pair_with_relay();
  int64_t bumps = 0;
  for (const char* direction : {"to_target", "to_client"}) {
    for (const int byte : {0, 1, 24, 100, 300, 1000, 4000}) {
      // A connection of its own, so that bytes count from its beginning.
      relay->tell("reset_all");
      ASSERT_TRUE(job[0].eventually([](const Info& i) { return i.at("connections") == 0; }));
      const int next = relay->accepted();
      // Both lanes of the next connection, not those that replace it.
      for (const int lane : {0, 1}) {
        relay->tell(absl::StrCat("reset ", direction, " ", next + lane, " ", byte, " 0 0"));
      }
      for (int i = 0; i < 20; ++i) {
        const Answer a = job[0].ask(absl::StrCat("call worker1 bump ", ++bumps, " 60000 1"));
        EXPECT_EQ(a.text, "1") << direction << " at byte " << byte << ": " << a;
      }
      EXPECT_EQ(job[0].ask("bulk worker1 1000").text, "equal");
      // It did break, and another took over.
      EXPECT_GE(relay->accepted(), next + 3) << direction << " at byte " << byte;
      relay->tell("clear");
    }
  }
  EXPECT_EQ(job[1].info().at("runs"), bumps);
  EXPECT_EQ(job[1].info().at("runs_of_one"), 1);
  expect_settled(&job, job[1].identity());
  job.shut_down();
}

TEST(Integration, X1_a_cut_within_a_bulk_transfer) {
  Job job;
  const auto relay = job.start_pair_with_relay();
  constexpr int kElements = 1 << 20;  // of 8 bytes
  EXPECT_EQ(job[0].ask("call worker1 bump 1 60000 0").text, "1");
  for (const char* direction : {"to_target", "to_client"}) {
    relay->tell("reset_all");
    ASSERT_TRUE(job[0].eventually([](const Info& i) { return i.at("connections") == 0; }));
    const int next = relay->accepted();
    // Lanes, then data connections: whichever carries it.
    for (const int connection : {0, 1, 2, 3, 4}) {
      relay->tell(absl::StrCat("reset ", direction, " ", next + connection, " 3000000 0 0"));
    }
    const int64_t before = job[0].info().at("reconnects");
    const Answer a = job[0].ask(absl::StrCat("bulk worker1 ", kElements));
    EXPECT_EQ(a.text, "equal") << direction << ": " << a;
    // The new connection of this round, and the one after its cut.
    EXPECT_EQ(job[0].info().at("reconnects"), before + 2) << direction;
    relay->tell("clear");
  }
  expect_settled(&job, job[1].identity());
  job.shut_down();
}

TEST(Integration, X1_one_direction_goes_silent_or_ends) {
  Job job;
  job.environment = short_lease();
  const auto relay = job.start_pair_with_relay();
  int64_t bumps = 0;
  for (const char* action : {"half_close", "stall"}) {
    for (const char* direction : {"to_target", "to_client"}) {
      EXPECT_EQ(job[0].ask(absl::StrCat("call worker1 bump ", ++bumps, " 60000 1")).text, "1");
      const int open = relay->accepted();
      for (int connection = 0; connection < open; ++connection) {
        relay->tell(absl::StrCat(action, " ", direction, " ", connection, " 0 0 0"));
      }
      // Silence ends by the lease, an end at once; either way the call goes over a new connection.
      const Answer a = job[0].ask(absl::StrCat("call worker1 bump ", ++bumps, " 60000 1"));
      EXPECT_EQ(a.text, "1") << action << " " << direction << ": " << a;
      EXPECT_GT(relay->accepted(), open);
      relay->tell("clear");
    }
  }
  EXPECT_EQ(job[1].info().at("runs"), bumps);
  EXPECT_EQ(job[1].info().at("runs_of_one"), 1);
  EXPECT_EQ(job[0].ask("who worker1").text, job[1].identity());
  job.shut_down();
}

// ---- X8 ----------------------------------------------------------------------------------------

class IntegrationNested : public ::testing::Test {
 protected:
  IntegrationNested() { job_.environment = {{"WEFT_WORKER_THREADS", "1"}}; }
  Job job_;
};

TEST_F(IntegrationNested, X8_nested_synchronous_calls_to_depth_100_with_one_handler_thread) {
  job_.start_group(2);
  ASSERT_EQ(job_[0].info().at("worker_threads"), 1);
  for (const char* names : {"worker1,worker0", "worker0,worker1", "worker1", "worker0"}) {
    const Answer a = job_[0].ask(absl::StrCat("ring ", names, " 100 sync 1"));
    EXPECT_EQ(a.text, "100") << names << ": " << a;
  }
  job_.shut_down();
}

TEST_F(IntegrationNested, X8_around_a_ring_of_three_and_with_a_barrier_at_the_bottom) {
  job_.start_group(3);
  EXPECT_EQ(job_[0].ask("ring worker0,worker1,worker2 100 sync 1").text, "100");
  // The bottom of this chain is a handler of worker1, which also began it; the others meet it
  // there.
  job_[1].say("ring worker0,worker1,worker2 100 meet 1");
  job_[0].say("barrier");
  job_[2].say("barrier");
  for (size_t i : {0, 1, 2}) {
    const Answer a = job_[i].answer();
    EXPECT_TRUE(a.ok) << i << ": " << a;
  }
  job_.shut_down();
}

TEST_F(IntegrationNested, X8_many_chains_at_once_within_a_bounded_number_of_threads) {
  job_.start_group(2);
  constexpr int kBlocking = 8;
  EXPECT_EQ(job_[0].ask("ring worker1,worker0 100 async 64").text, "6400");
  const int64_t calm = job_[1].process().threads();
  job_[0].say(absl::StrCat("ring worker1,worker0 100 sync ", kBlocking));
  EXPECT_EQ(job_[0].answer().text, absl::StrCat(100 * kBlocking));
  // Half of every chain waits in either process, each with a thread, and no other call has one.
  EXPECT_LE(job_[1].process().threads(), calm + 50 * kBlocking + 2);
  job_.shut_down();
}

TEST_F(IntegrationNested, X8_deeper_than_the_bound_on_waiting_handlers_is_an_error_by_name) {
  job_.environment["WEFT_MAX_BLOCKED"] = "20";
  job_.start_group(2);
  const Answer deep = job_[0].ask("ring worker1,worker0 100 sync 1");
  EXPECT_EQ(deep.kind, "resource") << deep;
  // The hop that could not wait gave up; what it had begun below itself ends by itself.
  for (size_t i : {0, 1}) {
    ASSERT_TRUE(job_[i].eventually([](const Info& n) { return n.at("handlers_running") == 0; }));
  }
  const Answer shallow = job_[0].ask("ring worker1,worker0 30 sync 1");
  EXPECT_EQ(shallow.text, "30") << shallow;
  job_.shut_down();
}

}  // namespace
}  // namespace weft::integration
