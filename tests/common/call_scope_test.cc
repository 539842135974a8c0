#include "weft/common/call_scope.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/error.h"

namespace weft {
namespace {

ScopeRef scope_of(const void* worker, uint64_t trace_id) {
  auto scope = std::make_shared<CallScope>();
  scope->worker = worker;
  scope->trace.trace_low = trace_id;
  scope->outer = capture_scope();
  return scope;
}

TEST(CallScope, IsKeyedByWorker) {
  int a = 0;
  int b = 0;
  EXPECT_EQ(find_scope(&a), nullptr);
  ScopeGuard outer(scope_of(&a, 1));
  {
    ScopeGuard inner(scope_of(&b, 2));
    ASSERT_NE(find_scope(&a), nullptr);
    EXPECT_EQ(find_scope(&a)->trace.trace_low, 1u);
    EXPECT_EQ(find_scope(&b)->trace.trace_low, 2u);
    {
      ScopeGuard innermost(scope_of(&a, 3));
      EXPECT_EQ(find_scope(&a)->trace.trace_low, 3u);
    }
    EXPECT_EQ(find_scope(&a)->trace.trace_low, 1u);
  }
  EXPECT_EQ(find_scope(&b), nullptr);
  EXPECT_EQ(find_scope(nullptr), nullptr);
}

TEST(CallScope, GuardRestoresEvenWhenUnwinding) {
  int a = 0;
  try {
    ScopeGuard guard(scope_of(&a, 1));
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(capture_scope(), nullptr);
  ScopeGuard outer(scope_of(&a, 1));
  {
    ScopeGuard cleared(nullptr);
    EXPECT_EQ(find_scope(&a), nullptr);
  }
  EXPECT_NE(find_scope(&a), nullptr);
}

TEST(CallScope, IsCarriedToAnotherThread) {
  int a = 0;
  ScopeRef captured;
  {
    ScopeGuard guard(scope_of(&a, 9));
    captured = capture_scope();
  }
  std::thread other([&] {
    EXPECT_EQ(find_scope(&a), nullptr);
    ScopeGuard guard(captured);
    ASSERT_NE(find_scope(&a), nullptr);
    EXPECT_EQ(find_scope(&a)->trace.trace_low, 9u);
  });
  other.join();
}

TEST(CancelToken, RunsEachCallbackOnce) {
  CancelToken token;
  int first = 0;
  int removed = 0;
  token.on_cancel([&] { ++first; });
  const uint64_t id = token.on_cancel([&] { ++removed; });
  token.remove(id);
  token.remove(id);
  token.remove(999);
  EXPECT_FALSE(token.cancelled());
  const CancelToken copy = token;
  EXPECT_TRUE(copy.cancel());
  EXPECT_FALSE(token.cancel());
  EXPECT_TRUE(token.cancelled());
  EXPECT_EQ(first, 1);
  EXPECT_EQ(removed, 0);
  int late = 0;
  token.on_cancel([&] { ++late; });
  EXPECT_EQ(late, 1);
}

TEST(CancelToken, KeepsTheFirstReason) {
  const CancelToken token;
  EXPECT_EQ(token.reason(), CancelReason::kNotCancelled);
  CancelReason seen = CancelReason::kNotCancelled;
  token.on_cancel([&] { seen = token.reason(); });
  EXPECT_TRUE(token.cancel(CancelReason::kDeadline));
  EXPECT_FALSE(token.cancel());
  EXPECT_EQ(token.reason(), CancelReason::kDeadline);
  EXPECT_EQ(seen, CancelReason::kDeadline);
  EXPECT_EQ(CancelToken::none().reason(), CancelReason::kNotCancelled);
}

TEST(CancelToken, CallbacksMayUseTheToken) {
  CancelToken token;
  int calls = 0;
  token.on_cancel([&, copy = token] {
    ++calls;
    EXPECT_TRUE(copy.cancelled());
    EXPECT_FALSE(copy.cancel());
    copy.on_cancel([&] { ++calls; });
  });
  EXPECT_TRUE(token.cancel());
  EXPECT_EQ(calls, 2);
}

TEST(CancelToken, OneOfManyThreadsWins) {
  for (int round = 0; round < 50; ++round) {
    CancelToken token;
    std::atomic<int> winners{0};
    std::atomic<int> calls{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        token.on_cancel([&] { ++calls; });
        if (token.cancel()) ++winners;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(calls, 4);
  }
}

class CountingHook : public BlockingHook {
 public:
  absl::Status begin_blocking() override {
    ++begun;
    return refuse ? make_error(ErrorKind::kResource, "no more") : absl::OkStatus();
  }
  void end_blocking() override { ++ended; }

  bool refuse = false;
  int begun = 0;
  int ended = 0;
};

TEST(BlockingRegion, TellsTheHookOfThisThread) {
  { BlockingRegion nobody; }
  CountingHook hook;
  {
    BlockingHookGuard guard(&hook);
    {
      BlockingRegion region;
      EXPECT_TRUE(region.status().ok());
      EXPECT_EQ(hook.ended, 0);
    }
    EXPECT_EQ(hook.begun, 1);
    EXPECT_EQ(hook.ended, 1);
    hook.refuse = true;
    {
      BlockingRegion region;
      EXPECT_EQ(error_kind(region.status()), ErrorKind::kResource);
    }
    // What was refused has not begun.
    EXPECT_EQ(hook.ended, 1);
    std::thread other([] { BlockingRegion region; });
    other.join();
  }
  { BlockingRegion region; }
  EXPECT_EQ(hook.begun, 2);
}

}  // namespace
}  // namespace weft
