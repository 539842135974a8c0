#ifndef WEFT_COMMON_FUTURE_GROUP_H_
#define WEFT_COMMON_FUTURE_GROUP_H_

// when_all, collect_all and when_any: one future for several.

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "weft/common/promise.h"

namespace weft {

// Completes with all values, in order, or with the first error as soon as it is known (the others
// still run to their end). `wait_all` of the field.
template <class T>
Future<std::vector<T>> when_all(std::vector<Future<T>> futures);
inline Future<void> when_all(std::vector<Future<void>> futures);

// Completes when all have completed, whatever their outcome, and gives them back.
template <class T>
Future<std::vector<Future<T>>> collect_all(std::vector<Future<T>> futures);

// Completes with the index of the first that completes, whatever its outcome. REQUIRES: not empty.
template <class T>
Future<size_t> when_any(std::vector<Future<T>> futures);

namespace internal {

template <class T>
std::shared_ptr<Executor> executor_of(const std::vector<Future<T>>& futures) {
  for (const Future<T>& f : futures) {
    if (f.state()->executor() != nullptr) return f.state()->executor();
  }
  return nullptr;
}

// Counts down; `on_last` runs with the last one, `on_error` with each error.
template <class T, class OnError, class OnLast>
void watch_all(const std::vector<Future<T>>& futures, OnError on_error, OnLast on_last) {
  auto left = std::make_shared<std::atomic<size_t>>(futures.size());
  for (const Future<T>& f : futures) {
    auto state = f.state();
    state->on_complete_inline([state, left, on_error, on_last] {
      if (Status s = state->status(); !s.ok()) on_error(s);
      if (left->fetch_sub(1, std::memory_order_acq_rel) == 1) on_last();
    });
  }
}

// The guard of several values together; null when none of them requires one.
class GuardGroup : public ValueGuard {
 public:
  template <class T>
  static std::shared_ptr<ValueGuard> of(const std::vector<Future<T>>& futures) {
    std::vector<std::shared_ptr<ValueGuard>> parts;
    for (const Future<T>& f : futures) {
      if (f.state()->guard() != nullptr) parts.push_back(f.state()->guard());
    }
    return parts.empty() ? nullptr : std::make_shared<GuardGroup>(std::move(parts));
  }
  explicit GuardGroup(std::vector<std::shared_ptr<ValueGuard>> parts) : parts_(std::move(parts)) {}
  void before_use() override {
    for (const auto& part : parts_) part->before_use();
  }
  std::shared_ptr<ValueGuard> derive() override {
    std::vector<std::shared_ptr<ValueGuard>> derived;
    for (const auto& part : parts_) {
      if (auto guard = part->derive(); guard != nullptr) derived.push_back(std::move(guard));
    }
    return derived.empty() ? nullptr : std::make_shared<GuardGroup>(std::move(derived));
  }

 private:
  const std::vector<std::shared_ptr<ValueGuard>> parts_;
};

}  // namespace internal

template <class T>
Future<std::vector<T>> when_all(std::vector<Future<T>> futures) {
  using State = typename Future<std::vector<T>>::State;
  auto child = std::make_shared<State>(internal::executor_of(futures));
  child->set_default_wait(absl::InfiniteDuration());
  if (futures.empty()) child->complete(std::vector<T>{});
  auto shared = std::make_shared<std::vector<Future<T>>>(std::move(futures));
  internal::watch_all(
      *shared, [child](const Status& s) { child->complete(s); },
      [child, shared] {
        std::vector<T> values;
        values.reserve(shared->size());
        for (Future<T>& f : *shared) {
          auto& result = f.state()->result();
          if (!result.ok()) return;  // completed by on_error
          values.push_back(*result);
        }
        child->complete(std::move(values), internal::GuardGroup::of(*shared));
      });
  return Future<std::vector<T>>(std::move(child));
}

inline Future<void> when_all(std::vector<Future<void>> futures) {
  auto child = std::make_shared<Future<void>::State>(internal::executor_of(futures));
  child->set_default_wait(absl::InfiniteDuration());
  if (futures.empty()) child->complete(internal::Unit{});
  internal::watch_all(
      futures, [child](const Status& s) { child->complete(s); },
      [child] { child->complete(internal::Unit{}); });
  return Future<void>(std::move(child));
}

template <class T>
Future<std::vector<Future<T>>> collect_all(std::vector<Future<T>> futures) {
  using State = typename Future<std::vector<Future<T>>>::State;
  auto child = std::make_shared<State>(internal::executor_of(futures));
  child->set_default_wait(absl::InfiniteDuration());
  if (futures.empty()) child->complete(std::vector<Future<T>>{});
  auto shared = std::make_shared<std::vector<Future<T>>>(std::move(futures));
  internal::watch_all(
      *shared, [](const Status&) {}, [child, shared] { child->complete(*shared); });
  return Future<std::vector<Future<T>>>(std::move(child));
}

template <class T>
Future<size_t> when_any(std::vector<Future<T>> futures) {
  auto child = std::make_shared<Future<size_t>::State>(internal::executor_of(futures));
  child->set_default_wait(absl::InfiniteDuration());
  if (futures.empty()) {
    child->complete(
        make_error(ErrorKind::kInvalidArgument, "when_any of no futures never happens"));
  }
  for (size_t i = 0; i < futures.size(); ++i) {
    futures[i].state()->on_complete_inline([child, i] { child->complete(i); });
  }
  return Future<size_t>(std::move(child));
}

}  // namespace weft

#endif  // WEFT_COMMON_FUTURE_GROUP_H_
