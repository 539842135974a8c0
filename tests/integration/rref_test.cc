// RRefs between real processes: control messages that fail for long (X6), and workers that are
// stopped, killed and restarted (X12, RREF-8). The surviving workers are healthy, and end with
// nothing left of any RRef.

#include <signal.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"
#include "weft/tests/testing/environment.h"

namespace weft::integration {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

// No worker counts as dead because of what a test does to its connections, or while it stands still
// for a while.
std::map<std::string, std::string> long_lease() { return {{"WEFT_LEASE", "120s"}}; }

// Three workers, one of which is to count as dead within the test.
void start_mortal_group(Job* job) {
  job->environment = short_lease();
  job->environment["WEFT_SHUTDOWN_TIMEOUT"] = "8s";
  job->host_store();
  job->start_group(3);
}

void expect_text(Player* player, const std::string& line, const std::string& text) {
  const Answer answer = player->ask(line);
  EXPECT_EQ(answer.text, text) << player->name() << ": " << line << ": " << answer;
}

void expect_kind(Player* player, const std::string& line, const std::string& kind,
                 const std::string& word) {
  const Answer answer = player->ask(line);
  EXPECT_EQ(answer.kind, kind) << player->name() << ": " << line << ": " << answer;
  EXPECT_THAT(answer.text, HasSubstr(word)) << player->name() << ": " << line;
}

// Those that are left leave together; `missing` is named by each, "" when all are there.
void leave_together(const std::vector<Player*>& players, const std::string& missing) {
  for (Player* player : players) expect_no_rrefs(player);
  for (Player* player : players) player->say("shutdown");
  for (Player* player : players) {
    const Answer answer = player->answer();
    if (missing.empty()) {
      EXPECT_TRUE(answer.ok) << player->name() << ": " << answer;
    } else {
      EXPECT_FALSE(answer.ok) << player->name() << ": " << answer;
      EXPECT_THAT(answer.text, HasSubstr(missing + "=missing")) << player->name();
    }
  }
  for (Player* player : players) expect_no_rrefs(player);
  // Together: who hosts the store waits for the others to let go of it.
  for (Player* player : players) player->say("exit");
  for (Player* player : players) EXPECT_EQ(player->leave(), 0) << player->name();
}

// worker2's word to the owner, that it holds a share, gets through no more; and so do all others to
// that owner. They are tried again all the time, more often than any limit of tries would allow.
TEST(IntegrationRRef, X6_no_message_reaches_the_owner_for_long) {
  Job job;
  job.environment = long_lease();
  const auto relay = job.start_group_with_relay(3);  // in front of worker1, the owner
  ASSERT_TRUE(job[0].ask("rref make x worker1 number 3 60000").ok);
  ASSERT_TRUE(job[0].ask("rref make y worker1 number 4 60000").ok);
  expect_text(&job[0], "rref get x 60000", "3");
  expect_text(&job[0], "rref keep x worker2 mine 60000", "1");
  expect_text(&job[2], "rref get mine 60000", "3");
  relay->tell("refuse");
  relay->tell("reset_all");
  for (size_t i : {0, 2}) {
    ASSERT_TRUE(job[i].eventually([](const Info& info) { return info.at("connections") <= 1; }));
  }
  const int64_t dials[] = {job[0].info().at("dials"), 0, job[2].info().at("dials")};

  // The operation that needs a message fails, in time, and says what it waited for.
  expect_kind(&job[0], "rref lend y worker2 1000", "deadline", "worker2");
  expect_kind(&job[2], "rref get mine 1000", "deadline", "worker1");
  ASSERT_TRUE(job[0].ask("rref make late worker1 number 5 1000").ok);
  expect_kind(&job[0], "rref get late 60000", "deadline", "worker1");
  // These are not waited for: a share that is given back, and a creation that is called off.
  expect_text(&job[2], "rref drop mine", "1");
  expect_text(&job[0], "rref drop late", "1");
  for (size_t i : {0, 2}) {
    Player& player = job[i];
    EXPECT_TRUE(player.eventually([&, i](const Info& info) {
      return info.at("dials") >= dials[i] + 10 && info.at("rref_control_resent") > 0;
    }));
    EXPECT_GT(player.info().at("rref_unacknowledged"), 0) << player.name();
  }
  // Nothing else fails, with RRefs or without.
  expect_works(&job, 0, 2);
  expect_works(&job, 2, 0);
  ASSERT_TRUE(job[0].ask("rref make other worker2 number 6 60000").ok);
  expect_text(&job[0], "rref get other 60000", "6");

  relay->tell("accept");
  expect_text(&job[0], "rref get x 60000", "3");
  expect_text(&job[0], "rref lend y worker2 60000", "4");
  expect_kind(&job[0], "rref get late 60000", "state", "refers to nothing");
  for (const char* name : {"x", "y", "other"}) {
    expect_text(&job[0], absl::StrCat("rref drop ", name), "1");
  }
  leave_together({&job[0], &job[1], &job[2]}, "");
}

// All connections break before each step of an RRef's life, and then the next ones, in the middle
// of the handshake or of a message: each step succeeds in the end.
class IntegrationRRefFailures : public ::testing::TestWithParam<int> {};

TEST_P(IntegrationRRefFailures, X6_each_message_fails_some_times) {
  const int failures = GetParam();
  Job job;
  job.environment = long_lease();
  const auto relays = job.start_group_behind_relays(3);
  const auto step = [&](size_t who, const std::string& line, const std::string& text) {
    // Within the 400 bytes or so with which a connection begins, and those of what comes next.
    static constexpr int kBytes[] = {0, 150, 450, 600};
    for (const auto& relay : relays) {
      relay->tell("clear");
      const int next = relay->accepted();
      for (int i = 0; i < 2 * failures; ++i) {  // two lanes each
        relay->tell(absl::StrCat("reset to_target ", next + i, " ", kBytes[i / 2 % 4], " 0 0"));
      }
      relay->tell("reset_all");
    }
    expect_text(&job[who], line, text);
  };
  step(0, "rref make x worker1 number 3 60000", "");  // a creation
  step(0, "rref get x 60000", "3");                   // a fetch
  step(0, "rref lend x worker2 60000", "3");  // a share, the word of it to the owner, a fetch
  step(0, "rref keep x worker2 mine 60000", "1");
  step(2, "rref get mine 60000", "3");
  // The owner tells the creator that it knows of the object while the function runs.
  step(0, "rref make held worker1 hold 1 60000", "");
  ASSERT_TRUE(job[1].eventually([](const Info& info) { return info.at("held") == 1; }));
  EXPECT_TRUE(
      job[0].eventually([](const Info& info) { return info.at("rref_pending_users") == 0; }));
  ASSERT_TRUE(job[1].ask("open 1").ok);
  step(0, "rref lend held worker2 60000", "1");
  step(2, "rref drop mine", "1");
  step(0, "rref drop x", "1");
  step(0, "rref drop held", "1");
  for (size_t i : {0, 1, 2}) expect_no_rrefs(&job[i]);
  EXPECT_EQ(job[1].info().at("runs"), 1) << "the held function ran once";
  int64_t dials = 0;
  for (size_t i : {0, 1, 2}) dials += job[i].info().at("dials");
  EXPECT_GT(dials, 5 * failures) << "hardly anything was broken";
  for (const auto& relay : relays) relay->tell("clear");
  leave_together({&job[0], &job[1], &job[2]}, "");
}

INSTANTIATE_TEST_SUITE_P(Times, IntegrationRRefFailures, ::testing::Values(1, 3, 8),
                         ::testing::PrintToStringParamName());

// The owner stands still: everything is under way to it, and nothing comes back.
TEST(IntegrationRRef, X6_an_owner_that_is_stopped_for_long_and_goes_on) {
  Job job;
  job.environment = long_lease();
  job.host_store();
  job.start_group(3);
  for (const char* name : {"x", "y"}) {
    ASSERT_TRUE(job[0].ask(absl::StrCat("rref make ", name, " worker1 number 3 60000")).ok);
    expect_text(&job[0], absl::StrCat("rref get ", name, " 60000"), "3");
  }
  expect_text(&job[0], "rref keep x worker2 mine 60000", "1");
  expect_text(&job[2], "rref get mine 60000", "3");
  ASSERT_TRUE(job[1].process().stop());
  expect_kind(&job[0], "rref get x 500", "deadline", "worker1");
  expect_kind(&job[0], "rref lend y worker2 500", "deadline", "worker2");
  ASSERT_TRUE(job[0].ask("rref make late worker1 number 5 500").ok);
  expect_kind(&job[0], "rref get late 60000", "deadline", "worker1");
  ASSERT_TRUE(job[0].ask("rref_start waiting get x 60000").ok);
  expect_text(&job[2], "rref drop mine", "1");
  expect_text(&job[0], "rref drop late", "1");
  for (size_t i : {0, 2}) {
    EXPECT_TRUE(
        job[i].eventually([](const Info& info) { return info.at("rref_control_resent") > 0; }));
  }
  expect_works(&job, 0, 2);
  expect_works(&job, 2, 0);
  job[1].process().send_signal(SIGCONT);
  expect_text(&job[0], "wait waiting", "3");
  expect_text(&job[0], "rref lend y worker2 60000", "3");
  for (const char* name : {"x", "y"}) expect_text(&job[0], absl::StrCat("rref drop ", name), "1");
  leave_together({&job[0], &job[1], &job[2]}, "");
}

// Stopped until it counts as dead: what waits for it ends then, and not sooner or later. It goes on
// and finds that its RRefs, and those of others, have no holder any more; no process is harmed.
TEST(IntegrationRRef, X6_and_X12_an_owner_and_holder_that_is_stopped_beyond_its_lease) {
  Job job;
  start_mortal_group(&job);
  ASSERT_TRUE(job[0].ask("rref make theirs worker2 number 3 60000").ok);
  expect_text(&job[0], "rref get theirs 60000", "3");
  expect_text(&job[0], "rref keep theirs worker1 theirs 60000", "1");
  ASSERT_TRUE(job[2].ask("rref make ours worker1 number 4 60000").ok);
  expect_text(&job[2], "rref get ours 60000", "4");
  EXPECT_EQ(job[1].info().at("rref_forks"), 1);
  ASSERT_TRUE(job[2].process().stop());
  // Both at once: what is under way when it is found to be dead fails then.
  for (size_t i : {0, 1}) ASSERT_TRUE(job[i].ask("rref_start waiting get theirs 80000").ok);
  for (size_t i : {0, 1}) {
    expect_kind(&job[i], "wait waiting", "peer_lost", "worker2");
    expect_kind(&job[i], "rref get theirs 60000", "peer_lost", "worker2");
    // The other one may be the first to say so, by the id alone.
    const Answer lent = job[i].ask(absl::StrCat("rref lend theirs worker", 1 - i, " 60000"));
    EXPECT_EQ(lent.kind, "peer_lost") << job[i].name() << ": " << lent;
    EXPECT_THAT(lent.text, AnyOf(HasSubstr("worker2"), HasSubstr("worker 2 ("))) << lent;
    expect_text(&job[i], "rref drop theirs", "1");
  }
  // The share of the dead one is taken back, and the object goes with it.
  for (size_t i : {0, 1}) expect_no_rrefs(&job[i]);

  job[2].process().send_signal(SIGCONT);
  Answer own;
  EXPECT_TRUE(job[2].eventually([&](const Info&) {
    own = job[2].ask("rref get ours 60000");
    return own.kind == "state";
  })) << own;
  EXPECT_THAT(own.text, HasSubstr("declared dead"));
  expect_text(&job[2], "rref drop ours", "1");
  EXPECT_FALSE(job[2].ask("shutdown").ok);
  EXPECT_EQ(job[2].leave(), 0);
  leave_together({&job[0], &job[1]}, "worker2");
}

// Killed while it owns, holds and runs, and started again under its name and rank.
TEST(IntegrationRRef, X12_a_worker_that_is_killed_and_restarted) {
  Job job;
  job.environment["WEFT_LEASE"] = "20s";
  job.start_group(3);
  ASSERT_TRUE(job[0].ask("rref make theirs worker2 number 3 60000").ok);
  expect_text(&job[0], "rref get theirs 60000", "3");
  expect_text(&job[0], "rref keep theirs worker1 theirs 60000", "1");
  // What it holds of others: by its own creation, and as a third worker.
  ASSERT_TRUE(job[2].ask("rref make ours worker1 number 4 60000").ok);
  expect_text(&job[2], "rref get ours 60000", "4");
  ASSERT_TRUE(job[0].ask("rref make lent worker1 number 5 60000").ok);
  expect_text(&job[0], "rref keep lent worker2 lent 60000", "1");
  EXPECT_TRUE(job[1].eventually([](const Info& info) { return info.at("rref_forks") == 3; }));
  // Fetches that wait for a function of it, here and at a third worker.
  ASSERT_TRUE(job[0].ask("rref make held worker2 hold 1 60000").ok);
  ASSERT_TRUE(job[2].eventually([](const Info& info) { return info.at("held") == 1; }));
  ASSERT_TRUE(job[0].ask("rref_start near get held 80000").ok);
  ASSERT_TRUE(job[0].ask("rref_start far lend held worker1 80000").ok);
  ASSERT_TRUE(job[2].eventually([](const Info& info) { return info.at("rref_parked_uses") == 2; }));
  const std::string old = job[2].identity();

  job[2].process().send_signal(SIGKILL);
  ASSERT_EQ(job[2].process().wait_exit(), 128 + SIGKILL);
  expect_kind(&job[0], "wait near", "peer_lost", "worker2");
  expect_kind(&job[0], "wait far", "peer_lost", "worker2");
  for (size_t i : {0, 1}) expect_kind(&job[i], "rref get theirs 60000", "peer_lost", "worker2");
  // At once: its lease lasts, so no worker has been told that it is dead.
  for (size_t i : {0, 1}) {
    EXPECT_THAT(job[i].ask("events").text, Not(HasSubstr("died:"))) << job[i].name();
  }
  // Its shares are reclaimed; those of others in the same objects are not.
  EXPECT_TRUE(job[1].eventually(
      [](const Info& info) { return info.at("rref_forks") == 1 && info.at("rref_owners") == 1; }));
  expect_text(&job[0], "rref get lent 60000", "5");

  Player& again = job.start({.name = "worker2", .rank = 2, .world_size = 3});
  const Answer joined = again.joined();
  ASSERT_TRUE(joined.ok) << joined;
  ASSERT_NE(again.identity(), old);
  for (size_t i : {0, 1}) {
    ASSERT_TRUE(job[i].eventually(
        [&](const Info&) { return job[i].ask("who worker2").text == again.identity(); }));
    // To every RRef of the one before, the next incarnation is another worker.
    expect_kind(&job[i], "rref get theirs 60000", "peer_lost", "worker2");
    expect_text(&job[i], "rref drop theirs", "1");
  }
  expect_kind(&again, "rref get theirs 60000", "state", "refers to nothing");
  // It owns, holds and passes on like any other.
  ASSERT_TRUE(job[0].ask("rref make new worker2 number 6 60000").ok);
  expect_text(&job[0], "rref get new 60000", "6");
  expect_text(&job[0], "rref keep new worker1 new 60000", "1");
  expect_text(&job[1], "rref get new 60000", "6");
  expect_text(&job[0], "rref lend lent worker2 60000", "5");
  ASSERT_TRUE(again.ask("rref make own worker1 number 7 60000").ok);
  expect_text(&again, "rref lend own worker0 60000", "7");
  for (const char* name : {"held", "lent", "new"}) {
    expect_text(&job[0], absl::StrCat("rref drop ", name), "1");
  }
  expect_text(&job[1], "rref drop new", "1");
  expect_text(&again, "rref drop own", "1");
  leave_together({&job[0], &job[1], &again}, "");
}

// Created, shared with a third worker, fetched there, dropped: nothing stays, object or byte.
TEST(IntegrationRRef, ManyLivesLeaveNoMemory) {
  const auto cycles = weft::testing::environment_number<int64_t>("WEFT_RREF_CYCLES", 10'000);
  Job job;
  job.environment = long_lease();
  job.start_group(3);
  const auto live = [&job](int64_t count) {
    job[0].say(absl::StrCat("rref cycles worker1 worker2 ", count));
    const Answer answer = job[0].answer(std::chrono::minutes(60));
    ASSERT_EQ(answer.text, absl::StrCat(count)) << answer;
    for (size_t i : {0, 1, 2}) expect_no_rrefs(&job[i]);
  };
  // What is there once and for all: connections, pool threads, arenas, windows.
  live(5'000);
  int64_t resident[3];
  for (size_t i : {0, 1, 2}) resident[i] = job[i].process().resident_kib();
  live(cycles);
  for (size_t i : {0, 1, 2}) {
    const int64_t grown = job[i].process().resident_kib() - resident[i];
    RecordProperty(absl::StrCat("grown_kib_", i), absl::StrCat(grown));
    EXPECT_LT(grown, 8 * 1024) << "KiB in worker" << i;
    EXPECT_EQ(job[i].info().at("rref_faults"), 0);
  }
  leave_together({&job[0], &job[1], &job[2]}, "");
}

// Leaving while RRefs are alive everywhere, and one of those that hold and own them is dead.
class IntegrationRRefShutdown : public ::testing::TestWithParam<int> {};

TEST_P(IntegrationRRefShutdown, X12_leaving_with_live_rrefs_and_a_dead_peer) {
  Job job;
  start_mortal_group(&job);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (to == from) continue;
      Player& player = job[static_cast<size_t>(from)];
      const std::string name = absl::StrCat("of", to);
      ASSERT_TRUE(
          player.ask(absl::StrCat("rref make ", name, " worker", to, " number 1 60000")).ok);
      // And to the third one.
      expect_text(
          &player,
          absl::StrCat("rref keep ", name, " worker", 3 - from - to, " from", from, " 60000"), "1");
    }
  }
  if (GetParam() == SIGKILL) {
    job[2].process().send_signal(SIGKILL);
    ASSERT_EQ(job[2].process().wait_exit(), 128 + SIGKILL);
  } else {
    ASSERT_TRUE(job[2].process().stop());
  }
  for (size_t i : {0, 1}) job[i].say("shutdown");
  for (size_t i : {0, 1}) {
    const Answer answer = job[i].answer();
    EXPECT_FALSE(answer.ok) << answer;
    EXPECT_THAT(answer.kind, AnyOf("peer_lost", "deadline")) << answer;
    EXPECT_THAT(answer.text, HasSubstr("worker2=missing"));
  }
  for (size_t i : {0, 1}) {
    expect_kind(&job[i], absl::StrCat("rref get of", 1 - i, " 60000"), "state", "shut down");
    expect_no_rrefs(&job[i]);
    job[i].say("exit");
  }
  for (size_t i : {0, 1}) EXPECT_EQ(job[i].leave(), 0);
}

INSTANTIATE_TEST_SUITE_P(Ways, IntegrationRRefShutdown, ::testing::Values(SIGKILL, SIGSTOP),
                         [](const auto& info) {
                           return info.param == SIGKILL ? "killed" : "stopped";
                         });

}  // namespace
}  // namespace weft::integration
