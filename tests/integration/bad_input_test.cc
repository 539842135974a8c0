// Peers, stores and addresses that are not as they should be, with real processes: every concerned
// caller gets an error that says what and who, within its deadline, and no other process is harmed.

#include <signal.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/tests/integration/job.h"

namespace weft::integration {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(Integration, BadInput_a_peer_killed) {
  Job job;
  job.environment = short_lease();
  job.start_group(3);
  // worker2 has callers, and is a caller itself.
  for (size_t i : {0, 1}) {
    ASSERT_TRUE(job[i].ask(absl::StrCat("start held worker2 hold ", i, " 60000 0")).ok);
    ASSERT_TRUE(job[i].ask(absl::StrCat("start again worker2 hold ", 10 + i, " 60000 1")).ok);
  }
  ASSERT_TRUE(job[2].ask("start own worker0 hold 20 60000 0").ok);
  ASSERT_TRUE(job[2].eventually([](const Info& i) { return i.at("held") == 4; }));
  ASSERT_TRUE(job[0].eventually([](const Info& i) { return i.at("held") == 1; }));
  job[2].process().send_signal(SIGKILL);
  ASSERT_EQ(job[2].process().wait_exit(), 128 + SIGKILL);

  for (size_t i : {0, 1}) job[i].say("call worker2 bump 1 60000 0");
  for (size_t i : {0, 1}) {
    // Whether this one was sent before the loss of the connection was seen is not specified.
    const Answer next = job[i].answer();
    EXPECT_THAT(next.kind, AnyOf("peer_lost", "maybe_executed")) << next;
    EXPECT_THAT(next.text, HasSubstr("'worker2'"));
    const Answer held = job[i].ask("wait held");
    EXPECT_EQ(held.kind, "maybe_executed") << held;
    EXPECT_THAT(held.text, HasSubstr("'worker2'"));
    // One that may be sent again waits for the peer to come back, until it is known to be dead: on
    // this host at once.
    const Answer again = job[i].ask("wait again");
    EXPECT_EQ(again.kind, "peer_lost") << again;
    EXPECT_THAT(again.text, HasSubstr("'worker2'"));
    EXPECT_THAT(again.text, HasSubstr("its worker has ended"));
    const Answer later = job[i].ask("call worker2 bump 2 60000 0");
    EXPECT_EQ(later.kind, "peer_lost") << later;
    // Told once, and of no other worker.
    expect_told_of_death(&job[i], "worker2");
    const std::string events = job[i].ask("events").text;
    EXPECT_EQ(events.find("died:"), events.rfind("died:")) << events;
    EXPECT_EQ(events.find("left:"), std::string::npos) << events;
    expect_works(&job, i, 1 - i);
  }
  // What it had begun at others has been told that no caller waits, and can end.
  ASSERT_TRUE(job[0].ask("open 20").ok);
  EXPECT_TRUE(job[0].eventually([](const Info& i) { return i.at("handlers_running") == 0; }));
}

TEST(Integration, BadInput_a_peer_stopped) {
  Job job;
  job.environment = short_lease();
  job.host_store();
  job.start_group(3);
  for (size_t i : {0, 1}) expect_works(&job, i, 2);
  // For a moment: it goes on where it was.
  ASSERT_TRUE(job[2].process().stop());
  ASSERT_TRUE(job[0].ask("start moment worker2 bump 1 60000 0").ok);
  const Answer late = job[1].ask("call worker2 bump 2 200 0");
  EXPECT_EQ(late.kind, "deadline") << late;
  EXPECT_THAT(late.text, HasSubstr("'worker2'"));
  job[2].process().send_signal(SIGCONT);
  const Answer moment = job[0].ask("wait moment");
  EXPECT_EQ(moment.text, "1") << moment;
  expect_works(&job, 1, 2);

  // Longer than its lease.
  ASSERT_TRUE(job[2].process().stop());
  for (size_t i : {0, 1}) job[i].say(absl::StrCat("call worker2 bump ", 10 + i, " 60000 0"));
  for (size_t i : {0, 1}) {
    const Answer answer = job[i].answer();
    EXPECT_THAT(answer.kind, AnyOf("peer_lost", "maybe_executed")) << answer;
    EXPECT_THAT(answer.text, HasSubstr("'worker2'"));
    EXPECT_THAT(answer.text, HasSubstr("no sign of life"));
  }
  for (size_t i : {0, 1}) {
    expect_told_of_death(&job[i], "worker2");
    const Answer answer = job[i].ask("call worker2 bump 3 60000 0");
    EXPECT_EQ(answer.kind, "peer_lost") << answer;
    expect_works(&job, i, 1 - i);
  }
  // It goes on, and is told what happened to it.
  job[2].process().send_signal(SIGCONT);
  Answer own;
  EXPECT_TRUE(job[2].eventually([&](const Info&) {
    own = job[2].ask("call worker0 bump 5 60000 0");
    EXPECT_FALSE(own.ok) << own;
    return own.kind == "state" || own.ok;
  })) << own;
  EXPECT_THAT(own.text, HasSubstr("declared dead"));
  for (size_t i : {0, 1}) expect_works(&job, i, 1 - i);
}

TEST(Integration, BadInput_a_peer_restarted_with_the_same_name) {
  Job job;
  job.environment = short_lease();
  job.start_group(3);
  for (size_t i : {0, 1}) {
    expect_works(&job, i, 2);
    ASSERT_TRUE(job[i].ask(absl::StrCat("start held worker2 hold ", i, " 60000 0")).ok);
  }
  const std::string old = job[2].identity();
  job[2].process().send_signal(SIGKILL);
  ASSERT_EQ(job[2].process().wait_exit(), 128 + SIGKILL);
  // At once, while the lease of the one before still lasts.
  Player& again = job.start({.name = "worker2", .rank = 2, .world_size = 3});
  const Answer joined = again.joined();
  ASSERT_TRUE(joined.ok) << joined;
  EXPECT_NE(again.identity(), old);
  // Nothing of the one before is left in the store, where it could be taken for a member.
  EXPECT_EQ(job.keys("member/").size(), 3u);
  for (size_t i : {0, 1}) {
    const Answer held = job[i].ask("wait held");
    EXPECT_EQ(held.kind, "maybe_executed") << held;
    ASSERT_TRUE(job[i].eventually(
        [&](const Info&) { return job[i].ask("who worker2").text == again.identity(); }));
    // A caller that means the incarnation before does not get the new one.
    const Answer to_old = job[i].ask(absl::StrCat("call ", old, " bump 6 60000 0"));
    EXPECT_EQ(to_old.kind, "peer_lost") << to_old;
    EXPECT_THAT(to_old.text, HasSubstr("'worker2'"));
    expect_works(&job, i, 3);
    expect_works(&job, 3, i);
    expect_works(&job, i, 1 - i);
  }
  EXPECT_EQ(again.info().at("runs"), 2);
}

TEST(Integration, BadInput_a_peer_restarted_with_the_same_name_when_nobody_else_is_there) {
  Job job;
  job.environment = {{"WEFT_LEASE", "1s"}, {"WEFT_HEARTBEAT_INTERVAL", "100ms"}};
  for (int start = 0; start < 4; ++start) {
    Player& player = job.start({.name = "alone", .rank = 0, .world_size = 1});
    const Answer joined = player.joined();
    ASSERT_TRUE(joined.ok) << joined;
    EXPECT_EQ(job.keys("member/").size(), 1u) << "start " << start;
    EXPECT_EQ(player.ask("call alone bump 1 60000 0").text, "1");
    player.process().send_signal(SIGKILL);
    ASSERT_EQ(player.process().wait_exit(), 128 + SIGKILL);
  }
}

TEST(Integration, BadInput_a_peer_restarted_with_the_same_name_in_a_dynamic_group) {
  Job job;
  job.environment = short_lease();
  Player& stays = job.start({.name = "stays"});
  ASSERT_TRUE(stays.joined().ok);
  ASSERT_TRUE(job.start({.name = "again"}).joined().ok);
  ASSERT_TRUE(stays.eventually([](const Info& i) { return i.at("members") == 2; }));
  expect_works(&job, 0, 1);
  ASSERT_TRUE(stays.ask("start held again hold 1 60000 0").ok);
  ASSERT_TRUE(job[1].eventually([](const Info& i) { return i.at("held") == 1; }));
  const std::string old = job[1].identity();
  job[1].process().send_signal(SIGKILL);
  ASSERT_EQ(job[1].process().wait_exit(), 128 + SIGKILL);
  Player& again = job.start({.name = "again"});
  const Answer joined = again.joined();
  ASSERT_TRUE(joined.ok) << joined;
  EXPECT_EQ(job.keys("member/").size(), 2u);
  EXPECT_EQ(stays.ask("wait held").kind, "maybe_executed");
  ASSERT_TRUE(stays.eventually(
      [&](const Info&) { return stays.ask("who again").text == again.identity(); }));
  EXPECT_EQ(stays.ask(absl::StrCat("call ", old, " bump 6 60000 0")).kind, "peer_lost");
  expect_works(&job, 0, 2);
  expect_works(&job, 2, 0);
  for (size_t i : {0, 2}) {
    const Answer answer = job[i].ask("shutdown");
    EXPECT_TRUE(answer.ok) << job[i].name() << ": " << answer;
  }
}

TEST(Integration, BadInput_a_peer_replaced_while_the_one_before_still_runs) {
  Job job;
  job.environment = short_lease();
  job.host_store();
  job.start_group(3);
  ASSERT_TRUE(job[2].process().stop());
  for (size_t i : {0, 1}) expect_told_of_death(&job[i], "worker2");
  job[2].process().send_signal(SIGCONT);
  // It knows that it is out before another worker takes its place.
  ASSERT_TRUE(job[2].eventually(
      [&](const Info&) { return job[2].ask("call worker0 bump 1 60000 0").kind == "state"; }));
  Player& again = job.start({.name = "worker2", .rank = 2, .world_size = 3});
  const Answer joined = again.joined();
  ASSERT_TRUE(joined.ok) << joined;
  for (size_t i : {0, 1}) {
    ASSERT_TRUE(job[i].eventually(
        [&](const Info&) { return job[i].ask("who worker2").text == again.identity(); }));
    expect_works(&job, i, 3);
  }
  // The one before leaves, and no worker sees that as a loss.
  EXPECT_FALSE(job[2].ask("shutdown").ok);
  EXPECT_EQ(job[2].leave(), 0);
  for (size_t i : {0, 1}) {
    expect_works(&job, i, 3);
    EXPECT_EQ(job[i].ask("who worker2").text, again.identity());
  }
  for (size_t i : {0, 1, 3}) job[i].say("shutdown");
  for (size_t i : {0, 1, 3}) {
    const Answer answer = job[i].answer();
    EXPECT_TRUE(answer.ok) << job[i].name() << ": " << answer;
  }
}

TEST(Integration, BadInput_a_second_worker_of_the_same_rank) {
  Job job;
  job.environment = short_lease();
  job.start_group(2);
  const Answer second = job.start({.name = "intruder", .rank = 1, .world_size = 2}).joined();
  EXPECT_EQ(second.kind, "invalid_argument") << second;
  EXPECT_THAT(second.text, HasSubstr("'worker1' and 'intruder' both claim it"));
  for (size_t i : {0, 1}) expect_works(&job, i, 1 - i);
  // The group was complete: the mistake must not stand in the way of a restart.
  job[1].process().send_signal(SIGKILL);
  ASSERT_EQ(job[1].process().wait_exit(), 128 + SIGKILL);
  const Answer again = job.start({.name = "worker1", .rank = 1, .world_size = 2}).joined();
  EXPECT_TRUE(again.ok) << again;
}

TEST(Integration, BadInput_a_peer_of_another_job) {
  Job ours;
  ours.start_group(2);
  Job other;
  other.environment = {{"WEFT_JOB_ID", "feed"}};
  other.start({.name = "worker0", .rank = 0, .world_size = 2});
  other.start({.name = "worker1", .rank = 1, .world_size = 2, .arguments = {"--ask-address"}});
  EXPECT_TRUE(other[1].process().read_line().has_value());
  other[1].say(ours[1].address());  // an address that now belongs to another worker
  for (size_t i : {0, 1}) ASSERT_TRUE(other[i].joined().ok);
  const Answer refused = other[0].ask("call worker1 bump 1 60000 0");
  EXPECT_EQ(refused.kind, "permission") << refused;
  EXPECT_THAT(refused.text, HasSubstr("'worker1'"));
  EXPECT_THAT(refused.text, HasSubstr("1234abcd"));
  EXPECT_THAT(refused.text, HasSubstr("feed"));
  EXPECT_EQ(ours[1].info().at("runs"), 0);
  // Ours have not noticed; theirs reach each other as soon as the other side dials.
  expect_works(&ours, 0, 1);
  expect_works(&ours, 1, 0);
  expect_works(&other, 1, 0);
  expect_works(&other, 0, 1);
  ours.shut_down();
  other.shut_down();
}

TEST(Integration, BadInput_world_size_never_reached) {
  Job job;
  job.environment = {{"WEFT_JOIN_TIMEOUT", "4s"}};
  Player& patient = job.start({.name = "worker2",
                               .rank = 2,
                               .world_size = 4,
                               .environment = {{"WEFT_JOIN_TIMEOUT", "8s"}}});
  ASSERT_TRUE(eventually([&job] { return job.keys("member/").size() == 1; }));
  Player& hasty = job.start({.name = "worker0", .rank = 0, .world_size = 4});
  for (Player* player : {&hasty, &patient}) {
    const Answer answer = player->joined();
    EXPECT_EQ(answer.kind, "deadline") << answer;
    EXPECT_THAT(answer.text, HasSubstr("waited for 4 workers"));
    EXPECT_THAT(answer.text, HasSubstr("2 came; missing ranks: 1, 3"));
    const bool alone = answer.text.find("came and left again: 0") != std::string::npos;
    EXPECT_EQ(alone, player == &patient) << answer;
    EXPECT_EQ(player->process().wait_exit(), 3);
  }
}

TEST(Integration, BadInput_dead_rendezvous) {
  QuietPort nobody;
  QuietPort silent;
  silent.listen();
  Job job;
  job.environment = {{"WEFT_JOIN_TIMEOUT", "2s"}};
  for (const QuietPort* port : {&nobody, &silent}) {
    const std::string at = absl::StrCat("127.0.0.1:", port->port());
    Player& player = job.start({.name = "worker1",
                                .rank = 1,
                                .world_size = 2,
                                .environment = {{"WEFT_STORE", "tcp://" + at}}});
    const Answer answer = player.joined();
    EXPECT_EQ(answer.kind, "unavailable") << answer;
    EXPECT_THAT(answer.text, HasSubstr("'worker1' cannot use its store"));
    EXPECT_THAT(answer.text, HasSubstr(at));
    EXPECT_EQ(player.process().wait_exit(), 3);
  }
  Player& player =
      job.start({.name = "worker1",
                 .rank = 1,
                 .world_size = 2,
                 .environment = {{"WEFT_STORE", "file://" + job.path("no/such/dir")}}});
  const Answer answer = player.joined();
  EXPECT_FALSE(answer.ok);
  EXPECT_THAT(answer.text, HasSubstr("no/such/dir"));
  EXPECT_EQ(player.process().wait_exit(), 3);
}

TEST(Integration, BadInput_taken_port) {
  QuietPort taken;
  taken.listen();
  Job job;
  job.start({.name = "worker0", .rank = 0, .world_size = 2});
  Player& unlucky = job.start({.name = "worker1",
                               .rank = 1,
                               .world_size = 2,
                               .environment = {{"WEFT_PORT", absl::StrCat(taken.port())}}});
  const Answer answer = unlucky.joined();
  EXPECT_EQ(answer.kind, "resource") << answer;
  EXPECT_THAT(answer.text, HasSubstr(absl::StrCat("127.0.0.1:", taken.port())));
  EXPECT_THAT(answer.text, HasSubstr("taken"));
  EXPECT_EQ(unlucky.process().wait_exit(), 3);
  // Its rank and name are free again: a second try with another port completes the group.
  Player& lucky = job.start({.name = "worker1", .rank = 1, .world_size = 2});
  EXPECT_TRUE(lucky.joined().ok);
  EXPECT_TRUE(job[0].joined().ok);
  expect_works(&job, 0, 2);
}

TEST(Integration, BadInput_beyond_loopback_without_credentials_is_refused) {
  Job job;
  for (const char* host : {"0.0.0.0", "::"}) {
    Player& player = job.start(
        {.name = "worker0", .rank = 0, .world_size = 1, .environment = {{"WEFT_LISTEN", host}}});
    const Answer answer = player.joined();
    EXPECT_EQ(answer.kind, "permission") << answer;
    EXPECT_THAT(answer.text, HasSubstr(absl::StrCat("refusing to listen on ", host)));
    EXPECT_THAT(answer.text, HasSubstr("allow_insecure"));
    EXPECT_EQ(player.process().wait_exit(), 3);
  }
  // Nor is a store, which rank 0 would host.
  QuietPort port;
  Player& player =
      job.start({.name = "worker0",
                 .rank = 0,
                 .world_size = 2,
                 .environment = {{"WEFT_STORE", absl::StrCat("tcp://0.0.0.0:", port.port())}}});
  const Answer answer = player.joined();
  EXPECT_EQ(answer.kind, "permission") << answer;
  EXPECT_THAT(answer.text, HasSubstr("allow_insecure"));
  EXPECT_EQ(player.process().wait_exit(), 3);
}

}  // namespace
}  // namespace weft::integration
