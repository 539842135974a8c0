#ifndef WEFT_COMMON_PROMISE_H_
#define WEFT_COMMON_PROMISE_H_

// Future<T> and Promise<T>: a result that arrives once, as a value or as an error.
//
//   weft::Future<at::Tensor> f = weft::rpc_async(worker, "ps0", &forward, x);
//   at::Tensor y = f.wait();                          // throws weft::Error
//   absl::StatusOr<at::Tensor> r = f.try_wait(5s);    // the same without exceptions
//   auto g = f.then([](at::Tensor y) { return y.sum(); });
//   at::Tensor z = co_await g;                        // inside a function that returns Future<...>
//
// FUTURE-1: every future completes exactly once; a promise that is dropped completes it with an
//           error. A second completion is refused.
// FUTURE-2: a continuation runs exactly once, on the executor of the promise (the worker's pool),
//           never on the thread that completes; without an executor, or after its shutdown, it runs
//           where it is completed, or in then() when that is later.
// FUTURE-3: continuations see the CallScope that was ambient when they were attached.
//
// FUTURE-4: before a thread gets the value, by waiting or in a continuation, it makes what it
//           queues on devices come after the work that makes the value (ValueGuard); no thread is
//           blocked for that work.
// FUTURE-5: a thread that sees a future complete may destroy its promise, even while the call that
//           completes it has not returned: a promise on the stack of the waiting thread.
//
// A Future is a cheap shared handle: copying it shares the result; any number of threads may wait,
// any number of times. It may outlive the worker. A Future cannot be sent.

#include <atomic>
#include <coroutine>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/call_scope.h"
#include "weft/common/error.h"
#include "weft/common/executor.h"
#include "weft/common/mutex.h"
#include "weft/common/time.h"
#include "weft/common/value_guard.h"
#include "weft/common/wait_driver.h"

namespace weft {

template <class T>
class Future;
template <class T>
class Promise;

namespace internal {

struct Unit {};
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, Unit, T>;

// What completes a Future<void>: {}, a Status (OK: done), or what generic code has.
struct VoidResult {
  VoidResult(Status status = {})  // NOLINT(google-explicit-constructor)
      : stored(status.ok() ? StatusOr<Unit>(Unit{}) : StatusOr<Unit>(std::move(status))) {}
  VoidResult(Unit unit) : stored(unit) {}  // NOLINT(google-explicit-constructor)
  VoidResult(StatusOr<Unit> result)        // NOLINT(google-explicit-constructor)
      : stored(std::move(result)) {}
  StatusOr<Unit> stored;
};
template <class T>
using Result = std::conditional_t<std::is_void_v<T>, VoidResult, StatusOr<Stored<T>>>;
inline StatusOr<Unit> to_stored(VoidResult result) { return std::move(result.stored); }
template <class S>
StatusOr<S> to_stored(StatusOr<S> result) {
  return result;
}

// The part of a future's state that does not depend on the type of the value.
class WEFT_API FutureCore {
 public:
  explicit FutureCore(std::shared_ptr<Executor> executor) : executor_(std::move(executor)) {}
  virtual ~FutureCore() = default;
  FutureCore(const FutureCore&) = delete;
  FutureCore& operator=(const FutureCore&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // True once one thread has acquired the right to complete; no other thread can acquire it.
  bool claimed() const { return claimed_.load(std::memory_order_acquire); }
  // OK when completed before `timeout`; unset means default_wait().
  Status wait_done(Timeout timeout);
  // Runs `fn` on completion, on the thread that completes (or here, now, when already complete).
  // Framework code only: `fn` is short, takes no lock held around a completion, calls no user code.
  void on_complete_inline(Task fn);
  // FUTURE-2 and FUTURE-3.
  void on_complete(Task fn);

  // Sets what cancel() does besides completing. The producer of the value sets it.
  void set_cancel_hook(Task hook);
  // The hook, which is then gone; null when there is none.
  Task take_cancel_hook();

  const std::shared_ptr<Executor>& executor() const { return executor_; }
  // REQUIRES: no other thread has seen this future yet.
  void adopt_executor(const std::shared_ptr<Executor>& executor) {
    if (executor_ == nullptr) executor_ = executor;
  }
  // The longest that wait() without an argument waits. Calls set it to infinite, because a call
  // ends by its own deadline.
  void set_default_wait(absl::Duration d) { default_wait_ = d; }
  // Sets what a waiting thread may do instead of sleeping. REQUIRES: no thread waits yet.
  void set_wait_driver(std::shared_ptr<WaitDriver> driver) { driver_ = std::move(driver); }
  // FUTURE-4. REQUIRES: done().
  void before_use() const {
    if (guard_ != nullptr) guard_->before_use();
  }
  const std::shared_ptr<ValueGuard>& guard() const { return guard_; }
  // For a value made from this future's on the calling thread.
  std::shared_ptr<ValueGuard> derived_guard() const {
    return guard_ == nullptr ? nullptr : guard_->derive();
  }
  // Marks the future of a coroutine: it completes when the body has ended, its locals included.
  void set_coroutine() { coroutine_ = true; }
  bool of_coroutine() const { return coroutine_; }
  // Names the awaited thing in errors.
  void set_label(std::string label) { label_ = std::move(label); }

 protected:
  // Claims the right to complete: true for exactly one caller (FUTURE-1).
  bool claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }
  // Publishes the result that the claimant has stored; wakes all waiters and runs all
  // continuations.
  void publish();
  // The claimant's, before it publishes.
  std::shared_ptr<ValueGuard> guard_;

 private:
  std::shared_ptr<Executor> executor_;
  absl::Duration default_wait_ = absl::Seconds(60);
  std::string label_;
  bool coroutine_ = false;
  std::shared_ptr<WaitDriver> driver_;
  std::atomic<bool> claimed_{false};
  std::atomic<bool> done_{false};

  Mutex mutex_;
  std::vector<Task> callbacks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Parker>> waiters_ ABSL_GUARDED_BY(mutex_);
  Task cancel_hook_ ABSL_GUARDED_BY(mutex_);
};

template <class S>
class FutureState : public FutureCore {
 public:
  using FutureCore::FutureCore;

  bool complete(StatusOr<S> result, std::shared_ptr<ValueGuard> guard = nullptr) {
    if (!claim()) return false;
    result_.emplace(std::move(result));
    guard_ = std::move(guard);
    publish();
    return true;
  }
  // REQUIRES: done().
  StatusOr<S>& result() { return *result_; }
  Status status() { return result_->ok() ? absl::OkStatus() : result_->status(); }

 private:
  std::optional<StatusOr<S>> result_;
};

template <class T>
struct IsFuture : std::false_type {};
template <class T>
struct IsFuture<Future<T>> : std::true_type {
  using Value = T;
};

// What a continuation returns, as the type of the child future: Future<Future<U>> flattens.
template <class R>
struct ChildOf {
  using Type = R;
};
template <class U>
struct ChildOf<Future<U>> {
  using Type = U;
};
template <class U>
struct ChildOf<StatusOr<U>> {
  using Type = U;
};
template <>
struct ChildOf<Status> {
  using Type = void;
};

WEFT_API WEFT_COLD Status broken_promise();
WEFT_API std::unique_ptr<Parker> make_parker_for(Executor* executor);

}  // namespace internal

template <class T>
class [[nodiscard]] Future {
 public:
  using Value = T;                                           // the type of the value
  using State = internal::FutureState<internal::Stored<T>>;  // for the framework
  struct promise_type;

  // An invalid future; only assignment and valid() are allowed.
  Future() = default;
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Already completed. A Future<void> by {} or a Status.
  static Future ready(internal::Result<T> result) {
    auto state = std::make_shared<State>(nullptr);
    state->complete(internal::to_stored(std::move(result)));
    return Future(std::move(state));
  }

  bool valid() const { return state_ != nullptr; }  // refers to a result
  bool done() const { return state_->done(); }      // has a value or an error
  // Done, with an error.
  bool has_error() const { return done() && !state_->status().ok(); }

  // Waits, then returns the value (a copy; moved out of the last handle when called on an rvalue).
  // Throws weft::Error: the future's own, or kind deadline when `timeout` is over first (60 s
  // unless given; without limit for calls, which end by their own deadline). The future is not
  // touched by that. REQUIRES: not on a poller; a waiting handler gives its thread back meanwhile.
  T wait(Timeout timeout = {}) const& {
    throw_if_error(state_->wait_done(timeout));
    state_->before_use();
    throw_if_error(state_->status());
    if constexpr (!std::is_void_v<T>) return *state_->result();
  }
  T wait(Timeout timeout = {}) && {
    throw_if_error(state_->wait_done(timeout));
    state_->before_use();
    throw_if_error(state_->status());
    if constexpr (!std::is_void_v<T>) {
      if (state_.use_count() == 1) return *std::move(state_->result());
      if constexpr (std::is_copy_constructible_v<T>) {
        return *state_->result();
      } else {
        return *std::move(state_->result());
      }
    }
  }
  // What try_wait() returns: a Status for a Future<void>, otherwise a StatusOr of the value.
  using TryResult = std::conditional_t<std::is_void_v<T>, Status, StatusOr<internal::Stored<T>>>;
  // The same without exceptions.
  TryResult try_wait(Timeout timeout = {}) const {
    if (Status s = state_->wait_done(timeout); !s.ok()) return s;
    state_->before_use();
    if constexpr (std::is_void_v<T>) {
      return state_->status();
    } else {
      return state_->result();
    }
  }

  // Completes the future with `cancelled` unless it is complete, and notifies the producer of the
  // value: a call's callee sees it in its CallContext. Returns false when it was already complete.
  bool cancel() {
    // Completed first: the hook makes the producer complete it too, and the caller's word counts.
    Task hook = state_->take_cancel_hook();
    if (!state_->complete(make_error(ErrorKind::kCancelled, "cancelled by the caller")))
      return false;
    if (hook != nullptr) hook();
    return true;
  }

  // Calls `f` on completion and gives a future of what it returns. `f` takes the completed
  // Future<T> (always called), or the value (called on success; an error passes through). What `f`
  // throws, and an error Status it returns, becomes the child's error; a returned Future is
  // awaited.
  template <class F>
  auto then(F f) const;

  // `f` takes the completed Future<T>; what it throws is dropped. No child is made.
  template <class F>
  void add_done_callback(F f) const {
    state_->on_complete([state = state_, f = std::move(f)]() mutable {
      state->before_use();
      try {
        f(Future(state));
      } catch (...) {
        // The caller chose a callback without a result, so the exception has no recipient.
      }
    });
  }

  const std::shared_ptr<State>& state() const { return state_; }  // for the framework

  auto operator co_await() const&;
  auto operator co_await() &&;

 private:
  std::shared_ptr<State> state_;
};

template <class T>
class Promise {
 public:
  using State = typename Future<T>::State;  // for the framework

  // Continuations of the future run on `executor`; without one, where it is completed.
  explicit Promise(std::shared_ptr<Executor> executor = nullptr)
      : state_(std::make_shared<State>(std::move(executor))) {}
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    abandon();
    state_ = std::move(other.state_);
    return *this;
  }
  ~Promise() { abandon(); }

  Future<T> future() const { return Future<T>(state_); }

  // False when it was complete already (cancelled by the consumer, for instance). A Promise<void>
  // is completed by try_set({}), or by a Status.
  bool try_set(internal::Result<T> result, std::shared_ptr<ValueGuard> guard = nullptr) {
    const auto keep = state_;  // FUTURE-5
    return keep->complete(internal::to_stored(std::move(result)), std::move(guard));
  }

  // These throw weft::Error (kind state) on a second completion.
  template <class U = internal::Stored<T>>
  void set_value(U&& value = {}) {
    const auto keep = state_;  // FUTURE-5
    check_first(keep->complete(internal::Stored<T>(std::forward<U>(value))));
  }
  void set_error(Status error) {
    if (error.ok()) error = make_error(ErrorKind::kInternal, "set_error was given an OK status");
    const auto keep = state_;  // FUTURE-5
    check_first(keep->complete(std::move(error)));
  }

  // Runs when the consumer cancels. Short; on the consumer's thread.
  void on_cancel(Task hook) { state_->set_cancel_hook(std::move(hook)); }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  static void check_first(bool first) {
    if (!first) {
      throw_error(make_error(ErrorKind::kState, "a promise can be completed only once"));
    }
  }
  void abandon() {
    // Asked first, because the error is dearer than the rest of a promise's life.
    if (state_ != nullptr && !state_->claimed()) state_->complete(internal::broken_promise());
  }

  std::shared_ptr<State> state_;
};

namespace internal {

// Runs `f(args...)` on the value of `parent` and completes `child` with what it returns or throws.
template <class R, class F, class... Args>
void run_into(const FutureCore& parent,
              const std::shared_ptr<FutureState<Stored<typename ChildOf<R>::Type>>>& child, F& f,
              Args&&... args) {
  parent.before_use();
  try {
    if constexpr (std::is_void_v<R>) {
      f(std::forward<Args>(args)...);
      child->complete(Unit{}, parent.derived_guard());
    } else if constexpr (IsFuture<R>::value) {
      auto inner = f(std::forward<Args>(args)...);
      if (!inner.valid()) {
        child->complete(make_error(ErrorKind::kInvalidArgument, "an invalid Future was returned"));
        return;
      }
      auto state = inner.state();
      state->on_complete_inline(
          [state, child] { child->complete(state->result(), state->guard()); });
    } else if constexpr (std::is_same_v<R, Status>) {
      Status s = f(std::forward<Args>(args)...);
      if (s.ok()) {
        child->complete(Unit{}, parent.derived_guard());
      } else {
        child->complete(std::move(s));
      }
    } else {
      StatusOr<Stored<typename ChildOf<R>::Type>> result = f(std::forward<Args>(args)...);
      child->complete(std::move(result), parent.derived_guard());
    }
  } catch (...) {
    child->complete(status_from_current_exception());
  }
}

template <class T>
struct Awaiter {
  std::shared_ptr<FutureState<Stored<T>>> state;

  bool await_ready() const noexcept { return state->done(); }
  template <class P>
  void await_suspend(std::coroutine_handle<P> handle) {
    if constexpr (requires { handle.promise().adopt_executor(state->executor()); }) {
      handle.promise().adopt_executor(state->executor());
    }
    // Resuming may destroy the frame, this awaiter in it, before on_complete() returns.
    const auto keep = state;
    keep->on_complete([handle] { handle.resume(); });
  }
  T await_resume() {
    state->before_use();
    throw_if_error(state->status());
    if constexpr (!std::is_void_v<T>) {
      if constexpr (std::is_copy_constructible_v<T>) {
        return *state->result();
      } else {
        return *std::move(state->result());
      }
    }
  }
};

template <class T, class Derived>
struct CoroutinePromise {
  Promise<T> promise;
  std::optional<StatusOr<Stored<T>>> result;  // when the body has ended

  Future<T> get_return_object() {
    promise.state()->set_default_wait(absl::InfiniteDuration());
    promise.state()->set_coroutine();
    return promise.future();
  }
  // Starts at once on the caller's thread; ends by destroying itself.
  std::suspend_never initial_suspend() noexcept { return {}; }
  // The locals of the body are destroyed by now: a reader of the result meets none of them.
  std::suspend_never final_suspend() noexcept {
    promise.try_set(*std::move(result));
    return {};
  }
  // The coroutine's own future gets its executor from the first future that it awaits. No other
  // thread has seen it by then: the caller receives it when the coroutine first suspends.
  void adopt_executor(const std::shared_ptr<Executor>& executor) {
    promise.state()->adopt_executor(executor);
  }
  void unhandled_exception() { result.emplace(status_from_current_exception()); }
};

}  // namespace internal

template <class T>
struct Future<T>::promise_type : internal::CoroutinePromise<T, promise_type> {
  void return_value(StatusOr<T> value) { this->result.emplace(std::move(value)); }
};
template <>
struct Future<void>::promise_type : internal::CoroutinePromise<void, promise_type> {
  void return_void() { this->result.emplace(internal::Unit{}); }
};

template <class T>
auto Future<T>::operator co_await() const& {
  return internal::Awaiter<T>{state_};
}
template <class T>
auto Future<T>::operator co_await() && {
  return internal::Awaiter<T>{std::move(state_)};
}

template <class T>
template <class F>
auto Future<T>::then(F f) const {
  if constexpr (std::is_invocable_v<F&, Future<T>>) {
    using R = std::invoke_result_t<F&, Future<T>>;
    using Child = typename internal::ChildOf<R>::Type;
    auto child = std::make_shared<typename Future<Child>::State>(state_->executor());
    state_->on_complete([state = state_, child, f = std::move(f)]() mutable {
      internal::run_into<R>(*state, child, f, Future<T>(state));
    });
    return Future<Child>(std::move(child));
  } else if constexpr (std::is_void_v<T>) {
    static_assert(std::is_invocable_v<F&>,
                  "then() takes a function of Future<void>, or of nothing");
    using R = std::invoke_result_t<F&>;
    using Child = typename internal::ChildOf<R>::Type;
    auto child = std::make_shared<typename Future<Child>::State>(state_->executor());
    state_->on_complete([state = state_, child, f = std::move(f)]() mutable {
      if (Status s = state->status(); !s.ok()) {
        child->complete(std::move(s));
      } else {
        internal::run_into<R>(*state, child, f);
      }
    });
    return Future<Child>(std::move(child));
  } else {
    static_assert(std::is_invocable_v<F&, const T&>,
                  "then() takes a function of Future<T>, or of the value");
    using R = std::invoke_result_t<F&, const T&>;
    using Child = typename internal::ChildOf<R>::Type;
    auto child = std::make_shared<typename Future<Child>::State>(state_->executor());
    state_->on_complete([state = state_, child, f = std::move(f)]() mutable {
      if (!state->result().ok()) {
        child->complete(state->result().status());
      } else {
        internal::run_into<R>(*state, child, f, std::as_const(*state->result()));
      }
    });
    return Future<Child>(std::move(child));
  }
}

}  // namespace weft

#endif  // WEFT_COMMON_PROMISE_H_
