// Executors, timers, threads and conditions: one contract for the system's runtime and the
// simulated one, then what is the system's own (POOL-1 in common/internal/pool.h).
#include "weft/common/executor.h"

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/common/error.h"
#include "weft/common/internal/pool.h"
#include "weft/common/manual_executor.h"
#include "weft/common/runtime.h"
#include "weft/common/sim.h"

namespace weft {
namespace {

// Something that is waited for, on either runtime.
class Event {
 public:
  explicit Event(Runtime* runtime) : changed_(runtime) {}
  void add(int n = 1) {
    MutexLock lock(&mutex_);
    count_ += n;
    changed_.notify_all();
  }
  absl::Status wait_for(int count, absl::Time deadline = absl::InfiniteFuture()) {
    MutexLock lock(&mutex_);
    while (count_ < count) WEFT_RETURN_IF_ERROR(changed_.wait_until(&mutex_, deadline));
    return absl::OkStatus();
  }
  int count() {
    MutexLock lock(&mutex_);
    return count_;
  }

 private:
  Mutex mutex_;
  Condition changed_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

class RuntimeContract : public ::testing::TestWithParam<bool> {
 protected:
  // Runs `body` with a runtime, inside the simulation if it is that.
  void with_runtime(const std::function<void(Runtime&)>& body) {
    if (GetParam()) {
      const auto runtime = make_system_runtime();
      body(*runtime);
      return;
    }
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      SimRuntime sim({.seed = seed});
      const absl::Status status = sim.run([&] { body(sim); });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, RuntimeContract, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "System" : "Simulated"; });

TEST_P(RuntimeContract, LoopRunsTasksOneAtATimeInOrder) {
  with_runtime([](Runtime& runtime) {
    const auto loop = runtime.make_loop("loop");
    std::vector<int> order;  // no lock: tasks of a loop never overlap
    std::atomic<int> inside{0};
    for (int i = 0; i < 200; ++i) {
      EXPECT_TRUE(loop->post([&, i] {
        EXPECT_EQ(inside.fetch_add(1), 0);
        order.push_back(i);
        inside.fetch_sub(1);
      }));
    }
    loop->shutdown();
    ASSERT_EQ(order.size(), 200u);
    for (int i = 0; i < 200; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  });
}

TEST_P(RuntimeContract, ShutdownRunsWhatWasPostedAndThenRefuses) {
  with_runtime([](Runtime& runtime) {
    for (const auto& executor :
         {runtime.make_loop("loop"), runtime.make_pool({.name = "pool", .threads = 3})}) {
      std::atomic<int> ran{0};
      for (int i = 0; i < 50; ++i) EXPECT_TRUE(executor->post([&] { ++ran; }));
      executor->shutdown();
      EXPECT_EQ(ran, 50);
      Task late = [&] { ran += 1000; };
      EXPECT_FALSE(executor->post(std::move(late)));
      ASSERT_NE(late, nullptr);  // still the caller's
      late();
      EXPECT_EQ(ran, 1050);
      executor->shutdown();
      post_or_run(executor.get(), [&] { ran = -1; });
      EXPECT_EQ(ran, -1);
    }
    int here = 0;
    post_or_run(nullptr, [&] { here = 1; });
    EXPECT_EQ(here, 1);
  });
}

// POOL-1.
TEST_P(RuntimeContract, NestedWaitsDoNotExhaustAPoolOfOneThread) {
  with_runtime([](Runtime& runtime) {
    Event done(&runtime);
    const auto pool = runtime.make_pool({.name = "pool", .threads = 1});
    // Each task posts the next and waits until that has ended.
    std::function<void(int)> nest = [&](int depth) {
      if (depth < 100) {
        EXPECT_TRUE(pool->post([&nest, depth] { nest(depth + 1); }));
        EXPECT_TRUE(done.wait_for(100 - depth).ok());
      }
      done.add();
    };
    EXPECT_TRUE(pool->post([&] { nest(0); }));
    EXPECT_TRUE(done.wait_for(101).ok());
    pool->shutdown();
    EXPECT_EQ(done.count(), 101);
  });
}

TEST_P(RuntimeContract, SpawnedThreadsBlockOnEachOther) {
  with_runtime([](Runtime& runtime) {
    Event ping(&runtime);
    Event pong(&runtime);
    std::vector<std::unique_ptr<Thread>> threads;
    threads.push_back(runtime.spawn("ping", [&] {
      for (int i = 1; i <= 20; ++i) {
        ping.add();
        EXPECT_TRUE(pong.wait_for(i).ok());
      }
    }));
    threads.push_back(runtime.spawn("pong", [&] {
      for (int i = 1; i <= 20; ++i) {
        EXPECT_TRUE(ping.wait_for(i).ok());
        pong.add();
      }
    }));
    for (auto& thread : threads) thread->join();
    EXPECT_EQ(pong.count(), 20);
  });
}

TEST_P(RuntimeContract, ParkerKeepsOnePermit) {
  with_runtime([](Runtime& runtime) {
    const auto parker = runtime.make_parker();
    EXPECT_FALSE(parker->park_until(absl::InfinitePast()));
    EXPECT_FALSE(parker->park_until(runtime.now()));
    EXPECT_FALSE(parker->park_until(runtime.now() + absl::Milliseconds(2)));
    parker->unpark();
    parker->unpark();
    EXPECT_TRUE(parker->park_until(absl::InfiniteFuture()));
    EXPECT_FALSE(parker->park_until(runtime.now()));
    const auto thread = runtime.spawn("waker", [&] { parker->unpark(); });
    EXPECT_TRUE(parker->park_until(absl::InfiniteFuture()));
  });
}

TEST_P(RuntimeContract, ConditionWakesAllWhoWait) {
  with_runtime([](Runtime& runtime) {
    Event ready(&runtime);
    Event go(&runtime);
    Event woken(&runtime);
    std::vector<std::unique_ptr<Thread>> threads;
    for (int i = 0; i < 5; ++i) {
      threads.push_back(runtime.spawn("waiter", [&] {
        ready.add();
        EXPECT_TRUE(go.wait_for(1).ok());
        woken.add();
      }));
    }
    EXPECT_TRUE(ready.wait_for(5).ok());
    go.add();
    EXPECT_TRUE(woken.wait_for(5).ok());
  });
}

TEST_P(RuntimeContract, ConditionEndsAtItsDeadline) {
  with_runtime([](Runtime& runtime) {
    Event never(&runtime);
    const absl::Time before = runtime.now();
    const absl::Status status = never.wait_for(1, before + absl::Milliseconds(20));
    EXPECT_EQ(error_kind(status), ErrorKind::kDeadline);
    EXPECT_GE(runtime.now(), before + absl::Milliseconds(20));
    EXPECT_EQ(error_kind(never.wait_for(1, absl::InfinitePast())), ErrorKind::kDeadline);
  });
}

TEST_P(RuntimeContract, TimersFireInTheOrderOfTheirTimes) {
  with_runtime([](Runtime& runtime) {
    std::vector<std::unique_ptr<Timer>> timers;
    Event fired(&runtime);
    Mutex mutex;
    std::vector<int> order;
    const absl::Time start = runtime.now();
    for (int i = 0; i < 5; ++i) {
      timers.push_back(runtime.make_timer([&, i] {
        MutexLock lock(&mutex);
        order.push_back(i);
        fired.add();
      }));
    }
    for (const int i : {3, 1, 4, 0, 2}) {
      timers[static_cast<size_t>(i)]->arm(start + absl::Milliseconds(200 + 5 * i));
    }
    EXPECT_TRUE(fired.wait_for(5).ok());
    EXPECT_GE(runtime.now(), start + absl::Milliseconds(220));
    MutexLock lock(&mutex);
    EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
  });
}

TEST_P(RuntimeContract, TimerArmedEarlierFiresThenOnce) {
  with_runtime([](Runtime& runtime) {
    Event fired(&runtime);
    const auto timer = runtime.make_timer([&] { fired.add(); });
    timer->arm(runtime.now() + absl::Hours(1));
    timer->arm(runtime.now() + absl::Milliseconds(1));
    EXPECT_TRUE(fired.wait_for(1).ok());
    timer->arm(absl::InfinitePast());
    EXPECT_TRUE(fired.wait_for(2).ok());
    timer->arm(runtime.now() + absl::Hours(1));
    timer->disarm();
    timer->disarm();
    EXPECT_EQ(fired.count(), 2);
  });
}

TEST_P(RuntimeContract, TimerMayArmItself) {
  with_runtime([](Runtime& runtime) {
    Event fired(&runtime);
    std::unique_ptr<Timer> timer;
    timer = runtime.make_timer([&] {
      timer->arm(runtime.now() + absl::Milliseconds(1));
      fired.add();
    });
    timer->arm(runtime.now());
    EXPECT_TRUE(fired.wait_for(5).ok());
    timer = nullptr;
    const int after = fired.count();
    // It is gone: another timer, set for a later time, sees no more of it.
    Event later(&runtime);
    const auto other = runtime.make_timer([&] { later.add(); });
    other->arm(runtime.now() + absl::Milliseconds(5));
    EXPECT_TRUE(later.wait_for(1).ok());
    EXPECT_EQ(fired.count(), after);
  });
}

TEST_P(RuntimeContract, RandomNumbersAreInTheirRange) {
  with_runtime([](Runtime& runtime) {
    std::set<uint64_t> seen;
    for (int i = 0; i < 200; ++i) {
      EXPECT_LT(runtime.random().below(7), 7u);
      const double unit = runtime.random().unit();
      EXPECT_GE(unit, 0.0);
      EXPECT_LT(unit, 1.0);
      seen.insert(runtime.random().next());
    }
    EXPECT_EQ(seen.size(), 200u);
  });
}

TEST(SimulatedTimer, ArmedLaterDoesNotFireAtTheOldTime) {
  SimRuntime sim({.seed = 3});
  const absl::Status status = sim.run([&] {
    int fired = 0;
    const auto timer = sim.make_timer([&] { ++fired; });
    timer->arm(sim.now() + absl::Seconds(1));
    timer->arm(sim.now() + absl::Seconds(10));
    sim.sleep(absl::Seconds(9));
    EXPECT_EQ(fired, 0);
    sim.sleep(absl::Seconds(2));
    EXPECT_EQ(fired, 1);
    timer->arm(sim.now() + absl::Seconds(1));
    timer->disarm();
    sim.sleep(absl::Seconds(5));
    EXPECT_EQ(fired, 1);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SystemTimer, DestroyingWaitsForTheCallback) {
  const auto runtime = make_system_runtime();
  for (int i = 0; i < 200; ++i) {
    std::latch started(1);
    std::latch release(1);
    bool finished = false;  // no lock: destroying the timer orders it
    auto timer = runtime->make_timer([&] {
      started.count_down();
      release.wait();
      finished = true;
    });
    timer->arm(runtime->now());
    started.wait();
    release.count_down();
    timer = nullptr;
    EXPECT_TRUE(finished);
  }
}

TEST(SystemTimer, MayBeDestroyedByItsOwnCallback) {
  const auto runtime = make_system_runtime();
  std::latch gone(1);
  std::unique_ptr<Timer> timer;
  timer = runtime->make_timer([&] {
    std::latch& done = gone;  // what the callback captured goes with the timer
    timer = nullptr;
    done.count_down();
  });
  timer->arm(runtime->now() + absl::Milliseconds(5));
  gone.wait();
}

// As the timer of an object that its worker has let go of meanwhile.
TEST(SystemTimer, ItsCallbackMayDropTheLastHandleOfTheRuntime) {
  struct Owner {
    std::shared_ptr<Runtime> runtime = make_system_runtime();
    std::unique_ptr<Timer> timer{};
  };
  for (int i = 0; i < 20; ++i) {
    std::latch locked(1);
    std::latch dropped(1);
    std::latch gone(1);
    auto owner = std::make_shared<Owner>();
    owner->timer =
        owner->runtime->make_timer([weak = std::weak_ptr<Owner>(owner), &locked, &dropped, &gone] {
          std::latch& done = gone;  // what the callback captured goes with the timer
          std::shared_ptr<Owner> last = weak.lock();
          locked.count_down();
          dropped.wait();
          last = nullptr;
          done.count_down();
        });
    owner->timer->arm(owner->runtime->now());
    locked.wait();
    owner = nullptr;
    dropped.count_down();
    gone.wait();
  }
}

TEST(SystemPool, RefusesOneWaitTooMany) {
  const auto runtime = make_system_runtime();
  internal::Pool pool({.name = "handlers", .threads = 1, .max_blocked = 2});
  Event waiting(runtime.get());
  Event go(runtime.get());
  Event done(runtime.get());
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(pool.post([&] {
      waiting.add();
      EXPECT_TRUE(go.wait_for(1).ok());
      done.add();
    }));
  }
  EXPECT_TRUE(waiting.wait_for(2).ok());
  absl::Status refused;
  EXPECT_TRUE(pool.post([&] {
    // The second one said so before it waited: only when its thread has left does this one start.
    refused = go.wait_for(1);
    done.add();
  }));
  EXPECT_TRUE(done.wait_for(1).ok());
  EXPECT_EQ(error_kind(refused), ErrorKind::kResource) << refused;
  EXPECT_NE(std::string(refused.message()).find("handlers"), std::string::npos) << refused;
  go.add();
  EXPECT_TRUE(done.wait_for(3).ok());
  pool.shutdown();
}

TEST(SystemPool, RunsAsManyTasksAtOnceAsItHasThreads) {
  for (int round = 0; round < 50; ++round) {
    internal::Pool pool({.name = "pool", .threads = 3});
    // Tasks that end only together, without telling the pool that they wait.
    std::latch all(4);
    for (int t = 0; t < 3; ++t) {
      EXPECT_TRUE(pool.post([&] { all.arrive_and_wait(); }));
    }
    all.arrive_and_wait();
    pool.shutdown();
    EXPECT_EQ(pool.threads_for_test(), 0);
  }
}

TEST(SystemPool, OneIdleThreadDoesNotCountForTwoTasks) {
  for (int round = 0; round < 50; ++round) {
    internal::Pool pool({.name = "pool", .threads = 2});
    std::latch one(1);
    EXPECT_TRUE(pool.post([&] { one.count_down(); }));
    one.wait();
    for (int i = 0; i < 100; ++i)
      std::this_thread::yield();  // its thread is idle by now, most likely
    std::latch both(3);
    for (int t = 0; t < 2; ++t) {
      EXPECT_TRUE(pool.post([&] { both.arrive_and_wait(); }));
    }
    both.arrive_and_wait();
    pool.shutdown();
  }
}

TEST(SystemPool, SurplusThreadsEnd) {
  const auto runtime = make_system_runtime();
  internal::Pool pool({.name = "pool", .threads = 2});
  Event waiting(runtime.get());
  Event go(runtime.get());
  Event done(runtime.get());
  for (int i = 0; i < 30; ++i) {
    EXPECT_TRUE(pool.post([&] {
      waiting.add();
      EXPECT_TRUE(go.wait_for(1).ok());
      done.add();
    }));
  }
  EXPECT_TRUE(waiting.wait_for(30).ok());
  EXPECT_GE(pool.threads_for_test(), 29);
  go.add();
  EXPECT_TRUE(done.wait_for(30).ok());
  while (pool.threads_for_test() > 2) std::this_thread::yield();
  pool.shutdown();
  EXPECT_EQ(pool.threads_for_test(), 0);
}

TEST(SystemPool, TasksMayPostFromManyThreads) {
  internal::Pool pool({.name = "pool", .threads = 3});
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        EXPECT_TRUE(pool.post([&] {
          ++ran;
          pool.post([&] { ++ran; });
        }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (ran < 1600) std::this_thread::yield();
  pool.shutdown();
  EXPECT_EQ(ran, 1600);
}

TEST(SystemPool, ShutdownMayGiveUpOnATaskThatDoesNotEnd) {
  const auto runtime = make_system_runtime();
  const auto held = std::make_shared<std::latch>(1);
  {
    const auto pool = runtime->make_pool({.name = "pool", .threads = 2});
    EXPECT_TRUE(pool->post([held] { held->wait(); }));
    EXPECT_FALSE(pool->shutdown_until(runtime->now() + absl::Milliseconds(5)));
    EXPECT_FALSE(pool->post([] {}));
  }
  // The pool is gone without the task, which keeps what it needs and lets go of it in the end.
  EXPECT_EQ(held.use_count(), 2);
  held->count_down();
  while (held.use_count() > 1) std::this_thread::yield();
  const auto pool = runtime->make_pool({.name = "pool", .threads = 1});
  EXPECT_TRUE(pool->post([] {}));
  EXPECT_TRUE(pool->shutdown_until(absl::InfiniteFuture()));
  EXPECT_TRUE(pool->shutdown_until(runtime->now()));
}

// They may have to wait for a core.
TEST(SystemPool, DEF_11_ThreadsWithoutATaskAreWaitedForBeyondTheDeadline) {
  constexpr int kThreads = 64;
  for (int i = 0; i < 5; ++i) {
    internal::Pool pool({.name = "pool", .threads = kThreads});
    std::latch all(kThreads);
    for (int task = 0; task < kThreads; ++task) {
      EXPECT_TRUE(pool.post([&all] { all.arrive_and_wait(); }));
    }
    while (pool.tasks_for_test() > 0) std::this_thread::yield();
    EXPECT_EQ(pool.threads_for_test(), kThreads);
    EXPECT_TRUE(pool.shutdown_until(make_system_runtime()->now())) << i;
  }
}

TEST(SystemPool, ItsOwnTaskMayDropTheLastHandle) {
  const auto runtime = make_system_runtime();
  for (int i = 0; i < 50; ++i) {
    auto pool = runtime->make_pool({.name = "pool", .threads = 2});
    Executor* const raw = pool.get();
    const auto held = std::make_shared<int>(0);
    EXPECT_TRUE(raw->post([held, last = std::move(pool)]() mutable { last = nullptr; }));
    while (held.use_count() > 1) std::this_thread::yield();
  }
}

TEST(ManualExecutor, RunsWhenTold) {
  ManualExecutor executor;
  std::vector<int> order;
  EXPECT_TRUE(executor.post([&] {
    order.push_back(1);
    executor.post([&] { order.push_back(3); });
  }));
  EXPECT_TRUE(executor.post([&] { order.push_back(2); }));
  EXPECT_EQ(executor.queued(), 2u);
  EXPECT_TRUE(order.empty());
  EXPECT_TRUE(executor.run_one());
  EXPECT_EQ(executor.run_all(), 2u);
  EXPECT_FALSE(executor.run_one());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_TRUE(executor.post([&] { order.push_back(4); }));
  executor.shutdown();
  EXPECT_EQ(order.size(), 4u);
  EXPECT_FALSE(executor.post([] {}));
}

}  // namespace
}  // namespace weft
