// Functions that return Future<T> and co_await. g++ 12 destroys what is written inside a co_await
// expression twice (docs/design.md), so every argument with a destructor has a name here; counters
// of live objects and ASan watch.
#include <coroutine>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "weft/common/future.h"
#include "weft/common/manual_executor.h"
#include "weft/common/runtime.h"

namespace weft {
namespace {

struct Live {
  explicit Live(int* c) : count(c) { ++*count; }
  Live(const Live& o) : count(o.count) { ++*count; }
  Live(Live&& o) noexcept : count(o.count) { ++*count; }
  Live& operator=(const Live&) = delete;
  ~Live() { --*count; }
  int* count;
};

Future<int> add_one(Future<int> f) { co_return co_await f + 1; }

Future<int> twice(Future<int> f) {
  const int a = co_await add_one(f);
  const int b = co_await add_one(f);
  co_return a + b;
}

TEST(Coroutine, ReturnsAValue) {
  EXPECT_EQ(add_one(Future<int>::ready(1)).wait(), 2);
  Promise<int> p;
  const Future<int> f = twice(p.future());
  EXPECT_FALSE(f.done());
  p.set_value(10);
  EXPECT_EQ(f.wait(), 22);
}

Future<void> store(Future<std::string> f, std::string* out) { *out = co_await f; }

TEST(Coroutine, ReturnsNothing) {
  Promise<std::string> p;
  std::string out;
  const Future<void> f = store(p.future(), &out);
  EXPECT_FALSE(f.done());
  p.set_value("x");
  EXPECT_TRUE(f.try_wait().ok());
  EXPECT_EQ(out, "x");
}

Future<int> wait_nothing(Future<void> f) {
  co_await f;
  co_return 1;
}

TEST(Coroutine, AwaitsNothing) {
  Promise<void> p;
  const Future<int> f = wait_nothing(p.future());
  p.set_value();
  EXPECT_EQ(f.wait(), 1);
}

Future<int> throws_before(bool yes) {
  if (yes) throw std::invalid_argument("early");
  co_return 0;
}

Future<int> throws_after(Future<int> f) {
  const int v = co_await f;
  if (v > 0) throw std::out_of_range("late");
  co_return v;
}

Future<int> catches(Future<int> f) {
  try {
    co_return co_await f;
  } catch (const Error& e) {
    co_return e.kind() == ErrorKind::kPeerLost ? -1 : -2;
  }
}

Future<int> returns_status(Future<int> f) {
  const int v = co_await f;
  if (v > 0) co_return make_error(ErrorKind::kNotFound, "none");
  co_return v;
}

TEST(Coroutine, ErrorsComeOutOfTheFutureAndOfCoAwait) {
  EXPECT_EQ(throws_before(true).try_wait().status().code(), absl::StatusCode::kInvalidArgument);
  Promise<int> p;
  const Future<int> late = throws_after(p.future());
  const Future<int> status = returns_status(p.future());
  const Future<int> nested = catches(late);
  p.set_value(1);
  EXPECT_EQ(late.try_wait().status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(error_kind(late.try_wait().status()), ErrorKind::kUser);
  EXPECT_EQ(error_kind(status.try_wait().status()), ErrorKind::kNotFound);
  EXPECT_EQ(nested.wait(), -2);
  const Status lost = make_error(ErrorKind::kPeerLost, "gone");
  EXPECT_EQ(catches(Future<int>::ready(lost)).wait(), -1);
  // An error that is not caught passes through with its details.
  EXPECT_EQ(error_kind(add_one(Future<int>::ready(lost)).try_wait().status()),
            ErrorKind::kPeerLost);
  Promise<int> broken;
  const Future<int> f = add_one(broken.future());
  broken = Promise<int>();
  EXPECT_EQ(error_kind(f.try_wait().status()), ErrorKind::kInternal);
}

Future<std::unique_ptr<int>> pass_on(Future<std::unique_ptr<int>> f) {
  std::unique_ptr<int> v = co_await std::move(f);
  ++*v;
  co_return v;
}

TEST(Coroutine, MoveOnlyResults) {
  Promise<std::unique_ptr<int>> p;
  Future<std::unique_ptr<int>> f = pass_on(p.future());
  p.set_value(std::make_unique<int>(4));
  EXPECT_EQ(*std::move(f).wait(), 5);
}

Future<int> holds(Live argument, Future<int> f, bool fail) {
  const Live local(argument);
  const int v = co_await f;
  const Live second(local);
  if (fail) throw 1;
  co_return v + *argument.count;
}

TEST(Coroutine, EverythingIsDestroyedOnce) {
  int live = 0;
  for (const bool fail : {false, true}) {
    {
      Promise<int> p;
      Live argument(&live);
      const Future<int> f = holds(argument, p.future(), fail);
      EXPECT_GT(live, 1);
      p.set_value(1);
      EXPECT_EQ(f.has_error(), fail);
      EXPECT_EQ(live, 1);
    }
    EXPECT_EQ(live, 0);
    {
      // Never completed: the broken promise ends the coroutine.
      Live argument(&live);
      Future<int> f;
      {
        Promise<int> p;
        f = holds(std::move(argument), p.future(), fail);
      }
      EXPECT_TRUE(f.has_error());
    }
    EXPECT_EQ(live, 0);
  }
}

Future<Live> make_live(int* count, Future<int> f) {
  co_await f;
  co_return Live(count);
}

Future<int> uses_live(int* count, Future<int> f) {
  const Live a = co_await make_live(count, f);
  const std::string text = "a text that is too long for the small string";
  auto lambda = [text, a](int) { return static_cast<int>(text.size()) + (a.count != nullptr); };
  const Future<int> inner = f.then(std::move(lambda));
  co_return co_await inner;
}

TEST(Coroutine, ResultsWithDestructors) {
  int live = 0;
  {
    Promise<int> p;
    const Future<int> f = uses_live(&live, p.future());
    p.set_value(1);
    EXPECT_TRUE(f.done());
    EXPECT_FALSE(f.has_error());
  }
  EXPECT_EQ(live, 0);
}

Future<uint64_t> scope_after(const void* worker, Future<int> a, Future<int> b) {
  co_await a;
  const CallScope* first = find_scope(worker);
  const uint64_t id = first == nullptr ? 0 : first->trace.trace_low;
  co_await b;
  const CallScope* second = find_scope(worker);
  co_return second == nullptr ? 0 : id * 1000 + second->trace.trace_low;
}

// FUTURE-2 and FUTURE-3 for co_await.
TEST(Coroutine, ResumesOnTheExecutorWithItsScope) {
  int worker = 0;
  const auto executor = std::make_shared<ManualExecutor>();
  Promise<int> a(executor);
  Promise<int> b(executor);
  Future<uint64_t> f;
  {
    auto scope = std::make_shared<CallScope>();
    scope->worker = &worker;
    scope->trace.trace_low = 7;
    ScopeGuard guard(scope);
    f = scope_after(&worker, a.future(), b.future());
  }
  EXPECT_EQ(find_scope(&worker), nullptr);
  a.set_value(1);
  b.set_value(2);
  EXPECT_FALSE(f.done());
  executor->run_all();
  EXPECT_EQ(f.wait(), 7007u);
  EXPECT_EQ(find_scope(&worker), nullptr);
}

Future<int> sum(std::vector<Future<int>> futures) {
  int total = 0;
  for (const Future<int>& f : futures) total += co_await f;
  co_return total;
}

TEST(Coroutine, ManyOnAPool) {
  const auto runtime = make_system_runtime();
  const auto pool = runtime->make_pool({.name = "pool", .threads = 2});
  for (int round = 0; round < 50; ++round) {
    std::vector<Promise<int>> promises;
    std::vector<Future<int>> futures;
    for (int i = 0; i < 8; ++i) {
      promises.emplace_back(pool);
      futures.push_back(promises.back().future());
    }
    std::thread completer([&] {
      for (int i = 7; i >= 0; --i) promises[static_cast<size_t>(i)].set_value(i);
    });
    EXPECT_EQ(sum(futures).wait(), 28);
    completer.join();
  }
  pool->shutdown();
}

Future<int> chain(const std::shared_ptr<Executor>& pool, int depth) {
  Promise<int> p(pool);
  const Future<int> mine = p.future();
  p.set_value(1);
  int below = 0;
  if (depth > 1) below = co_await chain(pool, depth - 1);
  co_return below + co_await mine;
}

TEST(Coroutine, DeepChainsNeedOneThread) {
  const auto runtime = make_system_runtime();
  const auto pool = runtime->make_pool({.name = "pool", .threads = 1, .max_blocked = 1});
  EXPECT_EQ(chain(pool, 100).wait(), 100);
  pool->shutdown();
}

}  // namespace
}  // namespace weft
