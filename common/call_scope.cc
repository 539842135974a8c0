#include "weft/common/call_scope.h"

#include <utility>

#include "weft/common/internal/ambient.h"
#include "weft/common/wake_scope.h"

namespace weft {
namespace internal {

Ambient& ambient() {
  thread_local Ambient value;
  return value;
}

}  // namespace internal

using internal::ambient;

CancelToken::CancelToken() : state_(std::make_shared<State>()) {}

uint64_t CancelToken::on_cancel(absl::AnyInvocable<void()> fn) const {
  if (state_ == nullptr) return 0;
  {
    MutexLock lock(&state_->mutex);
    if (state_->reason.load(std::memory_order_relaxed) == CancelReason::kNotCancelled) {
      const uint64_t id = state_->next_id++;
      state_->callbacks.emplace(id, std::move(fn));
      return id;
    }
  }
  fn();
  return 0;
}

void CancelToken::remove(uint64_t id) const {
  if (state_ == nullptr) return;
  absl::AnyInvocable<void()> dropped;  // destroyed outside the lock: it may own anything
  {
    MutexLock lock(&state_->mutex);
    auto it = state_->callbacks.find(id);
    if (it == state_->callbacks.end()) return;
    dropped = std::move(it->second);
    state_->callbacks.erase(it);
  }
}

bool CancelToken::watched() const {
  if (state_ == nullptr) return false;
  MutexLock lock(&state_->mutex);
  return !state_->callbacks.empty();
}

bool CancelToken::cancel(CancelReason why) const {
  if (state_ == nullptr) return false;
  std::map<uint64_t, absl::AnyInvocable<void()>> callbacks;
  {
    MutexLock lock(&state_->mutex);
    if (cancelled()) return false;
    state_->reason.store(why, std::memory_order_release);
    callbacks.swap(state_->callbacks);
  }
  for (auto& [id, fn] : callbacks) fn();
  return true;
}

ScopeRef capture_scope() { return ambient().scope; }

const CallScope* find_scope(const void* worker) {
  for (const CallScope* s = ambient().scope.get(); s != nullptr; s = s->outer.get()) {
    if (s->worker == worker) return s;
  }
  return nullptr;
}

ScopeGuard::ScopeGuard(ScopeRef scope)
    : previous_(std::exchange(ambient().scope, std::move(scope))) {
  const CallScope* const now = ambient().scope.get();
  if (now != nullptr && now->attachment != nullptr) entry_ = now->attachment->enter();
}
ScopeGuard::~ScopeGuard() {
  entry_ = nullptr;
  ambient().scope = std::move(previous_);
}

bool on_pool_thread() { return ambient().blocking_hook != nullptr; }

BlockingHookGuard::BlockingHookGuard(BlockingHook* hook)
    : previous_(std::exchange(ambient().blocking_hook, hook)) {}
BlockingHookGuard::~BlockingHookGuard() { ambient().blocking_hook = previous_; }

BlockingRegion::BlockingRegion() : hook_(ambient().blocking_hook) {
  WakeScope::flush();  // WAKE-1
  if (hook_ == nullptr) return;
  status_ = hook_->begin_blocking();
  if (!status_.ok()) hook_ = nullptr;
}

BlockingRegion::~BlockingRegion() {
  if (hook_ != nullptr) hook_->end_blocking();
}

}  // namespace weft
