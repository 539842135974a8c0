#ifndef WEFT_COMMON_INTERNAL_POOL_H_
#define WEFT_COMMON_INTERNAL_POOL_H_

// The system runtime's executors: Loop (one thread, tasks in order) and Pool (several threads).
//
// POOL-1: a task that waits (BlockingRegion) does not count against `threads`: a replacement
// starts, so tasks that wait for each other cannot exhaust the pool. At most `max_blocked` wait at
// once; the next wait fails with resource_exhausted. Threads start when needed and, above
// `threads`, end when idle.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "weft/common/api.h"
#include "weft/common/call_scope.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::internal {

// Now, on the clock of to_steady().
absl::Time steady_now();

// A parker over a futex. A condition variable would wake the thread while its mutex is still held:
// on a busy core the thread then runs, waits for the mutex and is woken a second time.
class WEFT_API SystemParker : public Parker {
 public:
  bool park_until(absl::Time deadline) override;
  void unpark() override;
  absl::Time now() const override { return steady_now(); }

 private:
  std::atomic<uint32_t> permit_{0};
};

// Converts a point on the steady clock.
std::chrono::steady_clock::time_point to_steady(absl::Time t);

// A kernel-visible thread name, cut to what the kernel takes.
void name_this_thread(const std::string& name);

class WEFT_API Pool : public Executor {
 public:
  explicit Pool(const PoolOptions& options) : state_(std::make_shared<State>(options)) {}
  // Waits for what was posted, unless shutdown_until() gave up before or this is one of the pool's
  // own threads (the last task dropped the last handle): then the threads end by themselves.
  ~Pool() override;

  bool post(Task&& task) override { return state_->post(std::move(task)); }
  void shutdown() override { state_->shutdown_until(absl::InfiniteFuture()); }
  bool shutdown_until(absl::Time deadline) override { return state_->shutdown_until(deadline); }
  std::unique_ptr<Parker> make_parker() override { return std::make_unique<SystemParker>(); }

  int threads_for_test() { return state_->threads_for_test(); }
  // Those that wait, and those under way.
  int tasks_for_test() { return state_->tasks_for_test(); }

 private:
  // Shared with the threads, so that one that never ends does not point at what is gone.
  class WEFT_API State : public BlockingHook, public std::enable_shared_from_this<State> {
   public:
    explicit State(const PoolOptions& options) : options_(options) {}

    bool post(Task&& task);
    bool shutdown_until(absl::Time deadline);
    void abandon();
    bool on_own_thread();
    bool gave_up();
    int threads_for_test() ABSL_LOCKS_EXCLUDED(mutex_);
    int tasks_for_test() ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    absl::Status begin_blocking() override;
    void end_blocking() override;
    // False when the system refuses.
    bool start_thread_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
    void run(std::list<std::thread>::iterator self);
    void reap(std::list<std::thread>* ended);

    const PoolOptions options_;

    Mutex mutex_;
    std::condition_variable wake_;
    std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
    std::list<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
    std::list<std::thread> ended_ ABSL_GUARDED_BY(mutex_);  // to be joined
    int idle_ ABSL_GUARDED_BY(mutex_) = 0;
    int running_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that are not blocked, idle ones included
    int blocked_ ABSL_GUARDED_BY(mutex_) = 0;
    int under_way_ ABSL_GUARDED_BY(mutex_) = 0;  // tasks
    bool closed_ ABSL_GUARDED_BY(mutex_) = false;
    bool gave_up_ ABSL_GUARDED_BY(mutex_) = false;
    bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;  // the threads will not be joined
  };

  const std::shared_ptr<State> state_;
};

class Loop : public Executor {
 public:
  explicit Loop(std::string name);
  ~Loop() override { shutdown(); }

  bool post(Task&& task) override;
  void shutdown() override;
  std::unique_ptr<Parker> make_parker() override { return std::make_unique<SystemParker>(); }

 private:
  void run();

  const std::string name_;
  Mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::once_flag joined_;
  std::thread thread_;
};

}  // namespace weft::internal

#endif  // WEFT_COMMON_INTERNAL_POOL_H_
