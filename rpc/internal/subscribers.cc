#include "weft/rpc/internal/subscribers.h"

#include <thread>
#include <utility>

#include "weft/common/condition.h"

namespace weft::internal {

struct Subscribers::Subscriber {
  Subscriber(std::shared_ptr<Runtime> r, std::function<void(const MembershipChange&)> f)
      : runtime(std::move(r)), on_change(std::move(f)), idle(runtime.get()) {}

  void tell(const MembershipChange& change, Logger& log) {
    {
      MutexLock lock(&mutex);
      if (ended) return;
      runner = std::this_thread::get_id();
    }
    try {
      on_change(change);
    } catch (...) {
      WEFT_LOG(log, kError) << "a membership subscriber threw: " << status_from_current_exception();
    }
    {
      MutexLock lock(&mutex);
      runner = std::thread::id();
    }
    idle.notify_all();
  }

  void end() {
    MutexLock lock(&mutex);
    ended = true;
    if (runner == std::this_thread::get_id()) return;  // it ends itself
    while (runner != std::thread::id()) {
      // Refused only where too many handlers wait; then it is looked at again and again.
      if (!idle.wait_until(&mutex, absl::InfiniteFuture()).ok()) std::this_thread::yield();
    }
  }

  const std::shared_ptr<Runtime> runtime;
  const std::function<void(const MembershipChange&)> on_change;
  Mutex mutex;
  Condition idle;
  std::thread::id runner ABSL_GUARDED_BY(mutex);  // who is in on_change
  bool ended ABSL_GUARDED_BY(mutex) = false;
};

Worker::Subscription Subscribers::subscribe(
    std::function<void(const MembershipChange&)> on_change) {
  auto subscriber = std::make_shared<Subscriber>(runtime_, std::move(on_change));
  {
    MutexLock lock(&mutex_);
    subscribers_.push_back(subscriber);
  }
  return Worker::Subscription(subscriber.get(), [subscriber](void*) { subscriber->end(); });
}

void Subscribers::tell(const MembershipChange& change) {
  std::vector<std::shared_ptr<Subscriber>> live;
  {
    MutexLock lock(&mutex_);
    for (auto it = subscribers_.begin(); it != subscribers_.end();) {
      if (auto s = it->lock()) {
        live.push_back(std::move(s));
        ++it;
      } else {
        it = subscribers_.erase(it);
      }
    }
  }
  for (const auto& s : live) s->tell(change, log_);
}

}  // namespace weft::internal
