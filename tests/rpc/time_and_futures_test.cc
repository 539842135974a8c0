// Time and futures of calls: RPC-52 to RPC-56, RPC-60 to RPC-84 of the inventory, and X14.

#include <atomic>
#include <limits>
#include <stdexcept>

#include "ATen/TensorOperators.h"
#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/forwarding_runtime.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

const FunctionRef<int64_t()> kWaitForCancel{"test.wait_for_cancel"};

class RpcFutures : public ::testing::TestWithParam<Net> {
 protected:
  Cluster make(int size = 2) {
    return Cluster({.size = size, .net = GetParam(), .library = test_.library});
  }
  TestLibrary test_;
};
class RpcTime : public RpcFutures {};

TEST_P(RpcTime, RPC_52_default_timeout_used) {
  Cluster c = make();
  c[0].set_rpc_timeout(50ms);
  const Future<int64_t> late = rpc_async(c[0], 1, kWaitForCancel);
  EXPECT_EQ(error_kind(late.try_wait().status()), ErrorKind::kDeadline);
  // A change affects later calls only.
  Future<int64_t> short_one = rpc_async(c[0], 1, kWaitForCancel);
  c[0].set_rpc_timeout(kInfinite);
  EXPECT_EQ(error_kind(short_one.try_wait().status()), ErrorKind::kDeadline);
  EXPECT_EQ(c[0].rpc_timeout(), absl::InfiniteDuration());
}

TEST_P(RpcTime, RPC_53_rpc_timeouts) {
  Cluster c = make();
  // Shorter than the default, and longer.
  EXPECT_EQ(error_kind(try_rpc_sync(c[0], 1, {.deadline = 50ms}, kWaitForCancel).status()),
            ErrorKind::kDeadline);
  c[0].set_rpc_timeout(50ms);
  Future<int64_t> f = rpc_async(c[0], 1, {.deadline = 60s}, kWaitAtGate, 5);
  EXPECT_EQ(error_kind(try_rpc_sync(c[0], 1, kWaitForCancel).status()), ErrorKind::kDeadline);
  EXPECT_FALSE(f.done() && f.has_error());
  test_.gate->open();
  EXPECT_EQ(f.wait(), 5);
}

TEST_P(RpcTime, RPC_54_set_and_get_default_rpc_timeout) {
  Cluster c = make();
  EXPECT_EQ(c[0].rpc_timeout(), absl::Seconds(60));
  c[0].set_rpc_timeout(2500us);
  EXPECT_EQ(c[0].rpc_timeout(), absl::Microseconds(2500));
  EXPECT_THROW(c[0].set_rpc_timeout(0s), Error);
  EXPECT_THROW(c[0].set_rpc_timeout(-1s), Error);
}

TEST_P(RpcTime, RPC_55_rpc_builtin_timeout) {
  // Injected: the requests never arrive.
  auto faults = std::make_shared<FaultPlan>(7);
  ClusterOptions o{.size = 2, .net = GetParam(), .library = test_.library};
  o.adjust = [&faults](int, JoinOptions* j) {
    j->transport = faulty_transport(j->transport, faults);
  };
  Cluster c(o);
  const FunctionRef<at::Tensor(at::Tensor, at::Tensor)> add{"aten::mul.Tensor"};
  EXPECT_EQ(rpc_sync(c[0], 1, add, at::ones({2}), at::ones({2})).numel(), 2);
  faults->add({.fault = Fault::kDrop, .kind = FrameKind::kRequest, .from = "worker0"});
  EXPECT_EQ(
      error_kind(
          try_rpc_sync(c[0], 1, {.deadline = 100ms}, add, at::ones({2}), at::ones({2})).status()),
      ErrorKind::kDeadline);
  faults->clear();
  EXPECT_EQ(rpc_sync(c[0], 1, add, at::ones({2}), at::ones({2})).numel(), 2);
}

TEST_P(RpcTime, RPC_56_rpc_script_timeout) {
  Cluster c = make();
  const Status s = try_rpc_sync(c[0], 1, {.deadline = 100ms}, kWaitForCancel).status();
  EXPECT_EQ(s.code(), absl::StatusCode::kDeadlineExceeded) << s;
  EXPECT_NE(std::string(s.message()).find("'test.wait_for_cancel' on 'worker1'"), std::string::npos)
      << s;
  // The handler learns of it, by the cancel or by its own deadline.
  c.shutdown();
  EXPECT_EQ(test_.cancelled->load(), 1);
}

TEST_P(RpcTime, X14_zero_and_negative_durations_fail_without_sending) {
  Cluster c = make();
  const int64_t before = c[0].debug_info().at("calls_issued");
  for (const Timeout& t : {Timeout(0s), Timeout(-2s), Timeout(absl::ZeroDuration())}) {
    const Status s = try_rpc_sync(c[0], 1, {.deadline = t}, &add, 1, 2).status();
    EXPECT_EQ(error_kind(s), ErrorKind::kDeadline) << s;
  }
  EXPECT_EQ(c[0].debug_info().at("calls_issued"), before);
}

TEST_P(RpcTime, X14_only_the_named_constant_is_infinite_and_500us_expires) {
  Cluster c = make();
  EXPECT_EQ(rpc_sync(c[0], 1, {.deadline = kInfinite}, &remaining_seconds),
            std::numeric_limits<double>::infinity());
  EXPECT_EQ(error_kind(try_rpc_sync(c[0], 1, {.deadline = 500us}, kWaitForCancel).status()),
            ErrorKind::kDeadline);
}

TEST_P(RpcTime, X14_a_nested_call_has_no_more_time_than_its_caller) {
  Cluster c = make();
  const double nested = rpc_sync(c[0], 1, {.deadline = 10s}, &nested_remaining_seconds, "worker0");
  EXPECT_LE(nested, 10.0);
  EXPECT_GT(nested, 0.0);
}

// The callee may see the deadline first, where the caller's machine is busy.
TEST_P(RpcTime, RPC_53_what_a_handler_gives_up_at_its_deadline_is_a_deadline) {
  ClusterOptions o{.size = 2, .net = GetParam(), .library = test_.library};
  o.adjust = [](int index, JoinOptions* j) {
    if (index == 0) j->runtime = std::make_shared<LateTimers>(j->runtime, absl::Seconds(2));
  };
  Cluster c(std::move(o));
  // Long enough for the handler to start, and well before the late timer of the caller.
  const Status s = try_rpc_sync(c[0], 1, {.deadline = 500ms},
                                FunctionRef<int64_t()>{"test.cancelled_at_its_deadline"})
                       .status();
  EXPECT_EQ(error_kind(s), ErrorKind::kDeadline) << s;
  EXPECT_NE(std::string(s.message()).find("exceeded on worker 'worker1'"), std::string::npos) << s;
  EXPECT_NE(std::string(s.message()).find("the handler has given up"), std::string::npos) << s;
}

TEST_P(RpcTime, CancelReachesTheHandlerAndItsNestedCalls) {
  Cluster c = make();
  Future<int64_t> f = rpc_async(c[0], 1, kWaitForCancel);
  // The handler is there once a later call on the same lane has been answered.
  rpc_sync(c[0], 1, &nothing);
  EXPECT_TRUE(f.cancel());
  EXPECT_FALSE(f.cancel());
  EXPECT_EQ(error_kind(f.try_wait().status()), ErrorKind::kCancelled);
  c.shutdown();
  EXPECT_EQ(test_.cancelled->load(), 1);
}

TEST_P(RpcFutures, RPC_60_future_wait_twice) {
  Cluster c = make();
  Future<int64_t> f = rpc_async(c[0], 1, &add, 1, 2);
  EXPECT_EQ(f.wait(), 3);
  EXPECT_EQ(f.wait(), 3);
  Future<int64_t> bad = rpc_async(c[0], 1, &throw_error, "runtime");
  EXPECT_THROW(bad.wait(), Error);
  EXPECT_THROW(bad.wait(), Error);
}

TEST_P(RpcFutures, RPC_61_callback_simple_and_RPC_63_callback_chain) {
  Cluster c = make();
  EXPECT_EQ(rpc_async(c[0], 1, &add, 1, 2).then([](int64_t v) { return v + 1; }).wait(), 4);
  Future<int64_t> f = rpc_async(c[0], 1, &add, 0, 0);
  for (int i = 0; i < 20; ++i) f = f.then([](int64_t v) { return v + 1; });
  EXPECT_EQ(f.wait(), 20);
}

TEST_P(RpcFutures, RPC_62_callback_multi) {
  Cluster c = make();
  Future<int64_t> f = rpc_async(c[0], 1, &add, 1, 2);
  std::atomic<int> runs{0};
  std::vector<Future<int64_t>> children;
  for (int64_t i = 0; i < 20; ++i) {
    children.push_back(f.then([&runs, i](int64_t v) {
      ++runs;
      return v + i;
    }));
  }
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(children[static_cast<size_t>(i)].wait(), 3 + i);
  EXPECT_EQ(runs.load(), 20);
}

TEST_P(RpcFutures, RPC_64_callback_none) {
  Cluster c = make();
  EXPECT_EQ(rpc_async(c[0], 1, &nothing).then([] { return 7; }).wait(), 7);
}

TEST_P(RpcFutures, RPC_65_callback_with_error) {
  Cluster c = make();
  Future<int64_t> bad = rpc_async(c[0], 1, &throw_error, "out_of_range");
  // Into a callback that takes the future, past one that takes the value, and out of one that
  // throws.
  EXPECT_EQ(bad.then([](Future<int64_t> f) { return f.has_error() ? 1 : 0; }).wait(), 1);
  EXPECT_EQ(bad.then([](int64_t v) { return v; }).try_wait().status().code(),
            absl::StatusCode::kOutOfRange);
  const Status s =
      rpc_async(c[0], 1, &add, 1, 2)
          .then([](int64_t) -> int64_t { throw std::invalid_argument("from the callback"); })
          .try_wait()
          .status();
  EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(RpcFutures, RPC_66_callback_wrong_args_fail_only_the_child) {
  Cluster c = make();
  Future<int64_t> f = rpc_async(c[0], 1, &add, 1, 2);
  Future<int64_t> child = f.then([](int64_t) -> int64_t { throw 42; });
  EXPECT_FALSE(child.try_wait().ok());
  EXPECT_EQ(f.wait(), 3);
}

TEST_P(RpcFutures, RPC_67_callback_in_rpc) {
  Cluster c = make();
  EXPECT_EQ(rpc_async(c[0], 1, &add, 1, 2)
                .then([&c](int64_t v) { return rpc_async(c[0], 1, &add, v, v); })
                .wait(),
            6);
  EXPECT_EQ(rpc_async(c[0], 1, &add, 1, 2)
                .then([&c](int64_t v) { return rpc_sync(c[0], 1, &add, v, 1); })
                .wait(),
            4);
}

TEST_P(RpcFutures, RPC_68_future_nested_callback) {
  Cluster c = make();
  Promise<int64_t> inner;
  Future<int64_t> inner_future = inner.future();
  Future<int64_t> outer = rpc_async(c[0], 1, &add, 1, 2).then([inner_future](int64_t v) {
    return inner_future.then([v](int64_t w) { return v * w; });
  });
  inner.set_value(5);
  EXPECT_EQ(outer.wait(), 15);
}

TEST_P(RpcFutures, RPC_69_add_done_callback) {
  Cluster c = make();
  Promise<int64_t> seen;
  Future<int64_t> f = seen.future();
  rpc_async(c[0], 1, &add, 1, 2).add_done_callback([&seen](Future<int64_t> done) {
    seen.set_value(done.wait());
  });
  EXPECT_EQ(f.wait(), 3);
}

TEST_P(RpcFutures, RPC_70_mark_future_twice) {
  Promise<int64_t> p;
  p.set_value(1);
  EXPECT_THROW(p.set_value(2), Error);
  EXPECT_FALSE(p.try_set(int64_t{3}));
  EXPECT_EQ(p.future().wait(), 1);
}

TEST_P(RpcFutures, RPC_71_future_done_and_done_exception) {
  Cluster c = make();
  Future<int64_t> f = rpc_async(c[0], 1, kWaitAtGate, 1);
  test_.gate->wait_arrived(1);
  EXPECT_FALSE(f.done());
  test_.gate->open();
  f.wait();
  EXPECT_TRUE(f.done());
  EXPECT_FALSE(f.has_error());
  Future<int64_t> bad = rpc_async(c[0], 1, &throw_error, "int");
  EXPECT_FALSE(bad.try_wait().ok());
  EXPECT_TRUE(bad.has_error());
}

TEST_P(RpcFutures, RPC_73_wait_all) {
  Cluster c = make();
  std::vector<Future<int64_t>> all;
  for (int64_t i = 0; i < 10; ++i) all.push_back(rpc_async(c[0], 1, &add, i, 1));
  const std::vector<int64_t> values = when_all(all).wait();
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(values[i], static_cast<int64_t>(i) + 1);
}

TEST_P(RpcFutures, RPC_74_wait_all_timeout) {
  Cluster c = make();
  auto both = when_all(std::vector<Future<int64_t>>{rpc_async(c[0], 1, &add, 1, 2),
                                                    rpc_async(c[0], 1, kWaitAtGate, 1)});
  EXPECT_EQ(error_kind(both.try_wait(50ms).status()), ErrorKind::kDeadline);
  test_.gate->open();
  EXPECT_EQ(both.wait(), (std::vector<int64_t>{3, 1}));
}

TEST_P(RpcFutures, RPC_75_wait_all_raise_in_user_func_and_RPC_77_wait_all_exit_early) {
  Cluster c = make();
  // The first error wins at once: the other call is still waiting at the gate.
  auto both = when_all(std::vector<Future<int64_t>>{
      rpc_async(c[0], 1, kWaitAtGate, 1), rpc_async(c[0], 1, &throw_error, "out_of_range")});
  EXPECT_EQ(both.try_wait().status().code(), absl::StatusCode::kOutOfRange);
  test_.gate->open();
}

TEST_P(RpcFutures, RPC_76_wait_all_raise_in_body) {
  Cluster c = make();
  std::vector<Future<int64_t>> group;
  EXPECT_THROW(
      {
        group.push_back(rpc_async(c[0], 1, &add, 1, 2));
        throw std::runtime_error("in the body");
      },
      std::runtime_error);
  EXPECT_EQ(when_all(group).wait(), (std::vector<int64_t>{3}));
}

TEST_P(RpcFutures, RPC_78_wait_all_with_partial_exception) {
  Cluster c = make();
  const auto all = collect_all(std::vector<Future<int64_t>>{rpc_async(c[0], 1, &add, 1, 2),
                                                            rpc_async(c[0], 1, &throw_error, "int"),
                                                            rpc_async(c[0], 1, &add, 3, 4)})
                       .wait();
  EXPECT_EQ(all[0].wait(), 3);
  EXPECT_TRUE(all[1].has_error());
  EXPECT_EQ(all[2].wait(), 7);
  EXPECT_LT(when_any(all).wait(), 3u);
}

TEST_P(RpcFutures, RPC_79_async_function_simple_chained_nested) {
  Cluster c = make(3);
  EXPECT_EQ(rpc_sync(c[0], 1, &later_add, "worker2", 1, 2), 4);
  EXPECT_EQ(rpc_sync(c[0], 1, &ring_async, std::vector<std::string>{"worker1", "worker2"}, 6), 6);
}

TEST_P(RpcFutures, RPC_80_async_function_multi_fanout) {
  Cluster c = make(3);
  EXPECT_EQ(rpc_sync(c[0], 1, &fan_out,
                     std::vector<std::string>{"worker0", "worker1", "worker2", "worker2"}, 10),
            44);
}

TEST_P(RpcFutures, RPC_81_async_function_raise) {
  Cluster c = make();
  const Status s = try_rpc_sync(c[0], 1, &async_raise, "later").status();
  EXPECT_EQ(s.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(std::string(s.message()), "later");
}

TEST_P(RpcFutures, RPC_82_async_function_wrong_return_type_and_RPC_84_return_future) {
  // A handler that returns a Future is an async handler: its caller gets the value (RPC-84). A
  // future of what cannot travel does not compile (tests/compile_fail).
  Cluster c = make();
  static_assert(std::is_same_v<decltype(rpc_sync(c[0], 1, &async_raise, "x")), int64_t>);
  EXPECT_EQ(rpc_async(c[0], 1, &later_add, "worker0", 1, 1).wait(), 3);
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcTime, ::testing::ValuesIn(nets()), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, RpcFutures, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
