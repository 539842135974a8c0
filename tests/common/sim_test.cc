// The seeded simulation runtime; SIM-1 to SIM-3 stand in common/sim.h.
#include "weft/common/sim.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/common/future.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

// Loops, pools, threads, timers and waits, all racing; returns the order in which things happened.
std::vector<int> scenario(SimRuntime& sim) {
  std::vector<int> order;
  const auto loop = sim.make_loop("loop");
  const auto pool = sim.make_pool({.name = "pool", .threads = 4});
  std::vector<Future<int>> futures;
  for (int i = 0; i < 10; ++i) {
    Promise<int> p(pool);
    futures.push_back(p.future());
    pool->post([&, i, p = std::move(p)]() mutable {
      sim.sleep(absl::Milliseconds(static_cast<int64_t>(sim.random().below(50))));
      order.push_back(i);
      loop->post([&order, i] { order.push_back(100 + i); });
      p.set_value(i);
    });
  }
  const auto thread = sim.spawn("actor", [&] {
    for (const Future<int>& f : futures) order.push_back(200 + f.wait());
  });
  const auto timer = sim.make_timer([&] { order.push_back(300); });
  timer->arm(sim.now() + absl::Milliseconds(25));
  when_all(futures).wait();
  thread->join();
  sim.sleep(absl::Milliseconds(100));
  pool->shutdown();
  loop->shutdown();
  sim.trace("end", order.size(), 0);
  return order;
}

struct Outcome {
  std::vector<int> order;
  uint64_t hash = 0;
};

Outcome outcome(uint64_t seed) {
  SimRuntime sim({.seed = seed});
  Outcome out;
  const Status status = sim.run([&] { out.order = scenario(sim); });
  EXPECT_TRUE(status.ok()) << status;
  out.hash = sim.trace_hash();
  return out;
}

TEST(Sim, TheSameSeedGivesTheSameOrder) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const Outcome a = outcome(seed);
    const Outcome b = outcome(seed);
    EXPECT_EQ(a.order, b.order) << "seed " << seed;
    EXPECT_EQ(a.hash, b.hash) << "seed " << seed;
    EXPECT_EQ(a.order.size(), 31u);
  }
}

TEST(Sim, OtherSeedsGiveOtherOrders) {
  std::vector<uint64_t> hashes;
  for (uint64_t seed = 1; seed <= 20; ++seed) hashes.push_back(outcome(seed).hash);
  std::sort(hashes.begin(), hashes.end());
  EXPECT_EQ(std::unique(hashes.begin(), hashes.end()), hashes.end());
}

// The other process is this program again, with other addresses.
TEST(SimDeathTest, AnotherProcessGivesTheSameHash) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::string expected = absl::StrCat("hash=", outcome(7).hash, ";");
  EXPECT_EXIT(
      {
        std::fprintf(stderr, "hash=%llu;", static_cast<unsigned long long>(outcome(7).hash));
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), expected);
}

// SIM-2.
TEST(Sim, TimePassesWithoutWaiting) {
  SimRuntime sim({.seed = 1});
  const auto real_start = std::chrono::steady_clock::now();
  const Status status = sim.run([&] {
    const absl::Time start = sim.now();
    sim.sleep(absl::Hours(24 * 365));
    EXPECT_EQ(sim.now() - start, absl::Hours(24 * 365));
    EXPECT_EQ(sim.clock().now(), sim.now());
    Promise<int> never(sim.make_pool({}));
    EXPECT_EQ(error_kind(never.future().try_wait(absl::Seconds(60)).status()),
              ErrorKind::kDeadline);
    EXPECT_EQ(sim.now() - start, absl::Hours(24 * 365) + absl::Seconds(60));
  });
  EXPECT_TRUE(status.ok()) << status;
  // A bound against hanging, nothing more: a year has passed.
  EXPECT_LT(std::chrono::steady_clock::now() - real_start, std::chrono::minutes(5));
}

// SIM-1.
TEST(Sim, OneAtATime) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SimRuntime sim({.seed = seed});
    int inside = 0;  // no lock and not atomic: TSan and the count say whether anything overlaps
    int ran = 0;
    const auto work = [&] {
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(++inside, 1);
        ++ran;
        --inside;
        sim.sleep(absl::Milliseconds(1));
      }
    };
    const Status status = sim.run([&] {
      const auto pool = sim.make_pool({.name = "pool", .threads = 8});
      std::vector<std::unique_ptr<Thread>> threads;
      for (int i = 0; i < 5; ++i) {
        pool->post(work);
        threads.push_back(sim.spawn("thread", work));
      }
      pool->shutdown();
      for (auto& thread : threads) thread->join();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(ran, 50);
  }
}

TEST(Sim, ALoopKeepsItsTurnWhileItsTaskWaits) {
  SimRuntime sim({.seed = 2});
  const Status status = sim.run([&] {
    const auto loop = sim.make_loop("loop");
    std::vector<int> order;
    loop->post([&] {
      sim.sleep(absl::Seconds(1));
      order.push_back(1);
    });
    loop->post([&] { order.push_back(2); });
    loop->shutdown();
    EXPECT_EQ(order, (std::vector<int>{1, 2}));
  });
  EXPECT_TRUE(status.ok()) << status;
}

// SIM-3.
TEST(Sim, ADeadlockIsReportedAndUnwinds) {
  SimRuntime sim({.seed = 11});
  bool unwound = false;
  const Status status = sim.run([&] {
    Promise<int> never(sim.make_pool({}));
    EXPECT_FALSE(never.future().try_wait(kInfinite).ok());
    unwound = true;
  });
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(unwound);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("seed 11"));
  EXPECT_THAT(message, HasSubstr("deadlock"));
  EXPECT_THAT(message, HasSubstr("park"));
}

TEST(Sim, ShutdownWaitsForItsTasksEvenAfterADeadlock) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SimRuntime sim({.seed = seed});
    const Status status = sim.run([&] {
      std::vector<int> ended;  // on this stack: the tasks must not outlive it
      const auto pool = sim.make_pool({.name = "stuck", .threads = 2});
      for (int i = 0; i < 3; ++i) {
        pool->post([&, i] {
          const auto mine = sim.make_parker();
          mine->park_until(absl::InfiniteFuture());
          ended.push_back(i);
        });
      }
      pool->shutdown();
      EXPECT_EQ(ended.size(), 3u);
    });
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("shutdown of stuck"));
  }
}

TEST(Sim, WhoStillWaitsAtTheEndIsAnErrorAndUnwinds) {
  SimRuntime sim({.seed = 5});
  std::shared_ptr<Executor> pool;
  bool woken = true;
  const Status status = sim.run([&] {
    pool = sim.make_pool({.name = "pool"});
    pool->post([&] { woken = sim.make_parker()->park_until(sim.now() + absl::Hours(1)); });
    sim.sleep(absl::Seconds(1));
  });
  EXPECT_FALSE(woken);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the body has ended"));
}

TEST(Sim, ALivelockIsBounded) {
  SimRuntime sim({.seed = 12, .max_steps = 1000});
  // Outlive the run, which ends with tasks still queued.
  bool stop = false;
  std::shared_ptr<Executor> loop;
  std::function<void()> again = [&] {
    if (!stop) loop->post([&] { again(); });
  };
  const Status status = sim.run([&] {
    loop = sim.make_loop("loop");
    loop->post([&] { again(); });
    sim.sleep(absl::Seconds(1));  // time never passes: the loop is always ready
    stop = true;
  });
  EXPECT_EQ(error_kind(status), ErrorKind::kResource) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("1000 steps"));
}

TEST(Sim, EventsOfAFailingSeedCanBeKept) {
  SimRuntime sim({.seed = 1, .keep_events = 5});
  const Status status = sim.run([&] {
    for (uint64_t i = 0; i < 20; ++i) sim.trace("mine", i, 2 * i);
  });
  EXPECT_TRUE(status.ok()) << status;
  const auto events = sim.last_events();
  ASSERT_EQ(events.size(), 5u);
  EXPECT_THAT(events.back(), HasSubstr("mine 19 38"));
  SimRuntime other({.seed = 1});
  EXPECT_TRUE(other.run([&] { other.trace("mine", 1, 2); }).ok());
  EXPECT_NE(other.trace_hash(), sim.trace_hash());
  EXPECT_TRUE(other.last_events().empty());
}

TEST(Sim, FilesAreInMemory) {
  SimRuntime sim({.seed = 1});
  const Status status = sim.run([&] {
    ASSERT_TRUE(sim.files().write_atomic("/nowhere/at/all", "x").ok());
    EXPECT_EQ(*sim.files().read("/nowhere/at/all"), "x");
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(sim.simulated());
  EXPECT_FALSE(make_system_runtime()->files().read("/nowhere/at/all").ok());
}

TEST(Sim, ATimerDestroyedBeforeItsTimeDoesNotFire) {
  SimRuntime sim({.seed = 1});
  const Status status = sim.run([&] {
    int fired = 0;
    auto timer = sim.make_timer([&] { ++fired; });
    timer->arm(sim.now() + absl::Seconds(1));
    timer = nullptr;
    sim.sleep(absl::Seconds(5));
    EXPECT_EQ(fired, 0);
    std::unique_ptr<Timer> suicidal;
    suicidal = sim.make_timer([&] {
      ++fired;
      suicidal = nullptr;
    });
    suicidal->arm(sim.now() + absl::Seconds(1));
    sim.sleep(absl::Seconds(5));
    EXPECT_EQ(fired, 1);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Sim, ManyRunsLeaveNoThreadsBehind) {
  const auto threads = [] {
    const auto text = make_system_runtime()->files().read("/proc/self/status");
    EXPECT_TRUE(text.ok());
    const size_t at = text->find("Threads:");
    return text->substr(at, text->find('\n', at) - at);
  };
  const std::string before = threads();
  for (uint64_t seed = 1; seed <= 20; ++seed) outcome(seed);
  // A thread that was joined is counted by the kernel for a moment longer.
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (threads() != before && absl::Now() < end) std::this_thread::yield();
  EXPECT_EQ(threads(), before);
}

TEST(Sim, MayRunAgain) {
  SimRuntime sim({.seed = 4});
  int ran = 0;
  EXPECT_TRUE(sim.run([&] { sim.sleep(absl::Seconds(++ran)); }).ok());
  EXPECT_TRUE(sim.run([&] { sim.sleep(absl::Seconds(++ran)); }).ok());
  EXPECT_EQ(ran, 2);
}

}  // namespace
}  // namespace weft
