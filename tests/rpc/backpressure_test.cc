// Budgets of what is on its way: which calls wait, which fail, and that a peer that reads nothing
// does not make any worker's memory grow.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/forwarding_transport.h"
#include "weft/tests/testing/relay.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

at::Tensor megabytes(int64_t n) { return at::ones({n * kMiB / 4}); }
at::Tensor make(int64_t n) { return megabytes(n); }

class Backpressured : public ::testing::TestWithParam<Net> {
 protected:
  ClusterOptions options(int size, const std::string& worker, const std::string& peer) {
    const std::shared_ptr<Condition> changed = changed_;
    Library lib("room");
    lib.def("add", &add, {.inline_ok = true});
    lib.def("numel", &numel, {.inline_ok = true});
    lib.def("make", &make, {.inline_ok = true});
    lib.def("hold", [this](const at::Tensor& x) {
      MutexLock lock(&mutex_);
      held_.emplace_back(Promise<int64_t>(), x.numel());
      changed_->notify_all();
      return held_.back().first.future();
    });
    ClusterOptions o{.size = size, .net = GetParam(), .library = std::move(lib)};
    o.adjust = [worker, peer](int, JoinOptions* j) {
      j->environment = Environment{{"WEFT_SEND_BUDGET", worker}, {"WEFT_PEER_SEND_BUDGET", peer}};
    };
    return o;
  }
  void wait_held(size_t n) {
    MutexLock lock(&mutex_);
    while (held_.size() < n) ASSERT_TRUE(changed_->wait_until(&mutex_, limit()).ok());
  }
  // Answers the oldest that is held.
  void answer() {
    std::pair<Promise<int64_t>, int64_t> one{Promise<int64_t>(), 0};
    {
      MutexLock lock(&mutex_);
      ASSERT_FALSE(held_.empty());
      one = std::move(held_.front());
      held_.erase(held_.begin());
    }
    one.first.set_value(one.second);
  }
  size_t held() {
    MutexLock lock(&mutex_);
    return held_.size();
  }
  absl::Time limit() const { return runtime_->now() + absl::Seconds(30); }

  const std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::shared_ptr<Condition> changed_ = std::make_shared<Condition>(runtime_.get());
  Mutex mutex_;
  std::vector<std::pair<Promise<int64_t>, int64_t>> held_ ABSL_GUARDED_BY(mutex_);
};

// What a transport still holds may be dropped a moment after the answer came.
void expect_nothing_under_way(const Worker& worker) {
  const absl::Time limit = worker.now() + absl::Seconds(30);
  while (counter(worker, "send_bytes") > 0) {
    ASSERT_LT(worker.now(), limit) << counter(worker, "send_bytes");
    std::this_thread::yield();
  }
}

const FunctionRef<int64_t(at::Tensor)> kHold{"room.hold"};

TEST_P(Backpressured, FailsAtOnceUnlessToldToWait) {
  Cluster c(options(3, "4608KiB", "3584KiB"));
  Future<int64_t> first = rpc_async(c[0], 1, kHold, megabytes(2));
  wait_held(1);
  const Status full = try_rpc_sync(c[0], 1, kHold, megabytes(2)).status();
  EXPECT_EQ(error_kind(full), ErrorKind::kResource) << full;
  for (const char* part : {"on their way to worker1", "WEFT_PEER_SEND_BUDGET", "kWait"}) {
    EXPECT_NE(full.message().find(part), std::string::npos) << part << ": " << full;
  }
  // Another peer has its own, and then the worker's is full.
  Future<int64_t> second = rpc_async(c[0], 2, kHold, megabytes(2));
  wait_held(2);
  const Status worker = try_rpc_sync(c[0], 2, kHold, megabytes(1)).status();
  EXPECT_EQ(error_kind(worker), ErrorKind::kResource) << worker;
  EXPECT_NE(worker.message().find("(WEFT_SEND_BUDGET)"), std::string::npos) << worker;
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3) << "what fits may go";
  answer();
  answer();
  EXPECT_EQ(first.wait() + second.wait(), kMiB);
  expect_nothing_under_way(c[0]);
  EXPECT_LE(counter(c[0], "send_bytes_peak"), 4608 << 10);
}

TEST_P(Backpressured, WaitsForRoomInOrderOfIssue) {
  Cluster c(options(2, "8MiB", "3MiB"));
  constexpr CallOptions kWait{.backpressure = Backpressure::kWait};
  std::vector<Future<int64_t>> calls;
  for (int64_t i = 0; i < 6; ++i) {
    calls.push_back(rpc_async(c[0], 1, kWait, kHold, megabytes(2)));
  }
  wait_held(1);
  EXPECT_EQ(counter(c[0], "calls_waiting_for_room"), 5);
  EXPECT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3) << "who would rather fail, and fits, goes at once";
  for (size_t i = 0; i < calls.size(); ++i) {
    wait_held(1);
    EXPECT_EQ(held(), 1u) << "never two at once";
    for (size_t k = i; k < calls.size(); ++k) EXPECT_FALSE(calls[k].done());
    answer();
    EXPECT_EQ(calls[i].wait(), 2 * kMiB / 4);
  }
  EXPECT_EQ(counter(c[0], "calls_waiting_for_room"), 0);
  expect_nothing_under_way(c[0]);
  EXPECT_LE(counter(c[0], "send_bytes_peak"), 8 * kMiB);
}

TEST_P(Backpressured, WhoWaitsEndsWithDeadlineCancellationAndShutdownLikeAnyCall) {
  Cluster c(options(2, "8MiB", "3MiB"));
  Future<int64_t> first = rpc_async(c[0], 1, kHold, megabytes(2));
  wait_held(1);
  const CallOptions brief{.deadline = 50ms, .backpressure = Backpressure::kWait};
  const Status late = try_rpc_sync(c[0], 1, brief, kHold, megabytes(2)).status();
  EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
  // What can never fit does not wait.
  constexpr CallOptions kWait{.backpressure = Backpressure::kWait};
  const Status never = try_rpc_sync(c[0], 1, kWait, kHold, megabytes(4)).status();
  EXPECT_EQ(error_kind(never), ErrorKind::kResource) << never;
  Future<int64_t> cancelled = rpc_async(c[0], 1, kWait, kHold, megabytes(2));
  EXPECT_EQ(counter(c[0], "calls_waiting_for_room"), 1);
  cancelled.cancel();
  EXPECT_EQ(error_kind(cancelled.try_wait().status()), ErrorKind::kCancelled);
  EXPECT_EQ(counter(c[0], "calls_waiting_for_room"), 0);
  answer();
  EXPECT_EQ(first.wait(), 2 * kMiB / 4);
  expect_nothing_under_way(c[0]);
}

TEST_P(Backpressured, AnAnswerWithoutRoomIsAnErrorOfItsCall) {
  Cluster c(options(2, "3MiB", "2MiB"));
  const Status full = try_rpc_sync(c[0], 1, &make, int64_t{4}).status();
  EXPECT_EQ(error_kind(full), ErrorKind::kResource) << full;
  EXPECT_EQ(rpc_sync(c[0], 1, &make, int64_t{1}).numel(), kMiB / 4);
  expect_nothing_under_way(c[1]);
}

// Its handler may have called a third worker that had no room: that is the answer, which asking again
// would only bring once more.
TEST_P(Backpressured, ARefusalThatAHandlerPassesOnEndsTheCall) {
  Library own("passing");
  own.def("on", []() -> int64_t {
    weft::throw_error(
        internal::no_room_now(make_error(ErrorKind::kResource, "a third worker is full")));
  });
  ClusterOptions o{.size = 2, .net = GetParam(), .library = std::move(own)};
  Cluster c(std::move(o));
  const Status got =
      try_rpc_sync(
          c[0], 1,
          {.deadline = 3s, .retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait},
          FunctionRef<int64_t()>{"passing.on"})
          .status();
  EXPECT_EQ(error_kind(got), ErrorKind::kResource) << got;
  EXPECT_NE(got.message().find("a third worker is full"), absl::string_view::npos) << got;
  EXPECT_EQ(counter(c[0], "calls_resent"), 0);
}

INSTANTIATE_TEST_SUITE_P(Nets, Backpressured, ::testing::ValuesIn(nets()), net_name);

// Dials through a relay, which may then stop to pass bytes on.
class Relayed final : public ForwardingTransport {
 public:
  Relayed(std::unique_ptr<Transport> inner, std::shared_ptr<std::unique_ptr<Relay>> relay)
      : ForwardingTransport(std::move(inner)), relay_(std::move(relay)) {}
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override {
    *relay_ = Relay::start(address.substr(0, address.find('/')));
    ForwardingTransport::connect((*relay_)->address(), hello, deadline, std::move(handler),
                                 std::move(done));
  }

 private:
  const std::shared_ptr<std::unique_ptr<Relay>> relay_;
};

// Calls that gave up leave their frames behind in a connection that passes nothing on. Their bytes
// stay charged, so what the sender holds is bounded however long this goes on.
TEST(Backpressure, AReaderThatStallsNeverGrowsTheSenderBeyondItsBudget) {
  constexpr int64_t kBudget = 16 * kMiB;
  const auto relay = std::make_shared<std::unique_ptr<Relay>>();
  Library lib("room");
  lib.def("numel", &numel, {.inline_ok = true});
  lib.def("add", &add, {.inline_ok = true});
  ClusterOptions o{.net = Net::kGrpc, .library = std::move(lib), .lease = 60s};
  o.adjust = [relay](int index, JoinOptions* j) {
    if (index != 0) {
      j->transport = grpc_transport({.same_user = false});  // it is reached through the relay
      return;
    }
    j->environment = Environment{{"WEFT_SEND_BUDGET", std::to_string(kBudget)}};
    j->transport =
        [relay](const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
      auto inner = grpc_transport()(context);
      if (!inner.ok()) return inner.status();
      return std::make_unique<Relayed>(*std::move(inner), relay);
    };
  };
  Cluster c(o);
  ASSERT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
  ASSERT_NE(*relay, nullptr);
  (*relay)->add({.action = RelayAction::kStall, .to_target = true});

  const at::Tensor x = megabytes(1);
  const CallOptions brief{.deadline = 20ms};
  int refused = 0;
  int gave_up = 0;
  for (int i = 0; i < 100 && refused < 10; ++i) {
    const Status s = try_rpc_sync(c[0], 1, brief, &numel, x).status();
    ASSERT_FALSE(s.ok());
    if (error_kind(s) == ErrorKind::kResource) ++refused;
    if (error_kind(s) == ErrorKind::kDeadline) ++gave_up;
    EXPECT_EQ(counter(c[0], "calls_pending"), 0) << "only frames are left";
    EXPECT_LE(counter(c[0], "send_bytes"), kBudget);
  }
  EXPECT_EQ(refused, 10) << "the budget is full of what nobody reads";
  EXPECT_GE(gave_up, 10);
  EXPECT_GE(counter(c[0], "send_bytes"), 8 * kMiB) << "some are in the kernel's buffers";
  // Small calls count, too.
  EXPECT_LE(counter(c[0], "send_bytes_peak"), kBudget);

  (*relay)->clear();
  constexpr CallOptions kWait{.backpressure = Backpressure::kWait};
  EXPECT_EQ(rpc_sync(c[0], 1, kWait, &numel, x), kMiB / 4) << "it flows again";
  expect_nothing_under_way(c[0]);
  c.shutdown();
  *relay = nullptr;
}

}  // namespace
}  // namespace weft::testing
