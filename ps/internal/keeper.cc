#include "weft/ps/internal/keeper.h"

#include <algorithm>
#include <utility>

namespace weft::ps::internal {
namespace {
constexpr absl::Duration kTick = absl::Milliseconds(500);
}

Keeper::Keeper(std::shared_ptr<Runtime> runtime, std::shared_ptr<Store> store,
               std::function<void()> tick)
    : runtime_(std::move(runtime)),
      store_(std::move(store)),
      tick_(std::move(tick)),
      changed_(runtime_.get()),
      next_tick_(runtime_->now() + kTick) {
  thread_ = runtime_->spawn("ps.keeper", [this] { run(); });
}

Keeper::~Keeper() { stop(); }

void Keeper::post(Task task) {
  {
    MutexLock lock(&mutex_);
    if (stopped_) return;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void Keeper::at(absl::Time when, Task task) {
  {
    MutexLock lock(&mutex_);
    if (stopped_) return;
    due_.emplace(when, std::move(task));
  }
  changed_.notify_all();
}

void Keeper::tick_soon() {
  {
    MutexLock lock(&mutex_);
    next_tick_ = runtime_->now();
  }
  changed_.notify_all();
}

void Keeper::stop() {
  std::deque<Task> tasks;
  std::multimap<absl::Time, Task> due;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    tasks = std::exchange(tasks_, {});
    due = std::exchange(due_, {});
  }
  changed_.notify_all();
  store_->interrupt();
  if (thread_ != nullptr) thread_->join();
}

void Keeper::run() {
  for (;;) {
    Task task;
    bool ticks = false;
    {
      MutexLock lock(&mutex_);
      while (!stopped_) {
        const absl::Time now = runtime_->now();
        if (!tasks_.empty()) {
          task = std::move(tasks_.front());
          tasks_.pop_front();
          break;
        }
        if (!due_.empty() && due_.begin()->first <= now) {
          task = std::move(due_.begin()->second);
          due_.erase(due_.begin());
          break;
        }
        if (next_tick_ <= now) {
          ticks = true;
          next_tick_ = now + kTick;
          break;
        }
        absl::Time until = next_tick_;
        if (!due_.empty()) until = std::min(until, due_.begin()->first);
        (void)changed_.wait_until(&mutex_, until);  // either way the loop looks again
      }
      if (stopped_) return;
    }
    if (ticks) {
      tick_();
    } else {
      task();
    }
  }
}

}  // namespace weft::ps::internal
