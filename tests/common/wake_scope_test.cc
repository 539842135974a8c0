#include "weft/common/wake_scope.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/future.h"
#include "weft/common/runtime.h"

namespace weft {
namespace {

class CountingParker : public Parker {
 public:
  bool park_until(absl::Time) override { return woken > 0; }
  void unpark() override { ++woken; }
  absl::Time now() const override { return absl::InfinitePast(); }
  std::atomic<int> woken{0};
};

TEST(WakeScope, WithoutAScopeAWakeIsAtOnce) {
  auto parker = std::make_shared<CountingParker>();
  WakeScope::wake({parker});
  EXPECT_EQ(parker->woken, 1);
  WakeScope::flush();
  EXPECT_EQ(parker->woken, 1);
}

TEST(WakeScope, WakesAtItsEndOrAtAFlush) {
  auto a = std::make_shared<CountingParker>();
  auto b = std::make_shared<CountingParker>();
  {
    const WakeScope scope;
    WakeScope::wake({a});
    EXPECT_EQ(a->woken, 0);
    WakeScope::flush();
    EXPECT_EQ(a->woken, 1);
    {
      const WakeScope inner;  // the outermost decides
      WakeScope::wake({b});
    }
    EXPECT_EQ(b->woken, 0);
  }
  EXPECT_EQ(a->woken, 1);
  EXPECT_EQ(b->woken, 1);
}

TEST(WakeScope, AnotherThreadIsNotConcerned) {
  auto parker = std::make_shared<CountingParker>();
  const WakeScope scope;
  make_system_runtime()->spawn("other", [&] { WakeScope::wake({parker}); })->join();
  EXPECT_EQ(parker->woken, 1);
}

// WAKE-1: a thread that waits has woken the others first.
TEST(WakeScope, AWaitWithinAScopeWakesFirst) {
  auto parker = std::make_shared<CountingParker>();
  Promise<int> never;
  const WakeScope scope;
  WakeScope::wake({parker});
  EXPECT_FALSE(never.future().try_wait(std::chrono::milliseconds(1)).ok());
  EXPECT_EQ(parker->woken, 1);
}

// The futures are done at once, their waiters run when the scope ends.
TEST(WakeScope, AWaiterOfAFutureIsWokenWhenTheScopeEnds) {
  Promise<int> promise;
  Future<int> future = promise.future();
  std::atomic<bool> waiting{false};
  std::atomic<bool> woken{false};
  auto waiter = make_system_runtime()->spawn("waiter", [&] {
    waiting = true;
    EXPECT_EQ(future.wait(), 7);
    woken = true;
  });
  while (!waiting) std::this_thread::yield();
  {
    const WakeScope scope;
    EXPECT_TRUE(promise.try_set(7));
    EXPECT_TRUE(future.done());
  }
  waiter->join();
  EXPECT_TRUE(woken);
}

}  // namespace
}  // namespace weft
