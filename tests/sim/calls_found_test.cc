// Defects of calls, of answers that are kept and of subscribers whose triggers are schedules, under
// virtual time (DEF of the inventory).

#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/tests/sim/calls_group.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

constexpr int64_t kMiB = int64_t{1} << 20;

const FunctionRef<at::Tensor(int64_t)> kMake{"sim.make"};

// ---- 3 -----------------------------------------------------------------------------------------

TEST(CallsFoundSim, DEF_3_the_caller_hears_that_its_call_never_started) {
  Group({}).run([](Group& g) {
    const Worker& w = g.workers[0];
    const Future<int64_t> holds = rpc_async(w, "w1", on("slow", &Slow::hold), 5);
    const Status late =
        try_rpc_sync(w, "w1", {.deadline = 1s}, on("slow", &Slow::take), at::ones({4})).status();
    EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
    for (const char* part : {"it never started", "the turn of its object", "worker 'w1'"}) {
      EXPECT_NE(std::string(late.message()).find(part), std::string::npos) << part << ": " << late;
    }
    EXPECT_EQ(holds.wait(), 5);
    EXPECT_EQ(g.slow[1]->taken, 0);
  });
}

TEST(CallsFoundSim, DEF_3_the_deadline_counts_from_the_first_frame) {
  Group({}).run([](Group& g) {
    const Worker& w = g.workers[0];
    EXPECT_EQ(rpc_sync(w, "w1", on("slow", &Slow::take), at::ones({4})), 4);
    // The chunks come after the deadline, and no cancel at all.
    g.plan->add({.fault = Fault::kDrop, .kind = FrameKind::kCancel});
    g.plan->add(
        {.fault = Fault::kDelay, .kind = FrameKind::kChunk, .times = 1, .delay = absl::Seconds(3)});
    const Status late =
        try_rpc_sync(w, "w1", {.deadline = 2s}, on("slow", &Slow::take), at::ones({1 << 18}))
            .status();
    EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
    g.pass(absl::Seconds(10));
    EXPECT_EQ(g.slow[1]->taken, 1) << "a call has run after its deadline";
  });
}

// ---- 4: subscribers -----------------------------------------------------------------------------

TEST(CallsFoundSim, DEF_4_a_subscriber_that_blocks_stops_no_beats_and_hears_all_in_order) {
  Group({.dynamic = true, .lease = 5s}).run([](Group& g) {
    std::vector<std::string> heard;
    const auto subscription = g.workers[0].subscribe([&](const MembershipChange& change) {
      if (heard.empty()) g.pass(absl::Seconds(60));
      heard.push_back(absl::StrCat(change.worker.name, change.reason,
                                   change.kind == MembershipChange::Kind::kJoined ? "+" : "-"));
    });
    std::vector<std::string> quick;  // hears all although the other one blocks
    const auto other = g.workers[0].subscribe(
        [&](const MembershipChange& change) { quick.push_back(change.worker.name); });
    for (const char* name : {"a", "b"}) {
      Worker w = g.join(name);
      g.pass(absl::Seconds(2));
      EXPECT_TRUE(w.shutdown().status.ok());
      g.pass(absl::Seconds(2));
    }
    g.pass(absl::Seconds(20));
    EXPECT_EQ(heard, std::vector<std::string>());
    EXPECT_EQ(quick, (std::vector<std::string>{"a", "a", "b", "b"}));
    EXPECT_EQ(g.workers[1].worker_infos().size(), 2U) << "a live worker was declared dead";
    const auto taken =
        try_rpc_sync(g.workers[1], "w0", {.deadline = 5s}, on("slow", &Slow::take), at::ones({4}));
    EXPECT_TRUE(taken.ok()) << taken.status();
    g.pass(absl::Seconds(60));
    EXPECT_EQ(heard, (std::vector<std::string>{"a+", "a-", "b+", "b-"}));
  });
}

TEST(CallsFoundSim, DEF_4_shutdown_on_a_subscribers_thread_is_an_error_and_the_next_one_works) {
  Group({.dynamic = true, .lease = 5s}).run([](Group& g) {
    ShutdownResult refused;
    bool called = false;
    const auto subscription = g.workers[0].subscribe([&](const MembershipChange& change) {
      if (change.kind != MembershipChange::Kind::kJoined) return;
      refused = g.workers[0].shutdown({.deadline = 5s});
      called = true;
    });
    Worker w = g.join("a");
    g.pass(absl::Seconds(20));
    EXPECT_TRUE(called);
    EXPECT_EQ(error_kind(refused.status), ErrorKind::kState) << refused.status;
    EXPECT_NE(std::string(refused.status.message()).find("membership subscriber"),
              std::string::npos)
        << refused.status;
    EXPECT_TRUE(w.shutdown().status.ok());
    const ShutdownResult left = g.workers[0].shutdown({.deadline = 5s});
    EXPECT_TRUE(left.status.ok()) << left.status;
  });
}

// ---- 7: answers that are kept -------------------------------------------------------------------

TEST(CallsFoundSim, DEF_7_kept_answers_take_no_room_of_what_is_sent) {
  Group({.size = 6, .environment = {{"WEFT_SEND_BUDGET", "4MiB"}}}).run([](Group& g) {
    for (size_t i = 1; i < 6; ++i) {
      const auto made =
          try_rpc_sync(g.workers[i], "w0", {.retry = Retry::kAtMostOnce}, kMake, 3 * kMiB / 8);
      EXPECT_TRUE(made.ok()) << i << ": " << made.status();
    }
    EXPECT_EQ(g.count(0, "send_bytes"), 0);
  });
}

TEST(CallsFoundSim, DEF_7_an_idle_caller_acknowledges_what_it_has) {
  Group({}).run([](Group& g) {
    const Worker& w = g.workers[0];
    // A call that lasts, to another callee, holds nothing up.
    const Future<int64_t> lasts =
        rpc_async(w, "w0", {.retry = Retry::kAtMostOnce}, on("slow", &Slow::hold), 30);
    const auto make = [&] { (void)rpc_sync(w, "w1", {.retry = Retry::kAtMostOnce}, kMake, 1000); };
    make();
    EXPECT_EQ(g.count(1, "answers_kept"), 1);
    g.pass(absl::Seconds(3));
    EXPECT_EQ(g.count(1, "answers_kept"), 0);
    // What is lost with its connection is said again over the next.
    make();
    EXPECT_EQ(g.count(1, "answers_kept"), 1);
    g.plan->add({.fault = Fault::kCut, .kind = FrameKind::kHeartbeat, .from = "w0", .times = 1});
    g.pass(absl::Seconds(3));
    EXPECT_EQ(g.count(1, "answers_kept"), 1) << "no connection was cut";
    EXPECT_EQ(rpc_sync(w, "w1", on("slow", &Slow::take), at::ones({4})), 4);
    g.pass(absl::Seconds(3));
    EXPECT_EQ(g.count(1, "answers_kept"), 0);
    EXPECT_EQ(lasts.wait(), 30);
  });
}

// ---- 14: messages that stand still --------------------------------------------------------------

TEST(CallsFoundSim, DEF_14_a_message_that_stands_still_has_the_time_of_its_call) {
  Group({.lease = 10s}).run([](Group& g) {
    const Worker& w = g.workers[0];
    for (const char* sender : {"w0", "w1"}) {  // of arguments, of a result
      const int rule = g.plan->add({.fault = Fault::kDelay,
                                    .kind = FrameKind::kChunk,
                                    .from = sender,
                                    .skip = 2,
                                    .times = 1,
                                    .delay = absl::Seconds(45)});
      if (sender == std::string("w0")) {
        const auto taken = try_rpc_sync(w, "w1", {.deadline = 120s}, on("slow", &Slow::take),
                                        at::ones({kMiB / 4}));
        EXPECT_TRUE(taken.ok()) << taken.status();
      } else {
        const auto made = try_rpc_sync(w, "w1", {.deadline = 120s}, kMake, kMiB / 4);
        EXPECT_TRUE(made.ok()) << made.status();
      }
      EXPECT_EQ(g.plan->hits(rule), 1);
      g.plan->clear();
    }
  });
}

TEST(CallsFoundSim, DEF_14_what_stands_still_is_given_up_with_its_call) {
  Group({.lease = 10s}).run([](Group& g) {
    const Worker& w = g.workers[0];
    g.plan->add({.fault = Fault::kDrop, .kind = FrameKind::kChunk});
    const Status take =
        try_rpc_sync(w, "w1", {.deadline = 60s}, on("slow", &Slow::take), at::ones({kMiB / 4}))
            .status();
    const Status make = try_rpc_sync(w, "w1", {.deadline = 60s}, kMake, kMiB / 4).status();
    for (const Status& late : {take, make}) {
      EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
      EXPECT_NE(std::string(late.message()).find("deadline of 1m"), std::string::npos) << late;
    }
    // One without a deadline that is given up.
    Future<int64_t> endless =
        rpc_async(w, "w1", {.deadline = kInfinite}, on("slow", &Slow::take), at::ones({kMiB / 4}));
    g.pass(absl::Seconds(60));
    EXPECT_GE(g.count(1, "receive_bytes"), kMiB);
    endless.cancel();
    g.pass(absl::Seconds(30));
    for (size_t i : {0, 1}) EXPECT_EQ(g.count(i, "receive_bytes"), 0) << i;
    EXPECT_EQ(g.slow[1]->taken, 0);
  });
}

// What has arrived of calls that are over is looked for every half a lease, and not more often.
TEST(CallsFoundSim, WhatArrivedOfCallsThatAreOverIsGivenUpEveryHalfLease) {
  Group({}).run([](Group& g) {
    g.plan->add({.fault = Fault::kDrop, .kind = FrameKind::kChunk});
    std::vector<absl::Time> given_up;
    for (int i = 0; i < 3; ++i) {
      Future<int64_t> call = rpc_async(g.workers[0], "w1", {.deadline = kInfinite},
                                       on("slow", &Slow::take), at::ones({kMiB / 4}));
      g.pass(absl::Seconds(2));
      EXPECT_GE(g.count(1, "receive_bytes"), kMiB);
      call.cancel();
      while (g.count(1, "receive_bytes") > 0) g.pass(absl::Milliseconds(10));
      given_up.push_back(g.sim->now());
    }
    for (size_t i = 1; i < given_up.size(); ++i) {
      const absl::Duration between = given_up[i] - given_up[i - 1];
      EXPECT_GT(between, absl::Milliseconds(29'900));
      EXPECT_LT(between, absl::Milliseconds(30'100));
    }
    g.plan->clear();
  });
}

// ---- what goes on without calls ----------------------------------------------------------------

TEST(CallsFoundSim, AConnectionInUseNeedsNoHeartbeats) {
  Group({}).run([](Group& g) {
    const auto call = [&] {
      EXPECT_EQ(rpc_sync(g.workers[0], "w1", on("slow", &Slow::take), at::ones({4})), 4);
    };
    call();
    const int beats = g.plan->add(
        {.fault = Fault::kDelay, .kind = FrameKind::kHeartbeat, .delay = absl::ZeroDuration()});
    for (int i = 0; i < 100; ++i) {
      g.pass(absl::Milliseconds(200));
      call();
    }
    EXPECT_EQ(g.plan->hits(beats), 0);
    g.pass(absl::Seconds(200));
    EXPECT_GE(g.plan->hits(beats), 2 * 3) << "both at rest";
    EXPECT_LE(g.plan->hits(beats), 2 * 4) << "one in 0.9 of a lease, which is a minute";
    g.plan->clear();
  });
}

TEST(CallsFoundSim, AConnectionAtRestHasAHeartbeatInExactlySoMuchOfALease) {
  Group({.lease = 10s}).run([](Group& g) {
    EXPECT_EQ(rpc_sync(g.workers[0], "w1", on("slow", &Slow::take), at::ones({4})), 4);
    const int beats = g.plan->add(
        {.fault = Fault::kDelay, .kind = FrameKind::kHeartbeat, .delay = absl::ZeroDuration()});
    g.pass(absl::Seconds(900));
    EXPECT_NEAR(static_cast<double>(g.plan->hits(beats)), 2 * 100, 2 * 2) << "one in 9 s";
    g.plan->clear();
  });
}

TEST(CallsFoundSim, WhatATransportKeepsForLaterIsLookedAtOnceAMinute) {
  Group({}).run([](Group& g) {
    g.pass(absl::Minutes(2));
    const int64_t before = *g.sweeps;
    g.pass(absl::Minutes(10));
    EXPECT_NEAR(static_cast<double>(*g.sweeps - before), 2 * 10, 2);
  });
}

// ---- dials --------------------------------------------------------------------------------------

TEST(CallsFoundSim, AConnectionThatFailsEverySendIsDialledWithPauses) {
  Group({}).run([](Group& g) {
    const Worker& w = g.workers[0];
    g.plan->add({.fault = Fault::kFailBefore, .kind = FrameKind::kRequest, .from = "w0"});
    const Status late =
        try_rpc_sync(w, "w1", {.deadline = 20s}, on("slow", &Slow::take), at::ones({4})).status();
    EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
    EXPECT_GE(g.count(0, "dials"), 10);
    EXPECT_LE(g.count(0, "dials"), 60);
    EXPECT_LE(g.count(0, "connections"), 1);
    g.plan->clear();
    EXPECT_EQ(rpc_sync(w, "w1", on("slow", &Slow::take), at::ones({4})), 4);
    // Something has come through: the next loss is followed by a dial without a pause.
    g.pass(absl::Seconds(3));
    g.plan->add({.fault = Fault::kCut, .kind = FrameKind::kRequest, .from = "w0", .times = 1});
    const absl::Time before = g.sim->now();
    EXPECT_EQ(
        rpc_sync(w, "w1", {.retry = Retry::kAtMostOnce}, on("slow", &Slow::take), at::ones({4})),
        4);
    EXPECT_LT(g.sim->now() - before, absl::Milliseconds(15));
  });
}

// DIAL-2: where all call all at once, nearly every pair makes one connection.
TEST(CallsFoundSim, DIAL_2_workers_that_all_call_each_other_seldom_dial_both_ways) {
  constexpr int kWorkers = 24;
  Group({.size = kWorkers}).run([](Group& g) {
    g.network().set_delay(absl::Milliseconds(1), absl::Milliseconds(2));
    std::vector<Future<int64_t>> calls;
    for (int from = 0; from < kWorkers; ++from) {
      for (int to = 0; to < kWorkers; ++to) {
        if (from == to) continue;
        calls.push_back(rpc_async(g.workers[static_cast<size_t>(from)], to, on("slow", &Slow::take),
                                  at::ones({4})));
      }
    }
    for (const Future<int64_t>& call : calls) EXPECT_EQ(call.wait(), 4);
    int64_t dials = 0;
    for (size_t i = 0; i < kWorkers; ++i) dials += g.count(i, "dials");
    EXPECT_GE(dials, kWorkers * (kWorkers - 1) / 2);
    EXPECT_LE(dials, 5 * kWorkers * (kWorkers - 1) / 8) << "of pairs, a quarter twice at most";
  });
}

// DIAL-2: hosts that are away, as many as may be dialled at a time, hold up others for half a lease and no longer.
TEST(CallsFoundSim, DIAL_2_hosts_that_are_away_do_not_keep_others_waiting) {
  Group({.size = 10, .lease = 10s}).run([](Group& g) {
    for (int i = 1; i < 9; ++i) g.network().partition("w0", absl::StrCat("w", i));
    std::vector<Future<int64_t>> calls;
    for (int i = 1; i < 9; ++i) {
      calls.push_back(
          rpc_async(g.workers[0], i, {.deadline = 60s}, on("slow", &Slow::take), at::ones({4})));
    }
    const absl::Time begun = g.sim->now();
    EXPECT_EQ(rpc_sync(g.workers[0], 9, {.deadline = 60s}, on("slow", &Slow::take), at::ones({4})),
              4);
    EXPECT_GT(g.sim->now() - begun, absl::Seconds(3))
        << "it did not wait: the others were not away";
    EXPECT_LT(g.sim->now() - begun, absl::Seconds(7));
    for (int i = 1; i < 9; ++i) g.network().heal("w0", absl::StrCat("w", i));
    for (const Future<int64_t>& call : calls) EXPECT_EQ(call.wait(), 4);
  });
}

// DIAL-2: each of them makes room for one other, once.
TEST(CallsFoundSim, DIAL_2_of_hosts_that_are_away_eight_are_dialled_in_half_a_lease) {
  constexpr int kAway = 30;
  Group({.size = kAway + 1, .lease = 10s}).run([](Group& g) {
    for (int i = 1; i <= kAway; ++i) g.network().partition("w0", absl::StrCat("w", i));
    std::vector<Future<int64_t>> calls;
    for (int i = 1; i <= kAway; ++i) {
      calls.push_back(
          rpc_async(g.workers[0], i, {.deadline = 60s}, on("slow", &Slow::take), at::ones({4})));
    }
    EXPECT_EQ(g.count(0, "dials"), 8);
    g.pass(absl::Milliseconds(9500));
    EXPECT_EQ(g.count(0, "dials"), 16);
    for (int i = 1; i <= kAway; ++i) g.network().heal("w0", absl::StrCat("w", i));
    for (const Future<int64_t>& call : calls) EXPECT_EQ(call.wait(), 4);
  });
}

}  // namespace
}  // namespace weft::testing
