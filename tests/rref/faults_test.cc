// What goes wrong with RRefs: every line of docs/faults.md, lost and late messages (RPC-116 to
// RPC-120, X2, X6), broken connections (X1), deaths (RREF-8, X12).

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/tests/rref/fixture.h"
#include "weft/tests/testing/mortal_store.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RRefFaults : public RRefTest {
 protected:
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(3);
};

// ---- bad input ---------------------------------------------------------------------------------

TEST_P(RRefFaults, BadInput_an_rref_that_refers_to_nothing) {
  auto c = make({.size = 2});
  const RRef<Table> nothing;
  EXPECT_FALSE(nothing.valid());
  expect_error(nothing.try_rpc_sync(&Table::rows).status(), ErrorKind::kState,
               {"refers to nothing"});
  expect_error(IntRef().try_to_here().status(), ErrorKind::kState, {"refers to nothing"});
  expect_error(error_of([&] { (void)nothing.owner(); }), ErrorKind::kState, {"refers to nothing"});
  expect_error(error_of([&] { nothing.local_value(); }), ErrorKind::kState, {"refers to nothing"});
  expect_error(error_of([&] { nothing.remote(&Table::rows); }), ErrorKind::kState,
               {"refers to nothing"});
  expect_error(error_of([&] { rpc_sync((*c)[0], 1, &rows_of, nothing); }), ErrorKind::kState,
               {"argument 0 of 'own.rows_of'", "refers to nothing"});
  expect_error(error_of([&] { IntRef::local((*c)[0], std::shared_ptr<int64_t>()); }),
               ErrorKind::kInvalidArgument, {"null"});
}

// RPC-7.
TEST_P(RRefFaults, RPC_7_rref_without_a_worker_or_service) {
  expect_error(error_of([] { IntRef::local(Worker(), 1); }), ErrorKind::kState,
               {"an RRef needs a worker"});
  expect_error(error_of([] { remote(Worker(), "worker1", kOwnWaitAtGate); }), ErrorKind::kState,
               {"an RRef needs a worker"});
  Cluster plain({.size = 2, .net = GetParam(), .library = lib_.library});
  expect_error(error_of([&] { remote(plain[0], 1, &add, 1, 2); }), ErrorKind::kState,
               {"rref_service()"});
  expect_error(error_of([&] { live_rrefs(plain[0]); }), ErrorKind::kState, {"rref_service()"});
}

TEST_P(RRefFaults, BadInput_a_peer_without_the_service) {
  ClusterOptions o{.size = 2, .net = GetParam(), .library = lib_.library};
  o.adjust = [](int index, JoinOptions* j) {
    if (index == 0) j->services.push_back(rref_service());
  };
  Cluster c(std::move(o));
  {
    auto made = remote(c[0], 1, &add, 1, 2);
    // Creation and fetch are refused in any order, each under its own name.
    expect_error(made.try_to_here().status(), ErrorKind::kUnimplemented,
                 {"'worker1' does not run the service of '@rref"});
    const auto mine = IntRef::local(c[0], 4);
    expect_error(try_rpc_sync(c[0], 1, &fetch, mine).status(), ErrorKind::kUnimplemented,
                 {"'@rref'"});
  }
  expect_nothing_left_at(c[0]);
}

TEST_P(RRefFaults, BadInput_an_unknown_worker_or_function) {
  auto c = make({.size = 2});
  {
    expect_error(error_of([&] { remote((*c)[0], "worker7", &add, 1, 2); }), ErrorKind::kNotFound,
                 {"worker7"});
    auto unknown = remote((*c)[0], 1, FunctionRef<int64_t()>{"own.not_there"});
    expect_error(unknown.try_to_here().status(), ErrorKind::kNotFound, {"own.not_there"});
    auto wrong = remote((*c)[0], 1, FunctionRef<int64_t(std::string)>{"test.add"}, "x");
    expect_error(wrong.try_to_here().status(), ErrorKind::kSignature, {"(int,int)->int"});
    auto constructor = remote<Table>((*c)[0], 1, 1.5);
    expect_error(constructor.try_rpc_sync(&Table::rows).status(), ErrorKind::kSignature,
                 {"(int)->own.Table or (int,string)->own.Table"});
    expect_error(error_of([&] { remote<RRefLibrary>((*c)[0], 1); }), ErrorKind::kNotFound,
                 {"not registered"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefFaults, RPC_104_rref_proxy_non_exist_and_BadInput_a_method_of_another_class) {
  auto c = make({.size = 2});
  {
    auto table = remote<Table>((*c)[0], 1, 1);
    expect_error(table.try_rpc_sync(FunctionRef<int64_t()>{"own.Table.shrink"}).status(),
                 ErrorKind::kNotFound, {"own.Table.shrink"});
    // The kinds of both are rref<object>: only the owner knows the class.
    const RRef<Counter> counter_ref(table.handle());
    expect_error(counter_ref.try_rpc_sync(&Counter::value).status(), ErrorKind::kSignature,
                 {"'own.Table'", "'test.Counter'"});
    const RRef<Table> number(remote((*c)[0], 1, &add, 1, 2).handle());
    expect_error(number.try_rpc_sync(&Table::rows).status(), ErrorKind::kSignature, {"Table"});
    const RRef<std::string> text(remote((*c)[0], 1, &add, 1, 2).handle());
    expect_error(text.try_to_here().status(), ErrorKind::kProtocol, {"expected string"});
    const auto mine = IntRef::local((*c)[0], 1);
    expect_error(error_of([&] { RRef<Table>(mine.handle()).local_value(); }), ErrorKind::kSignature,
                 {"type"});
    // A class that cannot be sent is not fetched, whatever the caller believes.
    expect_error(RRef<int64_t>(table.handle()).try_to_here().status(), ErrorKind::kInvalidArgument,
                 {"cannot be sent"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefFaults, RPC_105_local_value_not_on_owner) {
  auto c = make({.size = 2});
  {
    auto far = remote((*c)[0], 1, &add, 1, 2);
    expect_error(error_of([&] { far.local_value(); }), ErrorKind::kState,
                 {"'worker0'", "'worker1'", "to_here()"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefFaults, RPC_115_rref_pickle_not_supported) {
  auto c = make({.size = 2});
  {
    auto far = remote((*c)[0], 1, &add, 1, 2);
    Payload payload;
    Encoder out(&payload);
    out.put(far);
    ASSERT_TRUE(out.status().ok());
    Decoder in(Payload{payload.body, {}});
    expect_error(in.take<IntRef>().status(), ErrorKind::kProtocol, {"travels with calls only"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefFaults, BadInput_an_rref_at_a_worker_that_does_not_hold_it) {
  auto c = make({.size = 2});
  auto other_job = make({.size = 2});
  {
    auto held_by_0 = remote((*c)[0], 1, &add, 1, 2);
    expect_error(error_of([&] { rpc_sync((*c)[1], 0, &fetch, held_by_0); }),
                 ErrorKind::kInvalidArgument, {"'worker1'", "'worker0'", "alone can pass it on"});
    expect_error(error_of([&] { rpc_sync((*other_job)[0], 1, &fetch, held_by_0); }),
                 ErrorKind::kInvalidArgument, {(*c)[0].job_id(), (*other_job)[0].job_id()});
  }
  expect_nothing_left(*c);
  expect_nothing_left(*other_job);
}

TEST_P(RRefFaults, RPC_114_use_rref_after_shutdown_and_X3_in_the_next_cycle) {
  IntRef old;
  IntRef old_local;
  RRef<Table> old_table;
  for (int cycle = 0; cycle < 3; ++cycle) {
    auto c = make({.size = 3, .fail_on_leak = false});
    {
      auto x = remote((*c)[0], 1, &add, 1, 2);
      EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch, x), 3) << "user to user";
      EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, x), 3) << "user to owner";
      EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, IntRef::local((*c)[0], 4)), 4) << "owner to user";
    }
    if (old.valid()) {
      expect_error(old.try_to_here().status(), ErrorKind::kState, {"shut down"});
      expect_error(error_of([&] { rpc_sync((*c)[0], 1, &fetch, old); }), ErrorKind::kState,
                   {"is gone"});
    }
    old = remote((*c)[0], 1, &add, cycle, 1);
    old_local = IntRef::local((*c)[0], 6);
    old_table = remote<Table>((*c)[0], 1, 1);
    EXPECT_EQ(old.to_here(), cycle + 1);
    EXPECT_EQ(old_table.rpc_sync(&Table::rows), 1);
    c->shutdown();
    // The worker still stands, but has shut down.
    expect_error(old.try_to_here().status(), ErrorKind::kState, {"shut down"});
    expect_error(error_of([&] { old_local.local_value(); }), ErrorKind::kState, {"shut down"});
    expect_error(error_of([&] { old_table.remote(&Table::rows); }), ErrorKind::kState,
                 {"shut down"});
    expect_error(old_table.try_rpc_sync(&Table::rows).status(), ErrorKind::kState, {"shut down"});
    EXPECT_FALSE(old.confirmed_by_owner());
    EXPECT_EQ(old.owner_name(), "worker1");
  }
}

// An owner that has left and joined again is another one.
TEST_P(RRefFaults, BadInput_an_rref_of_another_incarnation) {
  auto c = make({.size = 3, .dynamic = true});
  for (size_t i = 0; i < 3; ++i) {
    eventually((*c)[i], [&] { return (*c)[i].worker_infos().size() == 3; }, "all are known");
  }
  {
    auto x = remote((*c)[0], "worker1", &add, 1, 2);
    EXPECT_EQ(x.to_here(), 3);
    (*c)[1].shutdown();
    Worker again = Worker::join(c->join_options(1, "worker1"));
    eventually((*c)[0], [&] { return (*c)[0].try_get_worker_info("worker1").ok(); }, "again");
    expect_error(x.try_to_here().status(), ErrorKind::kPeerLost, {"'worker1'"});
    expect_error(try_rpc_sync((*c)[0], "worker2", &fetch, x).status(), ErrorKind::kPeerLost,
                 {"'worker1'"});
    again.shutdown();
  }
  eventually((*c)[0], [&] { return counter((*c)[0], "rref_users") == 0; }, "users");
  c->forget();
}

// ---- creations that fail (RREF-10) -------------------------------------------------------------

TEST_P(RRefFaults, RPC_116_rref_timeout_and_X2_delete_before_create_has_ended) {
  auto c = make();
  {
    auto late = remote((*c)[0], 1, {.deadline = 200ms}, kOwnWaitAtGate);
    lib_.hold->wait_arrived(1);
    // The original error, at once, for every use from then on.
    expect_error(late.try_to_here().status(), ErrorKind::kDeadline, {"deadline of 200ms"});
    expect_error(late.try_to_here().status(), ErrorKind::kDeadline, {"deadline of 200ms"});
    expect_error(try_rpc_sync((*c)[0], 2, &fetch, late).status(), ErrorKind::kDeadline,
                 {"deadline of 200ms"});
    // It runs at its owner for all that, and has no holder when this handle goes.
    EXPECT_EQ(counter((*c)[1], "rref_owners"), 1);
  }
  eventually((*c)[1], [&] { return counter((*c)[1], "rref_forks") == 0; }, "deleted");
  lib_.hold->open();
  expect_nothing_left(*c);
}

// Those that wait when the creation fails are told then, not at their own deadline.
TEST_P(RRefFaults, AFailedCreationEndsWaitingFetches) {
  auto c = make({.size = 2, .plan = plan_});
  {
    rpc_sync((*c)[0], 1, &add, 1, 1);
    const int lost = plan_->add(
        {.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "worker0", .times = 1});
    auto x = remote((*c)[0], 1, {.deadline = 300ms}, &add, 1, 2);
    EXPECT_EQ(plan_->hits(lost), 1);
    const auto waiting = x.to_here_async({.deadline = 60s});
    const Status s = waiting.try_wait().status();
    expect_error(s, ErrorKind::kDeadline, {"deadline of 300ms"});
  }
  expect_nothing_left(*c);
}

TEST_P(RRefFaults, RPC_117_and_RPC_118_remote_message_dropped) {
  auto c = make({.size = 3, .plan = plan_});
  for (int to : {1, 0}) {
    rpc_sync((*c)[0], to, &add, 1, 1);
    const int lost = plan_->add({.fault = Fault::kDrop,
                                 .kind = FrameKind::kRequest,
                                 .from = "worker0",
                                 .to = absl::StrCat("worker", to)});
    const int64_t failed = counter((*c)[0], "calls_failed");
    auto x = remote((*c)[0], to, {.deadline = 300ms}, &add, 1, 2);
    eventually((*c)[0], [&] { return counter((*c)[0], "calls_failed") > failed; }, "given up");
    EXPECT_GE(plan_->hits(lost), 1);
    plan_->clear();
    expect_error(x.try_to_here({.deadline = 10s}).status(), ErrorKind::kDeadline, {"300ms"});
    expect_error(try_rpc_sync((*c)[0], 2, &fetch, x).status(), ErrorKind::kDeadline, {"300ms"});
  }
  expect_nothing_left(*c);
}

// The creation comes after it was given up, and after its delete.
TEST_P(RRefFaults, RPC_119_remote_message_delayed_and_X2_delete_overtakes_creation) {
  auto c = make({.size = 2, .plan = plan_});
  for (int to : {1, 0}) {
    rpc_sync((*c)[0], to, &add, 1, 1);
    const int late = plan_->add({.fault = Fault::kDelay,
                                 .kind = FrameKind::kRequest,
                                 .from = "worker0",
                                 .to = absl::StrCat("worker", to),
                                 .delay = absl::Milliseconds(400)});
    {
      auto x = remote<Table>((*c)[0], to, {.deadline = 100ms}, 1);
      expect_error(x.try_rpc_sync({.deadline = 10s}, &Table::rows).status(), ErrorKind::kDeadline,
                   {"100ms"});
    }
    EXPECT_GE(plan_->hits(late), 1);
    plan_->clear();
    EXPECT_EQ(rpc_sync((*c)[0], to, &add, 1, 1), 2) << "behind it";
  }
  expect_nothing_left(*c);
}

TEST_P(RRefFaults, RPC_57_and_RPC_58_and_RPC_59_uses_have_deadlines_of_their_own) {
  auto c = make({.size = 2, .rpc_timeout = 30s});
  {
    auto held = remote((*c)[0], 1, kOwnWaitAtGate);
    lib_.hold->wait_arrived(1);
    expect_error(held.try_to_here({.deadline = 50ms}).status(), ErrorKind::kDeadline,
                 {"deadline of"});
    const RRef<Table> as_table(held.handle());
    expect_error(as_table.try_rpc_sync({.deadline = 50ms}, &Table::rows).status(),
                 ErrorKind::kDeadline, {"deadline of"});
    auto chained = as_table.remote({.deadline = 50ms}, &Table::rows);
    expect_error(chained.try_to_here().status(), ErrorKind::kDeadline, {"deadline of"});
    auto here = remote((*c)[1], 1, kOwnWaitAtGate);
    lib_.hold->wait_arrived(2);
    expect_error(error_of([&] { here.local_value(50ms); }), ErrorKind::kDeadline,
                 {"deadline of 50ms", "'worker1'"});
    auto cancelled = here.local_value_async();
    EXPECT_TRUE(cancelled.cancel());
    EXPECT_EQ(error_kind(cancelled.try_wait().status()), ErrorKind::kCancelled);
    auto given_up = held.to_here_async();
    EXPECT_TRUE(given_up.cancel());
    eventually((*c)[1], [&] { return counter((*c)[1], "rref_parked_uses") == 0; },
               "what was given up is not parked any more");
    EXPECT_EQ(counter((*c)[1], "rref_faults"), 0);
    lib_.hold->open();
    EXPECT_EQ(held.to_here(), 7);
  }
  expect_nothing_left(*c);
}

// ---- lost control messages and connections -----------------------------------------------------

// The first sends of everything fail; and again each 3rd is lost with its connection.
TEST_P(RRefFaults, RPC_120_check_failed_messages_and_X6_no_abort) {
  for (const Fault fault : {Fault::kFailBefore, Fault::kFailAfter, Fault::kLoseUnsent}) {
    auto c = make({.size = 3, .plan = plan_});
    {
      for (int i = 0; i < 3; ++i) rpc_sync((*c)[static_cast<size_t>(i)], (i + 1) % 3, &add, 1, 1);
      std::vector<IntRef> refs;
      for (int i = 0; i < 6; ++i) refs.push_back(remote((*c)[0], 1 + i % 2, &add, i, 1));
      for (const IntRef& r : refs) r.to_here();
      for (const char* from : {"worker0", "worker1", "worker2"}) {
        plan_->add({.fault = fault, .kind = FrameKind::kRequest, .from = from, .times = 3});
      }
      // Each hop is a call that may run at most once.
      for (int i = 0; i < 6; ++i) {
        const IntRef& r = refs[static_cast<size_t>(i)];
        const auto sum = try_rpc_sync((*c)[0], 1 + i % 2, {.retry = Retry::kAtMostOnce},
                                      &fetch_both, r, refs[0]);
        ASSERT_TRUE(sum.ok()) << sum.status();
        EXPECT_EQ(*sum, i + 2);
      }
    }
    EXPECT_GT(plan_->hits(), 5);
    plan_->clear();
    expect_nothing_left(*c);
  }
}

// A control item that never gets through: the operation that needs it fails, nothing else does.
TEST_P(RRefFaults, X6_a_fork_that_cannot_be_confirmed) {
  auto c = make({.size = 3, .plan = plan_});
  {
    auto x = remote((*c)[0], 1, &add, 1, 2);
    EXPECT_EQ(x.to_here(), 3);
    const int broken = plan_->add({.fault = Fault::kFailBefore,
                                   .kind = FrameKind::kRequest,
                                   .from = "worker2",
                                   .to = "worker1"});
    const Status s = try_rpc_sync((*c)[0], 2, {.deadline = 300ms}, &fetch, x).status();
    EXPECT_EQ(error_kind(s), ErrorKind::kDeadline) << s;
    EXPECT_GT(plan_->hits(broken), 0);
    EXPECT_EQ(rpc_sync((*c)[0], 2, &add, 1, 2), 3) << "the rest goes on";
    EXPECT_EQ(x.to_here(), 3);
    plan_->clear();
    EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch, x), 3);
  }
  expect_nothing_left(*c);
}

// X1(d).
TEST_P(RRefFaults, X1_rrefs_survive_cut_connections) {
  auto c = make({.size = 3, .plan = plan_});
  {
    auto x = remote((*c)[0], 1, &add, 1, 2);
    auto table = remote<Table>((*c)[0], 1, 5);
    IntRef theirs = rpc_sync((*c)[0], 2, &give_back, x);
    for (int i = 0; i < 10; ++i) {
      plan_->add({.fault = i % 2 == 0 ? Fault::kCut : Fault::kFailAfter,
                  .kind = i % 3 == 0 ? FrameKind::kResponse : FrameKind::kRequest,
                  .times = 1});
      EXPECT_EQ(x.to_here(), 3);
      EXPECT_EQ(theirs.to_here(), 3);
      EXPECT_EQ(*table.try_rpc_sync({.retry = Retry::kAtMostOnce}, &Table::grow, 1), 6 + i);
      const auto third = try_rpc_sync((*c)[0], 2, {.retry = Retry::kAtMostOnce}, &give_back, x);
      ASSERT_TRUE(third.ok()) << third.status();
      theirs = *third;
    }
    EXPECT_GT(plan_->hits(), 5);
    plan_->clear();
  }
  expect_nothing_left(*c);
}

// An answer with RRefs is lost: the owner's fork is found by asking.
TEST_P(RRefFaults, RRefsInALostAnswerAreTakenBack) {
  auto c = make({.size = 2, .plan = plan_});
  {
    rpc_sync((*c)[0], 1, &add, 1, 1);
    plan_->add({.fault = Fault::kCut, .kind = FrameKind::kResponse, .from = "worker1", .times = 1});
    const auto lost = try_rpc_sync((*c)[0], 1, &make_here, 5);
    EXPECT_EQ(error_kind(lost.status()), ErrorKind::kMaybeExecuted) << lost.status();
    EXPECT_EQ(plan_->hits(), 1);
    rpc_sync((*c)[0], 1, &add, 1, 1);
  }
  expect_nothing_left(*c);
}

// Connections come back while answers with RRefs are being made: they will be sent, so their sender
// does not ask whether they have arrived, which would void them.
TEST_P(RRefFaults, AnswersInTheMakingAreNotAskedAbout) {
  constexpr int kCalls = fewer(3000, 400);
  constexpr int kCutEach = 4;
  auto c = make({.size = 2, .plan = plan_});
  const auto expect_an_answer = [](const Future<IntRef>& made) {
    const auto answer = made.try_wait();
    ASSERT_TRUE(answer.ok()) << answer.status();
  };
  std::optional<Future<IntRef>> last;
  for (int i = 0; i < kCalls; ++i) {
    if (i % kCutEach == 0) {
      plan_->add(
          {.fault = Fault::kCut, .kind = FrameKind::kResponse, .from = "worker1", .times = 1});
    }
    auto made = rpc_async((*c)[0], 1, {.retry = Retry::kAtMostOnce}, &make_here, i);
    if (last.has_value()) {
      ASSERT_NO_FATAL_FAILURE(expect_an_answer(*last));
    }
    last = std::move(made);
  }
  ASSERT_NO_FATAL_FAILURE(expect_an_answer(*last));
  EXPECT_GE(plan_->hits(), kCalls / kCutEach - 1);
  plan_->clear();
  last.reset();
  expect_nothing_left(*c);
}

// ---- deaths ------------------------------------------------------------------------------------

TEST_P(RRefFaults, OwnerLostAtOnceWhenItLeaves) {
  auto c = make({.size = 3, .fail_on_leak = false});
  {
    auto x = remote((*c)[0], 1, &add, 1, 2);
    auto held = remote((*c)[0], 1, kOwnWaitAtGate);
    EXPECT_EQ(x.to_here(), 3);
    lib_.hold->wait_arrived(1);
    const auto waiting = held.to_here_async();
    const auto far = rpc_async((*c)[0], 2, &fetch, held);
    eventually((*c)[1], [&] { return counter((*c)[1], "rref_parked_uses") == 2; }, "parked");
    lib_.hold->open();
    (*c)[1] = Worker();  // without a word
    for (const auto& f : {waiting, far}) {
      const auto value = f.try_wait();
      if (value.ok()) continue;  // its function was faster
      EXPECT_EQ(error_kind(value.status()), ErrorKind::kPeerLost) << value.status();
    }
    expect_error(x.try_to_here().status(), ErrorKind::kPeerLost, {"'worker1'"});
    // At once or, when worker 1's goodbye was faster than the group's list, at the first use.
    expect_error(error_of([&] { remote((*c)[0], 1, &add, 1, 2).to_here(); }), ErrorKind::kPeerLost,
                 {"worker1"});
    expect_error(try_rpc_sync((*c)[0], 2, &fetch, x).status(), ErrorKind::kPeerLost, {"worker1"});
  }
  for (size_t i : {0, 2}) expect_nothing_left_at((*c)[i]);
  c->forget();
}

class RRefDeaths : public RRefFaults {
 protected:
  std::unique_ptr<Cluster> make_mortal() {
    ClusterOptions o{.size = 3, .net = GetParam(), .library = lib_.library, .lease = 1s};
    o.adjust = [this](int i, JoinOptions* j) {
      stores_[static_cast<size_t>(i)] = hear_interrupts(j);
      j->services.push_back(rref_service());
      j->log_level = Severity::kOff;
    };
    return std::make_unique<Cluster>(std::move(o));
  }
  void kill(Cluster* c, int i) {
    stores_[static_cast<size_t>(i)]->interrupt();
    c->network()->kill(absl::StrCat("worker", i));
  }
  std::vector<std::shared_ptr<Store>> stores_{3};
};

// RREF-8: a holder that dies without a word.
TEST_P(RRefDeaths, AHoldersForksAreFreed) {
  auto c = make_mortal();
  IntRef held_by_2;
  {
    auto table = remote<Table>((*c)[2], 1, 5);
    held_by_2 = IntRef::local((*c)[1], 1);
    EXPECT_EQ(table.rpc_sync(&Table::rows), 5);
    EXPECT_EQ(counter((*c)[1], "rref_forks"), 1);
    kill(c.get(), 2);
    eventually((*c)[1], [&] { return counter((*c)[1], "rref_forks") == 0; }, "freed");
    eventually((*c)[1], [] { return Table::alive() == 0; }, "released");
  }
  held_by_2.reset();
  expect_nothing_left_at((*c)[1]);
  c->shutdown_all({.deadline = 10s});
}

TEST_P(RRefDeaths, DEF_32_the_owners_death_ends_the_wait_for_a_creation) {
  auto c = make_mortal();
  {
    const auto held = remote((*c)[0], 1, kOwnWaitAtGate);
    const Future<void> created = held.creation();
    lib_.hold->wait_arrived(1);
    kill(c.get(), 1);
    expect_error(created.try_wait(), ErrorKind::kPeerLost, {"worker1"});
    lib_.hold->open();
    expect_error(held.creation().try_wait(), ErrorKind::kPeerLost, {"worker1"});
  }
  for (size_t i : {0, 2}) expect_nothing_left_at((*c)[i]);
  c->shutdown_all({.deadline = 10s});
}

// X12 with RRefs: the others leave in time and name who is missing.
TEST_P(RRefDeaths, X12_an_owner_and_a_holder_die_before_shutdown) {
  auto c = make_mortal();
  {
    auto theirs = remote((*c)[0], 2, &add, 1, 2);
    auto mine = IntRef::local((*c)[0], 5);
    EXPECT_EQ(rpc_sync((*c)[0], 2, &fetch, mine), 5);
    EXPECT_EQ(rpc_sync((*c)[0], 1, &fetch, theirs), 3);
    const auto waiting = remote((*c)[0], 2, kOwnWaitAtGate).to_here_async();
    lib_.hold->wait_arrived(1);
    kill(c.get(), 2);
    lib_.hold->open();
    const Status lost = waiting.try_wait().status();
    EXPECT_EQ(error_kind(lost), ErrorKind::kPeerLost) << lost;
    expect_error(theirs.try_to_here().status(), ErrorKind::kPeerLost, {"worker2"});
    const auto results = c->shutdown_all({.deadline = 15s});
    for (size_t i : {0, 1}) {
      expect_error(results[i].status, ErrorKind::kPeerLost, {"worker2"});
    }
  }
  expect_nothing_left_at((*c)[1]);
}

INSTANTIATE_TEST_SUITE_P(Nets, RRefFaults, ::testing::ValuesIn(nets()), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, RRefDeaths, ::testing::Values(Net::kInproc), net_name);

}  // namespace
}  // namespace weft::testing
