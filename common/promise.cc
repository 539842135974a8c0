#include "weft/common/promise.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/ambient.h"
#include "weft/common/internal/pool.h"
#include "weft/common/wake_scope.h"

namespace weft::internal {

Status broken_promise() {
  return make_error(ErrorKind::kInternal, "the promise was dropped without a result");
}

std::unique_ptr<Parker> make_parker_for(Executor* executor) {
  if (executor != nullptr) return executor->make_parker();
  return std::make_unique<SystemParker>();
}

Status FutureCore::wait_done(Timeout timeout) {
  if (done()) return absl::OkStatus();
  const absl::Duration length = timeout.value_or(default_wait_);
  if (length > absl::ZeroDuration()) {
    BlockingRegion region;
    if (!region.status().ok()) return region.status();
    std::shared_ptr<Parker> parker;
    absl::Time deadline = absl::InfiniteFuture();
    if (length < absl::InfiniteDuration()) {
      parker = make_parker_for(executor_.get());
      deadline = deadline_after(parker->now(), length);
    }
    // DRIVE-3; and a thread that already drives does not drive again.
    if (driver_ != nullptr && ambient().blocking_hook == nullptr && !driving() &&
        driver_->drive(done_, deadline)) {
      return absl::OkStatus();
    }
    // Not before: most calls are over by now.
    if (parker == nullptr) parker = make_parker_for(executor_.get());
    {
      MutexLock lock(&mutex_);
      if (done()) return absl::OkStatus();
      waiters_.push_back(parker);
      if (driver_ != nullptr) driver_->begin_sleep();
    }
    parker->park_until(deadline);
    // Without the lock: the completing thread may not have released it yet.
    if (done()) return absl::OkStatus();
    MutexLock lock(&mutex_);
    const auto here = std::find(waiters_.begin(), waiters_.end(), parker);
    if (here != waiters_.end()) {
      waiters_.erase(here);
      if (driver_ != nullptr) driver_->end_sleep();
    }
    if (done()) return absl::OkStatus();
  }
  return make_error(ErrorKind::kDeadline,
                    absl::StrCat("waited ", absl::FormatDuration(length), " for ",
                                 label_.empty() ? "a future" : label_, ", which is not done yet"));
}

void FutureCore::on_complete_inline(Task fn) {
  {
    MutexLock lock(&mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(fn));
      return;
    }
  }
  fn();
}

void FutureCore::on_complete(Task fn) {
  ScopeRef scope = capture_scope();
  on_complete_inline(
      [executor = executor_, scope = std::move(scope), fn = std::move(fn)]() mutable {
        post_or_run(executor.get(), [scope = std::move(scope), fn = std::move(fn)]() mutable {
          ScopeGuard guard(std::move(scope));
          fn();
        });
      });
}

void FutureCore::set_cancel_hook(Task hook) {
  MutexLock lock(&mutex_);
  if (!done()) cancel_hook_ = std::move(hook);
}

Task FutureCore::take_cancel_hook() {
  MutexLock lock(&mutex_);
  Task hook = std::move(cancel_hook_);
  cancel_hook_ = nullptr;
  return hook;
}

void FutureCore::publish() {
  std::vector<Task> callbacks;
  std::vector<std::shared_ptr<Parker>> waiters;
  Task hook;  // dropped outside the lock
  {
    MutexLock lock(&mutex_);
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    hook = std::move(cancel_hook_);
    cancel_hook_ = nullptr;
    waiters.swap(waiters_);
  }
  if (driver_ != nullptr) {
    for (size_t i = 0; i < waiters.size(); ++i) driver_->end_sleep();
    driver_->completed();
  }
  // Outside the lock: a thread that wakes up on this core runs at once, and would wait again.
  if (!waiters.empty()) WakeScope::wake(std::move(waiters));
  for (Task& callback : callbacks) callback();
}

}  // namespace weft::internal
