#include "weft/common/future.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/internal/pool.h"
#include "weft/common/manual_executor.h"
#include "weft/common/runtime.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

Status failure() { return make_error(ErrorKind::kPeerLost, "gone"); }

template <class T>
ErrorKind kind_of(const Future<T>& f) {
  EXPECT_TRUE(f.done());
  return error_kind(f.state()->status());
}

// FUTURE-5. Completes a promise on another thread; the one that waits destroys it as soon as it has
// the value, in the middle of the completion.
template <class F>
void expect_that_the_waiter_may_destroy_the_promise(F complete) {
  auto promise = std::make_unique<Promise<int>>();
  const std::weak_ptr<Promise<int>::State> state = promise->state();
  std::latch destroyed(1);
  promise->state()->on_complete_inline([&] {
    destroyed.wait();
    EXPECT_FALSE(state.expired()) << "who completes it is still inside";
  });
  std::thread completer([&complete, p = promise.get()] { complete(*p); });
  (void)promise->future().try_wait();
  promise = nullptr;
  destroyed.count_down();
  completer.join();
  EXPECT_TRUE(state.expired());
}

TEST(Future, TheWaiterMayDestroyThePromiseWhileItCompletes) {
  expect_that_the_waiter_may_destroy_the_promise([](Promise<int>& p) { p.set_value(1); });
  expect_that_the_waiter_may_destroy_the_promise([](Promise<int>& p) { p.set_error(failure()); });
  expect_that_the_waiter_may_destroy_the_promise([](Promise<int>& p) { p.try_set(1); });
}

TEST(Future, APromiseOnTheStackOfTheThreadThatWaits) {
  const auto runtime = make_system_runtime();
  const auto pool = runtime->make_pool({.name = "pool", .threads = 2});
  for (int i = 0; i < 2000; ++i) {
    Promise<int> p;
    pool->post([&p, i] {
      switch (i % 3) {
        case 0: return p.set_value(i);
        case 1: return p.set_error(failure());
        default: EXPECT_TRUE(p.try_set(i));
      }
    });
    EXPECT_EQ(p.future().try_wait().ok(), i % 3 != 1);
  }
  pool->shutdown();
}

// FUTURE-1.
TEST(Future, CompletesOnce) {
  Promise<int> p;
  const Future<int> f = p.future();
  EXPECT_TRUE(f.valid());
  EXPECT_FALSE(f.done());
  EXPECT_FALSE(f.has_error());
  p.set_value(1);
  EXPECT_TRUE(f.done());
  EXPECT_THROW(p.set_value(2), Error);
  EXPECT_THROW(p.set_error(failure()), Error);
  EXPECT_FALSE(p.try_set(3));
  EXPECT_EQ(f.wait(), 1);
  try {
    p.set_value(2);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kState);
  }
}

TEST(Future, OneOfManyCompletionsWins) {
  for (int round = 0; round < 100; ++round) {
    Promise<int> p;
    Future<int> f = p.future();
    std::atomic<int> won{0};
    std::atomic<int> seen{0};
    f.add_done_callback([&](Future<int>) { ++seen; });
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] { won += p.try_set(t) ? 1 : 0; });
    }
    threads.emplace_back([&] { won += f.cancel() ? 1 : 0; });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(won, 1);
    EXPECT_EQ(seen, 1);
  }
}

TEST(Future, APromiseOfNothingIsCompletedByNothingOrByAStatus) {
  Promise<void> done;
  EXPECT_TRUE(done.try_set({}));
  EXPECT_FALSE(done.try_set({}));
  EXPECT_TRUE(done.future().try_wait().ok());

  Promise<void> ok;
  EXPECT_TRUE(ok.try_set(absl::OkStatus()));
  EXPECT_TRUE(ok.future().try_wait().ok());

  Promise<void> failed;
  EXPECT_TRUE(failed.try_set(absl::AbortedError("x")));
  EXPECT_EQ(failed.future().try_wait().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(failed.try_set({}));

  // What generic code has: the stored type, or the result of another future.
  Promise<void> stored;
  EXPECT_TRUE(stored.try_set(StatusOr<internal::Unit>(internal::Unit{})));
  EXPECT_TRUE(stored.future().try_wait().ok());
}

TEST(Future, ABrokenPromiseIsAnError) {
  Future<int> f;
  EXPECT_FALSE(f.valid());
  {
    Promise<int> p;
    f = p.future();
    Promise<int> moved = std::move(p);
    EXPECT_FALSE(f.done());
  }
  EXPECT_EQ(kind_of(f), ErrorKind::kInternal);
  Promise<int> p;
  f = p.future();
  p = Promise<int>();
  EXPECT_TRUE(f.has_error());
  EXPECT_THROW(f.wait(), Error);
}

TEST(Future, WaitsAsOftenAsOneLikes) {
  Promise<std::string> p;
  const Future<std::string> f = p.future();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      EXPECT_EQ(f.wait(), "value");
      EXPECT_EQ(f.wait(), "value");
    });
  }
  p.set_value("value");
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(*f.try_wait(), "value");
  EXPECT_EQ(*f.try_wait(kInfinite), "value");
}

TEST(Future, ATimeoutLeavesTheFutureAlone) {
  Promise<int> p;
  const Future<int> f = p.future();
  f.state()->set_label("call 7 of app.forward on ps0");
  for (const Timeout t : {Timeout(absl::ZeroDuration()), Timeout(absl::Seconds(-1)),
                          Timeout(std::chrono::milliseconds(1))}) {
    const StatusOr<int> result = f.try_wait(t);
    EXPECT_EQ(error_kind(result.status()), ErrorKind::kDeadline);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("call 7 of app.forward on ps0"));
  }
  EXPECT_THROW(f.wait(std::chrono::milliseconds(1)), Error);
  EXPECT_FALSE(f.done());
  p.set_value(5);
  EXPECT_EQ(f.wait(absl::ZeroDuration()), 5);
}

TEST(Future, ErrorsArriveWithTheirDetails) {
  Promise<int> p;
  const Future<int> f = p.future();
  p.set_error(with_details(absl::UnavailableError("gone"),
                           {ErrorKind::kPeerLost, "ps0", "trace", "payload"}));
  EXPECT_TRUE(f.has_error());
  try {
    f.wait();
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kPeerLost);
    EXPECT_EQ(e.origin(), "ps0");
    EXPECT_EQ(e.payload(), "payload");
  }
  EXPECT_EQ(error_details(f.try_wait().status()).remote_trace, "trace");
  Promise<void> ok;
  ok.set_error(absl::OkStatus());  // our bug or theirs, but not a success
  EXPECT_EQ(kind_of(ok.future()), ErrorKind::kInternal);
}

TEST(Future, OfNothing) {
  Promise<void> p;
  const Future<void> f = p.future();
  p.set_value();
  f.wait();
  EXPECT_TRUE(f.try_wait().ok());
  int called = 0;
  EXPECT_EQ(f.then([&] { return ++called; }).wait(), 1);
  f.then([&](Future<void> done) { called += done.done() ? 10 : 0; }).wait();
  EXPECT_EQ(called, 11);
}

TEST(Future, Ready) {
  EXPECT_EQ(Future<int>::ready(3).wait(), 3);
  EXPECT_EQ(kind_of(Future<int>::ready(failure())), ErrorKind::kPeerLost);
  EXPECT_TRUE(Future<void>::ready(internal::Unit{}).done());
  EXPECT_TRUE(Future<void>::ready({}).try_wait().ok());
  EXPECT_EQ(Future<void>::ready(absl::AbortedError("x")).try_wait().code(),
            absl::StatusCode::kAborted);
}

TEST(Future, ThenTakesTheValueOrTheFuture) {
  const Future<int> ok = Future<int>::ready(3);
  const Future<int> bad = Future<int>::ready(failure());
  EXPECT_EQ(ok.then([](int v) { return std::to_string(v); }).wait(), "3");
  EXPECT_EQ(ok.then([](const int& v) { return v + 1; }).then([](int v) { return v * 2; }).wait(),
            8);
  int called = 0;
  const auto passed = bad.then([&](int) { return ++called; });
  EXPECT_EQ(kind_of(passed), ErrorKind::kPeerLost);
  EXPECT_EQ(called, 0);
  EXPECT_TRUE(bad.then([](Future<int> f) { return f.has_error(); }).wait());
  // A generic lambda is given the future.
  EXPECT_EQ(ok.then([](auto f) { return f.wait() + 1; }).wait(), 4);
  ok.then([&](int v) { called = v; }).wait();
  EXPECT_EQ(called, 3);
}

TEST(Future, WhatAContinuationThrowsOrReturnsAsErrorBecomesTheChilds) {
  const Future<int> ok = Future<int>::ready(3);
  const auto thrown = ok.then([](int) -> int { throw std::out_of_range("far"); });
  EXPECT_EQ(thrown.try_wait().status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(kind_of(thrown), ErrorKind::kUser);
  EXPECT_EQ(kind_of(ok.then([](int) -> int { throw 42; })), ErrorKind::kUser);
  EXPECT_EQ(kind_of(ok.then([](int) { return failure(); })), ErrorKind::kPeerLost);
  EXPECT_TRUE(ok.then([](int) { return absl::OkStatus(); }).try_wait().ok());
  EXPECT_EQ(ok.then([](int v) -> StatusOr<int> { return v + 1; }).wait(), 4);
  EXPECT_EQ(kind_of(ok.then([](int) -> StatusOr<int> { return failure(); })), ErrorKind::kPeerLost);
}

TEST(Future, AReturnedFutureIsAwaited) {
  Promise<std::string> inner;
  const Future<int> ok = Future<int>::ready(3);
  const Future<std::string> child = ok.then([&](int) { return inner.future(); });
  EXPECT_FALSE(child.done());
  inner.set_value("in");
  EXPECT_EQ(child.wait(), "in");
  EXPECT_EQ(kind_of(ok.then([](int) { return Future<int>::ready(failure()); })),
            ErrorKind::kPeerLost);
  EXPECT_EQ(kind_of(ok.then([](int) { return Future<int>(); })), ErrorKind::kInvalidArgument);
  Promise<void> nothing;
  const Future<void> flattened = ok.then([&](int) { return nothing.future(); });
  nothing.set_value();
  EXPECT_TRUE(flattened.try_wait().ok());
}

TEST(Future, MoveOnlyResults) {
  Promise<std::unique_ptr<int>> p;
  Future<std::unique_ptr<int>> f = p.future();
  p.set_value(std::make_unique<int>(7));
  EXPECT_EQ(f.then([](const std::unique_ptr<int>& v) { return *v; }).wait(), 7);
  const std::unique_ptr<int> value = std::move(f).wait();
  EXPECT_EQ(*value, 7);
}

TEST(Future, WaitOnTheLastHandleMoves) {
  struct Counted {
    explicit Counted(int* c) : copies(c) {}
    Counted(const Counted& o) : copies(o.copies) { ++*copies; }
    Counted(Counted&&) = default;
    int* copies;
  };
  int copies = 0;
  Future<Counted> f;
  {
    Promise<Counted> p;
    f = p.future();
    p.set_value(Counted(&copies));
  }
  (void)f.wait();
  EXPECT_EQ(copies, 1);
  (void)std::move(f).wait();
  EXPECT_EQ(copies, 1);
}

// FUTURE-2.
TEST(Future, ContinuationsRunOnTheExecutorOfThePromise) {
  const auto executor = std::make_shared<ManualExecutor>();
  Promise<int> p(executor);
  int called = 0;
  const auto child = p.future().then([&](int v) { return called = v; });
  bool inlined = false;
  p.future().state()->on_complete_inline([&] { inlined = true; });
  p.set_value(4);
  EXPECT_TRUE(inlined);
  EXPECT_EQ(called, 0);
  EXPECT_FALSE(child.done());
  // Attached later, still not run where it is attached.
  const auto late = p.future().then([&](int v) { return called + v; });
  EXPECT_FALSE(late.done());
  EXPECT_EQ(executor->run_all(), 2u);
  EXPECT_EQ(called, 4);
  EXPECT_EQ(late.wait(), 8);
  EXPECT_EQ(child.state()->executor(), executor);
  // After the executor's end it runs at once.
  executor->shutdown();
  EXPECT_TRUE(p.future().then([](int v) { return v; }).done());
}

TEST(Future, ContinuationRunsExactlyOnceAgainstARacingCompletion) {
  const auto runtime = make_system_runtime();
  const auto pool = runtime->make_pool({.name = "pool", .threads = 2});
  for (int i = 0; i < 200; ++i) {
    Promise<int> p(pool);
    const Future<int> f = p.future();
    std::atomic<int> calls{0};
    std::latch go(2);
    std::thread completer([&] {
      go.arrive_and_wait();
      p.set_value(i);
    });
    go.arrive_and_wait();
    const auto child = f.then([&](int v) {
      ++calls;
      return v;
    });
    EXPECT_EQ(child.wait(), i);
    EXPECT_EQ(calls, 1);
    completer.join();
  }
  pool->shutdown();
}

// FUTURE-3.
TEST(Future, ContinuationsSeeTheScopeTheyWereAttachedIn) {
  int worker = 0;
  const auto executor = std::make_shared<ManualExecutor>();
  Promise<int> p(executor);
  uint64_t seen = 0;
  {
    auto scope = std::make_shared<CallScope>();
    scope->worker = &worker;
    scope->trace.trace_low = 77;
    ScopeGuard guard(scope);
    p.future().add_done_callback([&](Future<int>) {
      if (const CallScope* s = find_scope(&worker)) seen = s->trace.trace_low;
    });
  }
  p.set_value(1);
  executor->run_all();
  EXPECT_EQ(seen, 77u);
  EXPECT_EQ(find_scope(&worker), nullptr);
}

TEST(Future, CancelCompletesAndTellsTheProducer) {
  Promise<int> p;
  int told = 0;
  p.on_cancel([&] { ++told; });
  Future<int> f = p.future();
  EXPECT_TRUE(f.cancel());
  EXPECT_FALSE(f.cancel());
  EXPECT_EQ(told, 1);
  EXPECT_EQ(f.try_wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(kind_of(f), ErrorKind::kCancelled);
  EXPECT_FALSE(p.try_set(1));
  // Complete: nothing to cancel, and the hook is gone, with what it holds.
  Promise<int> done;
  const auto held = std::make_shared<int>(1);
  done.on_cancel([held] { FAIL(); });
  EXPECT_EQ(held.use_count(), 2);
  done.set_value(1);
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_FALSE(done.future().cancel());
}

TEST(Future, CallbackWithoutResultMayThrow) {
  Promise<int> p;
  p.future().add_done_callback([](Future<int>) { throw 1; });
  p.set_value(1);
  EXPECT_EQ(p.future().wait(), 1);
}

TEST(Future, WhatContinuationsHoldIsReleased) {
  const auto held = std::make_shared<int>(0);
  {
    Promise<int> p;
    const auto child = p.future().then([held](int v) { return v; });
    EXPECT_EQ(held.use_count(), 2);
    p.set_value(1);
    EXPECT_EQ(held.use_count(), 1);
    EXPECT_EQ(child.wait(), 1);
  }
}

TEST(WhenAll, GivesTheValuesInOrder) {
  std::vector<Promise<int>> promises(5);
  std::vector<Future<int>> futures;
  for (auto& p : promises) futures.push_back(p.future());
  const auto all = when_all(futures);
  for (const size_t i : {3u, 0u, 4u, 2u}) promises[i].set_value(static_cast<int>(i));
  EXPECT_FALSE(all.done());
  promises[1].set_value(1);
  EXPECT_EQ(all.wait(), (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(when_all(std::vector<Future<int>>{}).wait().empty());
}

TEST(WhenAll, GivesTheFirstErrorAtOnce) {
  std::vector<Promise<int>> promises(3);
  std::vector<Future<int>> futures;
  for (auto& p : promises) futures.push_back(p.future());
  const auto all = when_all(futures);
  promises[1].set_error(failure());
  EXPECT_EQ(kind_of(all), ErrorKind::kPeerLost);
  promises[0].set_error(absl::AbortedError("later"));
  promises[2].set_value(1);
  EXPECT_EQ(kind_of(all), ErrorKind::kPeerLost);
}

TEST(WhenAll, OfNothings) {
  std::vector<Promise<void>> promises(2);
  const Future<void> all =
      when_all(std::vector<Future<void>>{promises[0].future(), promises[1].future()});
  promises[0].set_value();
  EXPECT_FALSE(all.done());
  promises[1].set_value();
  EXPECT_TRUE(all.try_wait().ok());
  EXPECT_TRUE(when_all(std::vector<Future<void>>{}).try_wait().ok());
  Promise<void> bad;
  const Future<void> failed = when_all(std::vector<Future<void>>{bad.future()});
  bad.set_error(failure());
  EXPECT_EQ(kind_of(failed), ErrorKind::kPeerLost);
}

TEST(WhenAll, FromManyThreads) {
  for (int round = 0; round < 50; ++round) {
    std::vector<Promise<int>> promises(4);
    std::vector<Future<int>> futures;
    for (auto& p : promises) futures.push_back(p.future());
    const auto all = when_all(futures);
    const auto collected = collect_all(futures);
    const auto any = when_any(futures);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] { promises[i].set_value(static_cast<int>(i)); });
    }
    EXPECT_EQ(all.wait(), (std::vector<int>{0, 1, 2, 3}));
    EXPECT_EQ(collected.wait().size(), 4u);
    EXPECT_LT(any.wait(), 4u);
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(CollectAll, GivesAllWhateverTheirOutcome) {
  std::vector<Promise<int>> promises(2);
  const auto all =
      collect_all(std::vector<Future<int>>{promises[0].future(), promises[1].future()});
  promises[0].set_error(failure());
  EXPECT_FALSE(all.done());
  promises[1].set_value(2);
  const auto futures = all.wait();
  EXPECT_TRUE(futures[0].has_error());
  EXPECT_EQ(futures[1].wait(), 2);
  EXPECT_TRUE(collect_all(std::vector<Future<int>>{}).wait().empty());
}

TEST(WhenAny, GivesTheIndexOfTheFirst) {
  std::vector<Promise<int>> promises(3);
  std::vector<Future<int>> futures;
  for (auto& p : promises) futures.push_back(p.future());
  const auto any = when_any(futures);
  EXPECT_FALSE(any.done());
  promises[2].set_error(failure());
  promises[0].set_value(1);
  EXPECT_EQ(any.wait(), 2u);
  EXPECT_EQ(kind_of(when_any(std::vector<Future<int>>{})), ErrorKind::kInvalidArgument);
}

TEST(Future, WaitingHandlersDoNotExhaustThePool) {
  const auto runtime = make_system_runtime();
  const auto pool = runtime->make_pool({.name = "pool", .threads = 1});
  // Each task waits for one that is posted after it.
  std::function<Future<int>(int)> nest = [&](int depth) -> Future<int> {
    Promise<int> p(pool);
    Future<int> f = p.future();
    EXPECT_TRUE(pool->post([&nest, depth, p = std::move(p)]() mutable {
      p.set_value(depth == 0 ? 0 : nest(depth - 1).wait() + 1);
    }));
    return f;
  };
  EXPECT_EQ(nest(100).wait(), 100);
  pool->shutdown();
}

TEST(Future, AWaitBeyondThePoolsBoundFails) {
  internal::Pool pool({.name = "handlers", .threads = 1, .max_blocked = 0});
  Promise<int> never;
  Promise<ErrorKind> outcome;
  EXPECT_TRUE(pool.post(
      [&] { outcome.set_value(error_kind(never.future().try_wait(kInfinite).status())); }));
  EXPECT_EQ(outcome.future().wait(), ErrorKind::kResource);
  pool.shutdown();
}

}  // namespace
}  // namespace weft
