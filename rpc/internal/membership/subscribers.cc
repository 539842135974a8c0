#include "weft/rpc/internal/membership/subscribers.h"

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "weft/common/condition.h"

namespace weft::internal {
namespace {

// A subscriber so far behind, and each time so much further, is named in the log.
constexpr size_t kFarBehind = 1024;

using Change = std::shared_ptr<const MembershipChange>;

}  // namespace

class Subscribers::Subscriber : public std::enable_shared_from_this<Subscriber> {
 public:
  Subscriber(std::shared_ptr<Runtime> runtime, const std::shared_ptr<Executor>& pool, Logger log,
             std::function<void(const MembershipChange&)> on_change)
      : runtime_(std::move(runtime)),
        pool_(pool),
        log_(std::move(log)),
        on_change_(std::move(on_change)),
        idle_(runtime_.get()) {}

  void tell(const Change& change) ABSL_LOCKS_EXCLUDED(mutex_) {
    size_t behind = 0;
    bool scheduled = false;
    {
      MutexLock lock(&mutex_);
      if (ended_) return;
      queue_.push_back(change);
      behind = queue_.size();
      scheduled = std::exchange(scheduled_, true);
    }
    if (behind % kFarBehind == 0) {
      WEFT_LOG(log_, kWarning) << "a membership subscriber is " << behind
                               << " changes behind: it blocks, or takes too long";
    }
    if (scheduled) return;
    const std::shared_ptr<Executor> pool = pool_.lock();
    if (pool != nullptr && pool->post([self = shared_from_this()] { self->run(); })) return;
    // The pool of a worker that has left takes nothing more, and there is nothing more to hear.
    MutexLock lock(&mutex_);
    ended_ = true;
    queue_.clear();
  }

  void end() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::function<void(const MembershipChange&)> over;  // goes without the mutex
    MutexLock lock(&mutex_);
    ended_ = true;
    queue_.clear();
    if (runner_ == std::this_thread::get_id()) return;  // it ends itself
    while (runner_ != std::thread::id()) {
      // Refused only where too many handlers wait; then it is looked at again and again.
      if (!idle_.wait_until(&mutex_, absl::InfiniteFuture()).ok()) std::this_thread::yield();
    }
    over = std::move(on_change_);
  }

  bool runs_here() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return runner_ == std::this_thread::get_id();
  }

 private:
  // On the pool: all that is queued.
  void run() ABSL_LOCKS_EXCLUDED(mutex_) {
    while (true) {
      Change change;
      {
        MutexLock lock(&mutex_);
        runner_ = std::thread::id();
        if (!queue_.empty()) {
          change = std::move(queue_.front());
          queue_.pop_front();
          runner_ = std::this_thread::get_id();
        }
        scheduled_ = change != nullptr;
      }
      if (change == nullptr) return idle_.notify_all();
      try {
        on_change_(*change);
      } catch (...) {
        WEFT_LOG(log_, kError) << "a membership subscriber threw: "
                               << status_from_current_exception();
      }
    }
  }

  const std::shared_ptr<Runtime> runtime_;
  // A task of the pool may be the last that has this subscriber, and must not be the last that has
  // the pool: its destructor waits for its tasks.
  const std::weak_ptr<Executor> pool_;
  const Logger log_;
  std::function<void(const MembershipChange&)> on_change_;  // called by one task at a time
  mutable Mutex mutex_;
  Condition idle_;
  std::deque<Change> queue_ ABSL_GUARDED_BY(mutex_);
  bool scheduled_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread::id runner_ ABSL_GUARDED_BY(mutex_);  // that is in on_change
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

Worker::Subscription Subscribers::subscribe(
    std::function<void(const MembershipChange&)> on_change) {
  auto subscriber = std::make_shared<Subscriber>(runtime_, pool_, log_, std::move(on_change));
  {
    MutexLock lock(&mutex_);
    subscribers_.erase(std::remove_if(subscribers_.begin(), subscribers_.end(),
                                      [](const auto& one) { return one.expired(); }),
                       subscribers_.end());
    subscribers_.push_back(subscriber);
  }
  return Worker::Subscription(subscriber.get(), [subscriber](void*) { subscriber->end(); });
}

std::vector<std::shared_ptr<Subscribers::Subscriber>> Subscribers::live() const {
  std::vector<std::shared_ptr<Subscriber>> live;
  MutexLock lock(&mutex_);
  for (const auto& weak : subscribers_) {
    if (auto subscriber = weak.lock()) live.push_back(std::move(subscriber));
  }
  return live;
}

void Subscribers::tell(MembershipChange change) {
  const auto shared = std::make_shared<const MembershipChange>(std::move(change));
  for (const auto& subscriber : live()) subscriber->tell(shared);
}

bool Subscribers::telling_here() const {
  const auto all = live();
  return std::any_of(all.begin(), all.end(), [](const auto& one) { return one->runs_here(); });
}

}  // namespace weft::internal
