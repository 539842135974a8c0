// A thread that waits for an answer polls for it itself (DRIVE of common/wait_driver.h, LEAD of
// transport/internal/grpc/poller.h).

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/wait_driver.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

// Where the handlers of one worker ran.
struct Seen {
  std::atomic<int64_t> on_user{0};
  std::atomic<int64_t> while_driving{0};
  std::atomic<int64_t> calls{0};
};

Library make_library(Seen* seen, std::thread::id user) {
  Library lib("drive");
  lib.def("add", &add, {.inline_ok = true});
  lib.def("look",
          [seen, user](int64_t x) {
            ++seen->calls;
            seen->on_user += std::this_thread::get_id() == user ? 1 : 0;
            seen->while_driving += driving() ? 1 : 0;
            return x;
          },
          {.inline_ok = true});
  // Calls the caller back, which waits for this meanwhile.
  lib.def("back", [](CallContext& context, int64_t x) {
    return rpc_sync(context.worker(), context.caller().name,
                    FunctionRef<int64_t(int64_t)>{"drive.look"}, x);
  });
  return lib;
}

class WaitDriverTest : public ::testing::Test {
 protected:
  ClusterOptions options(const GrpcTransportOptions& transport = {}) {
    ClusterOptions o{.net = Net::kGrpc,
                     .library = make_library(&seen_, std::this_thread::get_id())};
    o.adjust = [transport](int, JoinOptions* j) { j->transport = grpc_transport(transport); };
    return o;
  }
  Seen seen_;
};

// Spins as long as it takes, so that only a crowd of threads keeps a thread from spinning.
const GrpcTransportOptions kPatient{.max_spin = absl::Seconds(1),
                                    .spin_after_traffic = absl::Seconds(10)};

TEST_F(WaitDriverTest, LEAD_1_a_thread_that_waits_finds_its_answers_itself) {
  Cluster c(options(kPatient));
  // A machine with many threads that want to run does not let a thread spin for a while.
  const absl::Time end = c[0].now() + absl::Seconds(60);
  for (int64_t calls = 0; c[0].now() < end; ++calls) {
    ASSERT_EQ(rpc_sync(c[0], 1, &add, calls, 1), calls + 1);
    if (calls % 100 == 0 && counter(c[0], "poller_drives_paid") >= 100) break;
  }
  EXPECT_GE(counter(c[0], "poller_drives_paid"), 100);
  EXPECT_EQ(counter(c[1], "poller_drives_paid"), 0) << "nobody waited there";
}

TEST_F(WaitDriverTest, DRIVE_1_no_handler_of_a_user_runs_on_a_thread_that_waits) {
  Cluster c(options(kPatient));
  const FunctionRef<int64_t(int64_t)> back{"drive.back"};
  constexpr int64_t kCalls = 500;
  for (int64_t i = 0; i < kCalls; ++i) ASSERT_EQ(rpc_sync(c[0], 1, back, i), i);
  EXPECT_EQ(seen_.calls.load(), kCalls);
  EXPECT_EQ(seen_.on_user.load(), 0);
  EXPECT_EQ(seen_.while_driving.load(), 0);
}

// The lead is left free for a moment; a peer that needs something then is served all the same.
TEST_F(WaitDriverTest, LEAD_2_a_worker_whose_thread_went_on_to_other_things_serves_its_peers) {
  Cluster c(options(kPatient));
  for (int64_t round = 0; round < 50; ++round) {
    for (int64_t i = 0; i < 20; ++i) ASSERT_EQ(rpc_sync(c[0], 1, &add, i, 1), i + 1);
    // Now no thread waits at worker 0, and none tells its poller.
    ASSERT_EQ(rpc_sync(c[1], 0, &add, round, 1), round + 1);
    ASSERT_EQ(rpc_async(c[1], 0, &add, round, 2).then([](int64_t x) { return x + 1; }).wait(),
              round + 3);
  }
}

TEST_F(WaitDriverTest, SeveralThreadsWaitAtOnce) {
  Cluster c(options());
  constexpr int kThreads = 4;
  constexpr int64_t kCalls = 300;
  auto runtime = make_system_runtime();
  std::vector<std::unique_ptr<Thread>> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.push_back(runtime->spawn("caller", [&c, t] {
      const size_t from = static_cast<size_t>(t % 2);
      for (int64_t i = 0; i < kCalls; ++i) {
        ASSERT_EQ(rpc_sync(c[from], static_cast<int64_t>(1 - from), &add, i, t), i + t);
      }
    }));
  }
  threads.clear();
}

// Threads that want to run all the time, more than the machine has cores for.
class Crowd {
 public:
  Crowd() {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    for (unsigned i = 0; i < 4 * cores; ++i) {
      threads_.push_back(runtime_->spawn("crowd", [this] {
        while (!stop_.load(std::memory_order_relaxed)) {
        }
      }));
    }
  }
  ~Crowd() { stop_ = true; }

 private:
  std::atomic<bool> stop_{false};
  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  std::vector<std::unique_ptr<Thread>> threads_;
};

// In a crowd no thread spins: a waiting thread sleeps where the answers come in.
class CrowdedWaitTest : public WaitDriverTest {
 protected:
  // Calls until worker 0's thread has slept there for the last of them.
  void call_until_slept(Cluster& c) {
    const int64_t before = counter(c[0], "poller_drives_slept");
    const absl::Time end = c[0].now() + absl::Seconds(60);
    while (counter(c[0], "poller_drives_slept") < before + 5 && c[0].now() < end) {
      ASSERT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
    }
    ASSERT_GE(counter(c[0], "poller_drives_slept"), before + 5);
  }
};

TEST_F(CrowdedWaitTest, DRIVE_1_no_handler_of_a_user_runs_on_a_thread_that_waits) {
  Cluster c(options());
  const Crowd crowd;
  call_until_slept(c);
  const FunctionRef<int64_t(int64_t)> back{"drive.back"};
  for (int64_t i = 0; i < 50; ++i) ASSERT_EQ(rpc_sync(c[0], 1, back, i), i);
  EXPECT_EQ(seen_.on_user.load(), 0);
}

TEST_F(CrowdedWaitTest, LEAD_4_who_sleeps_there_is_told_of_a_future_that_was_cancelled) {
  ClusterOptions o = options();
  TestLibrary test;
  o.library = test.library;
  Cluster c(o);
  const Crowd crowd;
  // The gate opens only afterwards, so nothing but the cancelling thread can end the wait.
  auto runtime = make_system_runtime();
  const absl::Time end = c[0].now() + absl::Seconds(60);
  while (counter(c[0], "poller_kicks") == 0 && c[0].now() < end) {
    Future<int64_t> stuck;
    std::atomic<bool> sent{false};
    auto canceller = runtime->spawn("cancel", [&] {
      while (!sent.load()) std::this_thread::yield();
      // When the thread below sleeps in gRPC; or, if it is not let, after a while.
      const absl::Time give_up = c[0].now() + absl::Milliseconds(200);
      const int64_t slept = counter(c[0], "poller_drives_slept");
      while (counter(c[0], "poller_drives_slept") < slept + 1 && c[0].now() < give_up) {
        std::this_thread::yield();
      }
      stuck.cancel();
    });
    call_until_slept(c);
    // A call right after another finds the lead as that one left it; reading counters can take
    // so long that the poller has it again.
    for (int64_t i = 0; i < 5; ++i) ASSERT_EQ(rpc_sync(c[0], 1, &add, i, 2), i + 2);
    stuck = rpc_async(c[0], 1, FunctionRef<int64_t(int64_t)>{"test.wait_at_gate"}, 1);
    sent = true;
    EXPECT_EQ(error_kind(stuck.try_wait().status()), ErrorKind::kCancelled);
    canceller->join();
  }
  EXPECT_GT(counter(c[0], "poller_kicks"), 0);
  test.gate->open();
}

// The time that a wait is given holds while the thread drives, whatever else arrives meanwhile.
TEST_F(WaitDriverTest, TheTimeoutOfAWaitHoldsWhileOthersKeepTheTransportBusy) {
  ClusterOptions o = options(kPatient);
  TestLibrary test;
  o.library = test.library;
  Cluster c(o);
  const auto stuck = rpc_async(c[0], 1, FunctionRef<int64_t(int64_t)>{"test.wait_at_gate"}, 1);
  test.gate->wait_arrived(1);
  std::atomic<bool> stop{false};
  auto busy = make_system_runtime()->spawn("busy", [&] {
    while (!stop) EXPECT_EQ(rpc_sync(c[1], 0, &add, 1, 2), 3);
  });
  const StatusOr<int64_t> r = stuck.try_wait(std::chrono::milliseconds(200));
  EXPECT_EQ(error_kind(r.status()), ErrorKind::kDeadline) << r.status();
  stop = true;
  busy->join();
  test.gate->open();
  EXPECT_EQ(stuck.wait(), 1);
}

TEST_F(WaitDriverTest, AFutureThatOutlivesItsWorkerTouchesNothing) {
  Future<int64_t> future;
  {
    ClusterOptions o = options(kPatient);
    TestLibrary test;
    o.library = test.library;
    Cluster c(o);
    future = rpc_async(c[0], 1, FunctionRef<int64_t(int64_t)>{"test.wait_at_gate"}, 1);
    test.gate->wait_arrived(1);
    auto opener = make_system_runtime()->spawn("open", [&] { test.gate->open(); });
    EXPECT_EQ(future.wait(), 1);
    opener->join();
    c.shutdown();
  }
  EXPECT_EQ(future.wait(), 1);
}

}  // namespace
}  // namespace weft::testing
