// Leaving, groups and broken connections: RPC-49, RPC-123 to RPC-130 of the inventory, X1 and X12.

#include <atomic>
#include <map>

#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/rpc/group.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/mortal_store.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RpcShutdown : public ::testing::TestWithParam<Net> {
 protected:
  ClusterOptions options(int size) {
    return {.size = size, .net = GetParam(), .library = test_.library};
  }
  // With faults that the test may put into the traffic.
  ClusterOptions faulty(int size) {
    ClusterOptions o = options(size);
    o.adjust = [plan = plan_](int, JoinOptions* j) {
      j->transport = faulty_transport(j->transport, plan);
    };
    return o;
  }
  TestLibrary test_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(11);
};
class RpcShutdownInproc : public RpcShutdown {};

TEST_P(RpcShutdown, RPC_123_wait_all_workers_dense) {
  Cluster c(options(3));
  std::vector<Future<int64_t>> under_way;
  for (int64_t i = 0; i < 20; ++i)
    under_way.push_back(rpc_async(c[i % 3], (i + 1) % 3, &add, i, 1));
  c.shutdown();
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(under_way[static_cast<size_t>(i)].wait(), i + 1);
}

TEST_P(RpcShutdown, RPC_124_graceful_shutdown_with_uneven_workload) {
  Cluster c(options(3));
  // A chain that is still nesting while all workers shut down.
  Future<int64_t> busy =
      rpc_async(c[0], 1, &ring_async, std::vector<std::string>{"worker1", "worker2"}, 50);
  Future<int64_t> held = rpc_async(c[0], 2, kWaitAtGate, 9);
  test_.gate->wait_arrived(1);
  auto runtime = make_system_runtime();
  const auto opener = runtime->spawn("open", [this, busy] {
    busy.try_wait().status().IgnoreError();
    test_.gate->open();
  });
  c.shutdown();
  EXPECT_EQ(busy.wait(), 50);
  EXPECT_EQ(held.wait(), 9);
}

TEST_P(RpcShutdown, RPC_125_shutdown_followed_by_rpc) {
  Cluster c(options(2));
  Future<int64_t> before = rpc_async(c[0], 1, &add, 1, 2);
  c.shutdown();
  EXPECT_EQ(before.wait(), 3);
  const Status s = try_rpc_sync(c[0], 1, &add, 1, 2).status();
  EXPECT_EQ(error_kind(s), ErrorKind::kState) << s;
  EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(RpcShutdown, RPC_126_local_shutdown_with_rpc) {
  Cluster c(options(2));
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  Future<int64_t> pending = rpc_async(c[0], 1, kWaitAtGate, 1);
  test_.gate->wait_arrived(1);
  EXPECT_TRUE(c[0].shutdown({.graceful = false}).status.ok());
  EXPECT_EQ(error_kind(pending.try_wait().status()), ErrorKind::kState);
  // The other learns that it left, instead of guessing.
  const Status s = try_rpc_sync(c[1], 0, &add, 1, 2).status();
  EXPECT_EQ(error_kind(s), ErrorKind::kPeerLost) << s;
  test_.gate->open();
  c[1].shutdown({.graceful = false});
  c.forget();
}

TEST_P(RpcShutdown, RPC_127_shutdown_errors_and_RPC_128_wait_all_workers_timeout) {
  Cluster c(options(2));
  // worker1 never calls shutdown: worker0 gives up at its deadline, names it, and is torn down.
  const ShutdownResult result = c[0].shutdown({.deadline = 300ms});
  EXPECT_EQ(error_kind(result.status), ErrorKind::kDeadline) << result.status;
  EXPECT_NE(std::string(result.status.message()).find("'worker1'"), std::string::npos)
      << result.status;
  ASSERT_EQ(result.workers.size(), 2u);
  EXPECT_EQ(result.workers[1].outcome, ShutdownResult::Outcome::kMissing);
  EXPECT_TRUE(c[0].is_shut_down());
  EXPECT_EQ(c[0].debug_info().at("connections"), 0);
  c[1].shutdown({.graceful = false});
  c.forget();
}

TEST_P(RpcShutdown, RPC_128_wait_all_workers_timeout_is_idempotent) {
  Cluster c(options(2));
  const ShutdownResult first = c[0].shutdown({.deadline = 100ms});
  const ShutdownResult second = c[0].shutdown();
  EXPECT_EQ(first.status, second.status);
  c[1].shutdown({.graceful = false});
  c.forget();
}

TEST_P(RpcShutdown, ShutdownFromAHandlerIsRefused) {
  TestLibrary t;
  t.library.def("leave", [](CallContext& context) {
    return std::string(context.worker().shutdown().status.message());
  });
  ClusterOptions o = options(1);
  o.library = t.library;
  Cluster c(o);
  const std::string text = rpc_sync(c[0], 0, FunctionRef<std::string()>{"test.leave"});
  EXPECT_NE(text.find("one of its own handlers"), std::string::npos) << text;
}

TEST_P(RpcShutdown, ShutdownFromTwoThreadsGivesOneResult) {
  Cluster c(options(1));
  auto runtime = make_system_runtime();
  ShutdownResult a;
  ShutdownResult b;
  {
    const auto one = runtime->spawn("one", [&] { a = c[0].shutdown(); });
    const auto two = runtime->spawn("two", [&] { b = c[0].shutdown(); });
  }
  EXPECT_TRUE(a.status.ok()) << a.status;
  EXPECT_EQ(a.status, b.status);
  c.forget();
}

TEST_P(RpcShutdown, X12_a_stuck_handler_is_named_and_does_not_hold_the_worker) {
  Cluster c(options(2));
  Future<int64_t> stuck = rpc_async(c[0], 1, kWaitAtGate, 1);
  test_.gate->wait_arrived(1);
  const auto results = c.shutdown_all({.deadline = 500ms});
  EXPECT_EQ(error_kind(results[1].status), ErrorKind::kDeadline) << results[1].status;
  EXPECT_FALSE(stuck.try_wait().ok());
  test_.gate->open();
}

TEST_P(RpcShutdown, RPC_129_all_gather) {
  Cluster c(options(3));
  auto runtime = make_system_runtime();
  std::vector<std::vector<std::string>> got(3);
  std::vector<std::unique_ptr<Thread>> threads;
  for (size_t i = 0; i < 3; ++i) {
    threads.push_back(runtime->spawn(
        "gather", [&c, &got, i] { got[i] = all_gather(c[i], "from " + c[i].name()); }));
  }
  threads.clear();
  for (const auto& g : got) {
    EXPECT_EQ(g, (std::vector<std::string>{"from worker0", "from worker1", "from worker2"}));
  }
}

TEST_P(RpcShutdown, RPC_129_all_gather_timeout_names_who_is_missing) {
  Cluster c(options(3));
  try {
    all_gather(c[1], int64_t{1}, {}, 1s);
    ADD_FAILURE() << "nobody else reported";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kDeadline);
    EXPECT_NE(e.message().find("'worker0', 'worker2'"), std::string::npos) << e.what();
  }
}

TEST_P(RpcShutdown, RPC_130_rpc_barrier_all_subset_partial_and_multithreaded) {
  Cluster c(options(3));
  auto runtime = make_system_runtime();
  std::vector<std::unique_ptr<Thread>> threads;
  std::atomic<int> passed{0};
  for (size_t i = 0; i < 3; ++i) {
    for (int t = 0; t < 4; ++t) {
      threads.push_back(runtime->spawn("barrier", [&c, &passed, i] {
        barrier(c[i]);
        if (i < 2) barrier(c[i], {"worker0", "worker1"});
        barrier(c[i], {c[i].name()});
        ++passed;
      }));
    }
  }
  threads.clear();
  EXPECT_EQ(passed.load(), 12);
}

TEST_P(RpcShutdown, X1_calls_in_flight_at_a_cut_complete_once_and_later_ones_succeed) {
  Cluster c(faulty(2));
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  const WorkerInfo before = c[1].info();
  Future<int64_t> in_flight = rpc_async(c[0], 1, kWaitAtGate, 1);
  test_.gate->wait_arrived(1);
  // The next request is delivered, and then the connection breaks.
  const int cut = plan_->add(
      {.fault = Fault::kFailAfter, .kind = FrameKind::kRequest, .from = "worker0", .times = 1});
  Future<int64_t> breaks_it = rpc_async(c[0], 1, kWaitAtGate, 2);
  EXPECT_EQ(error_kind(in_flight.try_wait(20s).status()), ErrorKind::kMaybeExecuted);
  EXPECT_EQ(error_kind(breaks_it.try_wait(20s).status()), ErrorKind::kMaybeExecuted);
  EXPECT_EQ(plan_->hits(cut), 1);
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(rpc_sync(c[0], 1, &add, i, 1), i + 1);
  EXPECT_EQ(c[0].get_worker_info(1), before);
  EXPECT_EQ(c[0].debug_info().at("reconnects"), 1);
  test_.gate->open();
}

TEST_P(RpcShutdown, X1_a_call_issued_while_the_link_is_down_waits_for_the_reconnect) {
  Cluster c(faulty(2));
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  const int refuse =
      plan_->add({.fault = Fault::kFailBefore, .kind = FrameKind::kHello, .times = 3});
  plan_->add({.fault = Fault::kCut, .kind = FrameKind::kRequest, .from = "worker0", .times = 1});
  EXPECT_FALSE(try_rpc_sync(c[0], 1, {.deadline = 200ms}, kWaitAtGate, 1).ok());
  // Three dials are refused, the fourth succeeds, within the call's own deadline.
  EXPECT_EQ(rpc_sync(c[0], 1, {.deadline = 30s}, &add, 20, 22), 42);
  EXPECT_EQ(plan_->hits(refuse), 3);
  test_.gate->open();
}

TEST_P(RpcShutdown, X1_twenty_cuts_in_a_row) {
  Cluster c(faulty(2));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(rpc_sync(c[0], 1, &add, i, 1), i + 1);
    plan_->add(
        {.fault = Fault::kFailAfter, .kind = FrameKind::kRequest, .from = "worker0", .times = 1});
    // Sent, the answer's way is cut: executed at most once, and answered, because it may be
    // retried.
    EXPECT_EQ(rpc_sync(c[0], 1, {.deadline = 30s, .retry = Retry::kAtMostOnce},
                       on("counter", &Counter::add), 1),
              101 + i);
    plan_->clear();
  }
  // An answer may still come through before its connection breaks; the next call finds it broken.
  EXPECT_EQ(rpc_sync(c[0], 1, {.retry = Retry::kAtMostOnce}, &add, 1, 2), 3);
  EXPECT_EQ(plan_->hits(), 20);
  EXPECT_GE(c[0].debug_info().at("reconnects"), 1);
}

TEST_P(RpcShutdown, X1_a_cut_in_the_middle_of_a_bulk_transfer) {
  Cluster c(faulty(2));
  const at::Tensor x = at::arange(1 << 20);
  plan_->add(
      {.fault = Fault::kCut, .kind = FrameKind::kChunk, .from = "worker0", .skip = 3, .times = 1});
  const auto got = try_rpc_sync(c[0], 1, {.deadline = 30s, .retry = Retry::kAtMostOnce}, &echo, x);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_TRUE(at::equal(*got, x));
  // And of a response.
  plan_->add(
      {.fault = Fault::kCut, .kind = FrameKind::kChunk, .from = "worker1", .skip = 2, .times = 1});
  const auto again =
      try_rpc_sync(c[0], 1, {.deadline = 30s, .retry = Retry::kAtMostOnce}, &echo, x);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(at::equal(*again, x));
}

TEST_P(RpcShutdown, ARetriedCallExecutesAtMostOnceWhateverIsRepeated) {
  Cluster c(faulty(2));
  plan_->add({.fault = Fault::kDuplicate, .kind = FrameKind::kRequest, .from = "worker0"});
  for (int64_t i = 1; i <= 20; ++i) {
    EXPECT_EQ(rpc_sync(c[0], 1, {.retry = Retry::kAtMostOnce}, on("counter", &Counter::add), 1),
              100 + i);
  }
  plan_->clear();
  // Behind the last repeated request on the same lane: all of them have been seen when this is
  // answered.
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(c[1].debug_info().at("requests_repeated"), 20);
}

TEST_P(RpcShutdown, OddBytesCostTheConnectionAndNothingElse) {
  Cluster c(faulty(2));
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  plan_->add(
      {.fault = Fault::kTruncate, .kind = FrameKind::kRequest, .from = "worker0", .times = 1});
  const Status s = try_rpc_sync(c[0], 1, {.deadline = 20s}, &echo, at::ones({1000})).status();
  EXPECT_FALSE(s.ok());
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  EXPECT_EQ(rpc_sync(c[1], 0, &add, 1, 2), 3);
}

TEST_P(RpcShutdownInproc, RPC_49_handle_send_exceptions_and_X12_a_dead_peer) {
  ClusterOptions o = options(3);
  o.lease = 1s;
  std::vector<std::shared_ptr<Store>> stores(3);
  o.adjust = [&stores](int i, JoinOptions* j) {
    stores[static_cast<size_t>(i)] = hear_interrupts(j);
  };
  Cluster c(o);
  EXPECT_EQ(rpc_sync(c[0], 2, &add, 1, 2), 3);
  stores[2]->interrupt();
  c.network()->kill("worker2");
  // Sent before the loss of the connection was known: it may have run. After that: the peer is
  // lost, as soon as its lease is over.
  const Status first = try_rpc_sync(c[0], 2, {.deadline = 20s}, &add, 1, 2).status();
  EXPECT_TRUE(error_kind(first) == ErrorKind::kMaybeExecuted ||
              error_kind(first) == ErrorKind::kPeerLost)
      << first;
  const Status s = try_rpc_sync(c[0], 2, {.deadline = 20s}, &add, 1, 2).status();
  EXPECT_EQ(error_kind(s), ErrorKind::kPeerLost) << s;
  const auto results = c.shutdown_all({.deadline = 10s});
  for (size_t i : {0, 1}) {
    EXPECT_EQ(error_kind(results[i].status), ErrorKind::kPeerLost) << results[i].status;
    EXPECT_NE(std::string(results[i].status.message()).find("worker2"), std::string::npos);
  }
}

TEST_P(RpcShutdownInproc, BothSidesDiallingAtOnceEndWithOneConnection) {
  Cluster c(options(2));
  for (int round = 0; round < 20; ++round) {
    std::vector<Future<int64_t>> both;
    for (int i = 0; i < 10; ++i) {
      both.push_back(rpc_async(c[0], 1, {.retry = Retry::kAtMostOnce}, &add, i, 1));
      both.push_back(rpc_async(c[1], 0, {.retry = Retry::kAtMostOnce}, &add, i, 1));
    }
    for (auto& f : both) EXPECT_TRUE(f.try_wait().ok()) << f.try_wait().status();
    c.network()->cut("worker0", "worker1");
  }
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcShutdownInproc, ::testing::Values(Net::kInproc), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, RpcShutdown, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
