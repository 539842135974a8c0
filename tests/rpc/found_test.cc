// Defects that a hostile reading of calls and members found (DEF of the inventory), each by its
// trigger.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/from_blob.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/gate.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// What other calls write into while a result of theirs is on its way.
class Weights {
 public:
  explicit Weights(int64_t n) : w_(at::ones({n})) {}
  at::Tensor get() { return w_; }
  at::Tensor peek() const { return w_; }
  at::Tensor part() { return w_.narrow(0, 0, w_.numel() - 1); }
  int64_t add(int64_t n) {
    w_.add_(n);
    return ++adds_;
  }

 private:
  at::Tensor w_;
  int64_t adds_ = 0;
};

// Answers its calls in pairs: none before the second has come.
class Pairs {
 public:
  explicit Pairs(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  Future<int64_t> add(int64_t n) {
    waiting_.emplace_back();
    Future<int64_t> future = waiting_.back().future();
    sum_ += n;
    if (waiting_.size() == 2) {
      for (Promise<int64_t>& p : std::exchange(waiting_, {})) p.set_value(sum_);
    }
    return future;
  }
  // Its body lasts until end_body().
  Future<int64_t> body() {
    ++inside_;
    co_await end_.future();
    --inside_;
    co_return sum_;
  }
  int64_t inside() { return inside_; }
  void end_body() { end_.set_value(1); }
  int64_t hold(int64_t n) {
    gate_->arrive_and_wait();
    return n;
  }
  int64_t count(const at::Tensor& x) {
    ++counted_;
    return x.numel();
  }
  int64_t counted() const { return counted_; }

 private:
  const std::shared_ptr<Gate> gate_;
  std::vector<Promise<int64_t>> waiting_;
  Promise<int64_t> end_;
  int64_t sum_ = 0;
  int64_t inside_ = 0;
  std::atomic<int64_t> counted_{0};
};

class Found : public ::testing::TestWithParam<Net> {
 protected:
  Found() {
    test_.library.class_<Weights>("Weights")
        .def("get", &Weights::get)
        .def("peek", &Weights::peek)
        .def("part", &Weights::part)
        .def("add", &Weights::add);
    test_.library.instance("large", std::make_shared<Weights>(kMiB));
    test_.library.instance("small", std::make_shared<Weights>(8));
    test_.library.class_<Pairs>("Pairs")
        .def("add", &Pairs::add)
        .def("body", &Pairs::body)
        .def("inside", &Pairs::inside)
        .def("hold", &Pairs::hold)
        .def("count", &Pairs::count);
    test_.library.instance("pairs", pairs_);
    // Each on whatever thread tells a handler that its call is given up.
    started_->open();
    test_.library.def(
        "block_when_cancelled", [gate = test_.gate, started = started_](CallContext& context) {
          started->arrive_and_wait();
          auto promise = std::make_shared<Promise<int64_t>>(executor_of(context.worker()));
          context.on_cancel([gate, promise] {
            gate->arrive_and_wait();
            promise->try_set(make_error(ErrorKind::kCancelled, "given up"));
          });
          return promise->future();
        });
    test_.library.def("free_of", [](const at::Tensor& x) { return x.numel(); });
  }
  ClusterOptions options(int size) {
    return {.size = size, .net = GetParam(), .library = test_.library};
  }
  ClusterOptions faulty(int size, std::map<std::string, std::string> environment = {}) {
    ClusterOptions o = options(size);
    o.adjust = [plan = plan_, environment](int, JoinOptions* j) {
      j->transport = faulty_transport(j->transport, plan);
      if (!environment.empty())
        j->environment = Environment(environment.begin(), environment.end());
    };
    return o;
  }
  // The others learn of the worker that joined a dynamic group last a moment later.
  void wait_members(Cluster& c) {
    for (size_t i = 0; i < c.size(); ++i) {
      wait_until([&] { return counter(c[i], "members") == static_cast<int64_t>(c.size()); },
                 "members");
    }
  }
  // Until `done`, which other threads bring about.
  void wait_until(const std::function<bool()>& done, const char* what) {
    const absl::Time limit = runtime_->now() + absl::Seconds(30);
    const auto parker = runtime_->make_parker();
    while (!done()) {
      ASSERT_LT(runtime_->now(), limit) << what;
      parker->park_until(runtime_->now() + absl::Milliseconds(1));
    }
  }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::shared_ptr<Gate> started_ = std::make_shared<Gate>(runtime_);  // open: it counts
  TestLibrary test_;
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(5);
  std::shared_ptr<Pairs> pairs_ = std::make_shared<Pairs>(test_.gate);
};

// ---- 1: a graceful leave -----------------------------------------------------------------------

TEST_P(Found, DEF_1_a_worker_that_leaves_a_dynamic_group_lets_calls_end_first_both_ways) {
  ClusterOptions o = options(2);
  o.dynamic = true;
  Cluster c(o);
  wait_members(c);
  const Future<int64_t> ours = rpc_async(c[0], c[1].name(), kWaitAtGate, 1);
  const Future<int64_t> theirs = rpc_async(c[1], c[0].name(), kWaitAtGate, 2);
  test_.gate->wait_arrived(2);
  ShutdownResult left;
  {
    const auto leaving = runtime_->spawn("leave", [&] { left = c[0].shutdown(); });
    // Refused from the moment at which it begins to leave, on both sides, and nothing before fails.
    Status refused;
    wait_until(
        [&] {
          refused = try_rpc_sync(c[0], c[1].name(), &add, 1, 2).status();
          return !refused.ok();
        },
        "a worker that leaves makes calls");
    EXPECT_EQ(error_kind(refused), ErrorKind::kState) << refused;
    wait_until(
        [&] {
          refused = try_rpc_sync(c[1], c[0].name(), &add, 1, 2).status();
          return !refused.ok();
        },
        "a worker that leaves is called");
    EXPECT_EQ(error_kind(refused), ErrorKind::kState) << refused;
    EXPECT_FALSE(ours.done());
    EXPECT_FALSE(theirs.done());
    test_.gate->open();
  }
  EXPECT_TRUE(left.status.ok()) << left.status;
  EXPECT_EQ(ours.try_wait().value_or(0), 1) << ours.try_wait().status();
  EXPECT_EQ(theirs.try_wait().value_or(0), 2) << theirs.try_wait().status();
  c[1].shutdown();
  c.forget();
}

TEST_P(Found, DEF_1_what_a_call_under_way_needs_goes_on_and_large_answers_arrive) {
  test_.library.def("back", [gate = test_.gate](CallContext& context, std::string to) {
    gate->arrive_and_wait();
    return rpc_sync(context.worker(), to, &nested_add, context.worker().name(), 20, 22);
  });
  test_.library.def("make", [gate = test_.gate](int64_t n) {
    gate->arrive_and_wait();
    return at::ones({n});
  });
  ClusterOptions o = options(3);
  o.dynamic = true;
  Cluster c(o);
  wait_members(c);
  // worker0 -> worker1 -> worker0 -> worker1 while worker0 leaves.
  const Future<int64_t> around =
      rpc_async(c[0], c[1].name(), FunctionRef<int64_t(std::string)>{"test.back"}, c[0].name());
  std::vector<Future<at::Tensor>> large;
  for (size_t i = 1; i < 3; ++i) {
    large.push_back(
        rpc_async(c[i], c[0].name(), FunctionRef<at::Tensor(int64_t)>{"test.make"}, 8 * kMiB));
  }
  test_.gate->wait_arrived(3);
  ShutdownResult left;
  {
    const auto leaving = runtime_->spawn("leave", [&] { left = c[0].shutdown(); });
    wait_until([&] { return !try_rpc_sync(c[2], c[0].name(), &add, 1, 2).ok(); },
               "it does not leave");
    test_.gate->open();
  }
  EXPECT_TRUE(left.status.ok()) << left.status;
  EXPECT_EQ(around.try_wait().value_or(0), 42) << around.try_wait().status();
  for (const auto& one : large) {
    ASSERT_TRUE(one.try_wait().ok()) << one.try_wait().status();
    EXPECT_EQ(one.try_wait()->numel(), 8 * kMiB);
  }
  EXPECT_EQ(rpc_sync(c[1], c[2].name(), &add, 1, 2), 3);
  // The goodbye may reach worker1 after the shutdown has returned; until then it "is leaving".
  wait_until(
      [&] {
        const Status gone = try_rpc_sync(c[1], c[0].name(), &add, 1, 2).status();
        return error_kind(gone) == ErrorKind::kPeerLost;
      },
      "worker1 does not hear that worker0 has left");
  c[1].shutdown();
  c[2].shutdown();
  c.forget();
}

TEST_P(Found, DEF_1_two_that_leave_at_once_wait_for_each_other_and_not_for_ever) {
  ClusterOptions o = options(2);
  o.dynamic = true;
  Cluster c(o);
  wait_members(c);
  EXPECT_EQ(rpc_sync(c[0], c[1].name(), &add, 1, 2), 3);
  const Future<int64_t> ours = rpc_async(c[0], c[1].name(), kWaitAtGate, 1);
  test_.gate->wait_arrived(1);
  test_.gate->open();
  const auto results = c.shutdown_all({.deadline = 10s});
  for (const ShutdownResult& r : results) EXPECT_TRUE(r.status.ok()) << r.status;
  EXPECT_EQ(ours.try_wait().value_or(0), 1) << ours.try_wait().status();
}

// ---- 2: a result is a value --------------------------------------------------------------------

TEST_P(Found, DEF_2_a_result_is_what_it_was_when_its_method_returned) {
  Cluster c(faulty(2));
  const auto large = [](auto method) { return on("large", method); };
  double now = 1;
  const auto torn = [&](const Future<at::Tensor>& result) {
    // The next method runs while the result is on its way.
    EXPECT_GT(rpc_sync(c[0], 1, large(&Weights::add), 1), 0);
    const at::Tensor x = result.wait();
    const double expected = std::exchange(now, now + 1);
    return x.min().item<double>() != expected || x.max().item<double>() != expected;
  };
  for (int kind = 0; kind < 3; ++kind) {
    plan_->add({.fault = Fault::kDelay,
                .kind = FrameKind::kChunk,
                .from = "worker1",
                .times = 1,
                .delay = absl::Milliseconds(300)});
    const Future<at::Tensor> result = kind == 0   ? rpc_async(c[0], 1, large(&Weights::get))
                                      : kind == 1 ? rpc_async(c[0], 1, large(&Weights::peek))
                                                  : rpc_async(c[0], 1, large(&Weights::part));
    EXPECT_FALSE(torn(result)) << kind;
    plan_->clear();
  }
}

TEST_P(Found, DEF_2_an_answer_that_is_kept_is_what_it_was) {
  Cluster c(faulty(2));
  EXPECT_EQ(rpc_sync(c[1], 1, &add, 1, 2), 3);  // it is connected to itself
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  const int away =
      plan_->add({.fault = Fault::kFailBefore, .kind = FrameKind::kHello, .from = "worker0"});
  const int cut = plan_->add({.fault = Fault::kCut,
                              .kind = FrameKind::kResponse,
                              .from = "worker1",
                              .to = "worker0",
                              .times = 1});
  const Future<at::Tensor> result =
      rpc_async(c[0], 1, {.retry = Retry::kAtMostOnce}, on("small", &Weights::get));
  wait_until([&] { return plan_->hits(cut) > 0; }, "the answer was not cut off");
  EXPECT_EQ(rpc_sync(c[1], 1, on("small", &Weights::add), 1), 1);
  plan_->remove(away);
  const at::Tensor x = result.wait();
  EXPECT_EQ(x.max().item<double>(), 1) << "the answer that is sent again has changed";
}

TEST_P(Found, DEF_2_no_copy_when_asked_for_or_when_nobody_else_has_the_tensor) {
  // Where the bytes lie is seen on the callee's side: what was returned and what is sent are one.
  Library lib("borrow");
  auto w = std::make_shared<at::Tensor>(at::ones({kMiB}));
  lib.def("value", [w] { return *w; });
  lib.def("borrowed", [w] { return *w; }, {.results = TensorResults::kBorrow});
  lib.def("fresh", [] { return at::ones({kMiB}); });
  ClusterOptions o = faulty(2);
  o.library = std::move(lib);
  Cluster c(o);
  const auto writes_are_seen = [&](const char* name) {
    plan_->add({.fault = Fault::kDelay,
                .kind = FrameKind::kChunk,
                .from = "worker1",
                .times = 1,
                .delay = absl::Milliseconds(300)});
    const int64_t before = counter(c[1], "requests_served");
    const Future<at::Tensor> result =
        rpc_async(c[0], 1, FunctionRef<at::Tensor()>{std::string("borrow.") + name});
    wait_until([&] { return counter(c[1], "requests_served") == before + 1; }, name);
    w->add_(1);
    const at::Tensor x = result.wait();
    plan_->clear();
    return x.max().item<double>() == w->max().item<double>();
  };
  EXPECT_FALSE(writes_are_seen("value"));
  EXPECT_TRUE(writes_are_seen("borrowed"));
  EXPECT_EQ(rpc_sync(c[0], 1, FunctionRef<at::Tensor()>{"borrow.fresh"}).numel(), kMiB);
}

// ---- 3: what is over never starts --------------------------------------------------------------

TEST_P(Found, DEF_3_calls_whose_time_is_over_never_start) {
  Cluster c(options(2));
  const Future<int64_t> holds = rpc_async(c[0], 1, on("pairs", &Pairs::hold), 7);
  test_.gate->wait_arrived(1);
  std::vector<Future<int64_t>> late;
  for (int i = 0; i < 50; ++i) {
    late.push_back(
        rpc_async(c[0], 1, {.deadline = 100ms}, on("pairs", &Pairs::count), at::ones({4})));
  }
  for (const auto& call : late) {
    EXPECT_EQ(error_kind(call.try_wait().status()), ErrorKind::kDeadline)
        << call.try_wait().status();
  }
  // Behind the cancellation of the last.
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  test_.gate->open();
  EXPECT_EQ(holds.wait(), 7);
  EXPECT_EQ(rpc_sync(c[0], 1, on("pairs", &Pairs::count), at::ones({4})), 4);
  EXPECT_EQ(pairs_->counted(), 1) << "calls that were over have run";
}

TEST_P(Found, DEF_3_what_waits_for_a_handler_is_bounded_by_the_receive_budget) {
  Cluster c(faulty(2, {{"WEFT_RECEIVE_BUDGET", "8MiB"}}));
  const Future<int64_t> holds = rpc_async(c[0], 1, on("pairs", &Pairs::hold), 7);
  test_.gate->wait_arrived(1);
  std::vector<Future<int64_t>> calls;
  for (int i = 0; i < 20; ++i) {
    calls.push_back(rpc_async(c[0], 1, on("pairs", &Pairs::count), at::ones({kMiB / 4})));
  }
  int refused = 0;
  wait_until(
      [&] {
        refused = 0;
        for (const auto& call : calls) {
          if (call.done() && error_kind(call.try_wait().status()) == ErrorKind::kResource)
            ++refused;
        }
        return refused >= 12;
      },
      "20 MiB wait for a handler under a budget of 8");
  const int64_t waiting = counter(c[1], "receive_bytes");
  EXPECT_GE(waiting, 7 * kMiB);
  EXPECT_LE(waiting, 8 * kMiB);
  test_.gate->open();
  EXPECT_EQ(holds.wait(), 7);
  int served = 0;
  refused = 0;
  for (const auto& call : calls) {
    const Status s = call.try_wait().status();
    served += s.ok() ? 1 : 0;
    refused += error_kind(s) == ErrorKind::kResource ? 1 : 0;
  }
  EXPECT_EQ(served + refused, 20);
  EXPECT_GE(served, 7);
  EXPECT_EQ(counter(c[1], "receive_bytes"), 0) << "given back when the handlers had taken them";
}

TEST_P(Found, DEF_3_a_cancel_that_overtakes_the_last_chunk_counts) {
  Cluster c(faulty(2));
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  plan_->add({.fault = Fault::kDelay,
              .kind = FrameKind::kChunk,
              .from = "worker0",
              .times = 1,
              .delay = absl::Milliseconds(300)});
  Future<int64_t> call = rpc_async(c[0], 1, on("pairs", &Pairs::count), at::ones({kMiB}));
  wait_until([&] { return plan_->hits() > 0; }, "no chunk was sent");
  EXPECT_TRUE(call.cancel());
  // Behind it on the same lanes: when this is answered the first has been dealt with.
  EXPECT_EQ(rpc_sync(c[0], 1, on("pairs", &Pairs::count), at::ones({kMiB})), kMiB);
  EXPECT_EQ(pairs_->counted(), 1) << "a call that was cancelled has run";
}

// ---- 8: code of users on threads that serve others ------------------------------------------------

TEST_P(Found, DEF_8_on_cancel_may_block_without_holding_up_calls_or_deadlines) {
  Cluster c(options(2));
  const FunctionRef<int64_t()> blocks{"test.block_when_cancelled"};
  // By a cancel, which a poller or a thread that waits reads; and by the deadline, from the timer.
  Future<int64_t> cancelled = rpc_async(c[0], 1, blocks);
  started_->wait_arrived(1);  // a call that was cancelled before never starts
  cancelled.cancel();
  test_.gate->wait_arrived(1);
  EXPECT_EQ(try_rpc_sync(c[0], 1, {.deadline = 5s}, &add, 1, 2).value_or(0), 3)
      << "the poller runs the callback";
  const Future<int64_t> late = rpc_async(c[0], 1, {.deadline = 1s}, blocks);
  started_->wait_arrived(2);
  EXPECT_EQ(error_kind(late.try_wait(20s).status()), ErrorKind::kDeadline);
  test_.gate->wait_arrived(2);
  const Status after = try_rpc_sync(c[0], 1, {.deadline = 50ms}, kWaitAtGate, 1).status();
  EXPECT_EQ(error_kind(after), ErrorKind::kDeadline) << after;
  EXPECT_EQ(try_rpc_sync(c[1], 0, {.deadline = 5s}, &add, 1, 2).value_or(0), 3);
  test_.gate->open();
}

TEST_P(Found, DEF_8_deleters_of_tensors_may_block_without_holding_up_calls) {
  Cluster c(options(2));
  auto gate = std::make_shared<Gate>(runtime_);
  std::vector<float> memory(static_cast<size_t>(kMiB), 1.0F);
  Future<int64_t> call;
  {
    at::Tensor x = at::from_blob(memory.data(), {kMiB}, [gate](void*) { gate->arrive_and_wait(); });
    call = rpc_async(c[0], 1, FunctionRef<int64_t(at::Tensor)>{"test.free_of"}, std::move(x));
  }
  EXPECT_EQ(call.try_wait(20s).value_or(0), kMiB) << call.try_wait(1ms).status();
  EXPECT_EQ(try_rpc_sync(c[0], 1, {.deadline = 5s}, &add, 1, 2).value_or(0), 3)
      << "a thread that carries frames frees the tensor";
  gate->wait_arrived(1);
  gate->open();
}

// ---- 10: the turn of an object -------------------------------------------------------------------

TEST_P(Found, DEF_10_a_method_that_returned_its_future_lets_the_next_one_in) {
  Cluster c(options(2));
  const Future<int64_t> first = rpc_async(c[0], 1, {.deadline = 10s}, on("pairs", &Pairs::add), 20);
  const Future<int64_t> second =
      rpc_async(c[0], 1, {.deadline = 10s}, on("pairs", &Pairs::add), 22);
  EXPECT_EQ(first.try_wait().value_or(0), 42) << first.try_wait().status();
  EXPECT_EQ(second.try_wait().value_or(0), 42) << second.try_wait().status();
}

TEST_P(Found, DEF_10_a_coroutine_has_its_turn_until_its_body_ends) {
  Cluster c(options(2));
  const Future<int64_t> body = rpc_async(c[0], 1, on("pairs", &Pairs::body));
  const Future<int64_t> inside = rpc_async(c[0], 1, on("pairs", &Pairs::inside));
  wait_until([&] { return counter(c[1], "handlers_running") == 2; }, "two calls");
  EXPECT_FALSE(inside.done());
  pairs_->end_body();
  EXPECT_EQ(body.wait(), 0);
  EXPECT_EQ(inside.wait(), 0) << "another method ran beside the body";
}

INSTANTIATE_TEST_SUITE_P(Nets, Found, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
