#include "weft/common/runtime.h"

#include <sys/random.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "weft/common/files.h"
#include "weft/common/internal/pool.h"
#include "weft/common/mutex.h"

namespace weft {
namespace internal {
namespace {

class SystemClock : public Clock {
 public:
  absl::Time now() const override { return steady_now(); }
};

class SystemRandom : public Random {
 public:
  SystemRandom() {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device(), device(), device()};
    engine_.seed(seed);
  }
  uint64_t next() override {
    MutexLock lock(&mutex_);
    return engine_();
  }

 private:
  Mutex mutex_;
  std::mt19937_64 engine_ ABSL_GUARDED_BY(mutex_);
};

class SystemTimer;

// One thread for all timers of a runtime, started by the first that is armed. The thread shares it, because a callback
// may drop the last handle of the runtime.
class TimerThread : public std::enable_shared_from_this<TimerThread> {
 public:
  // Waits for a callback that is running now, unless it is the one that calls. REQUIRES: no timer is left.
  void close() {
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      wake_.notify_all();
    }
    if (!thread_.joinable()) return;
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  void arm(SystemTimer* timer, absl::Time when);
  void disarm(SystemTimer* timer);
  // Also waits for a callback that is running now.
  void forget(SystemTimer* timer);

 private:
  void run();
  void erase_locked(SystemTimer* timer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::condition_variable_any wake_;
  std::multimap<absl::Time, SystemTimer*> queue_ ABSL_GUARDED_BY(mutex_);
  SystemTimer* firing_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class SystemTimer : public Timer {
 public:
  SystemTimer(TimerThread* thread, Task on_fire) : thread_(thread), on_fire_(std::move(on_fire)) {}
  ~SystemTimer() override { thread_->forget(this); }
  void arm(absl::Time when) override { thread_->arm(this, when); }
  void disarm() override { thread_->disarm(this); }
  void fire() { on_fire_(); }

 private:
  TimerThread* const thread_;
  Task on_fire_;
};

void TimerThread::erase_locked(SystemTimer* timer) {
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if (it->second == timer) {
      queue_.erase(it);
      return;
    }
  }
}

void TimerThread::arm(SystemTimer* timer, absl::Time when) {
  MutexLock lock(&mutex_);
  erase_locked(timer);
  auto it = queue_.emplace(when, timer);
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
  if (it == queue_.begin()) wake_.notify_all();
}

void TimerThread::disarm(SystemTimer* timer) {
  MutexLock lock(&mutex_);
  erase_locked(timer);
}

void TimerThread::forget(SystemTimer* timer) {
  MutexLock lock(&mutex_);
  erase_locked(timer);
  while (firing_ == timer && std::this_thread::get_id() != thread_.get_id()) wake_.wait(mutex_);
  // The callback may have armed itself again meanwhile.
  erase_locked(timer);
}

void TimerThread::run() {
  name_this_thread("weft-timer");
  MutexLock lock(&mutex_);
  while (!closing_) {
    if (queue_.empty()) {
      wake_.wait(mutex_);
      continue;
    }
    auto first = queue_.begin();
    const auto when = to_steady(first->first);
    if (std::chrono::steady_clock::now() < when) {
      wake_.wait_until(mutex_, when);
      continue;
    }
    firing_ = first->second;
    queue_.erase(first);
    SystemTimer* const timer = firing_;
    lock.unlock();
    timer->fire();
    lock.lock();
    firing_ = nullptr;
    wake_.notify_all();
  }
}

class SystemThread : public Thread {
 public:
  SystemThread(std::string_view name, Task body)
      : thread_([name = std::string(name), body = std::move(body)]() mutable {
          name_this_thread(name);
          body();
        }) {}
  ~SystemThread() override { join(); }
  void join() override {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

class SystemRuntime : public Runtime {
 public:
  SystemRuntime() : files_(make_system_files()) {}
  ~SystemRuntime() override { timers_->close(); }
  const Clock& clock() const override { return clock_; }
  Random& random() override { return random_; }
  Files& files() override { return *files_; }
  std::shared_ptr<Executor> make_loop(std::string_view name) override {
    return std::make_shared<Loop>(std::string(name));
  }
  std::shared_ptr<Executor> make_pool(const PoolOptions& options) override {
    return std::make_shared<Pool>(options);
  }
  std::unique_ptr<Parker> make_parker() override { return std::make_unique<SystemParker>(); }
  std::unique_ptr<Timer> make_timer(Task on_fire) override {
    return std::make_unique<SystemTimer>(timers_.get(), std::move(on_fire));
  }
  std::unique_ptr<Thread> spawn(std::string_view name, Task body) override {
    return std::make_unique<SystemThread>(name, std::move(body));
  }

 private:
  SystemClock clock_;
  SystemRandom random_;
  std::unique_ptr<Files> files_;
  const std::shared_ptr<TimerThread> timers_ = std::make_shared<TimerThread>();
};

}  // namespace
}  // namespace internal

std::shared_ptr<Runtime> make_system_runtime() {
  return std::make_shared<internal::SystemRuntime>();
}

}  // namespace weft
