#ifndef WEFT_COMMON_EXECUTOR_H_
#define WEFT_COMMON_EXECUTOR_H_

// Executor: runs tasks later. A *loop* runs them one at a time in the order posted; a *pool* runs
// several at once and grows when one of them waits. Made by a Runtime (common/runtime.h), so that
// the same program runs on threads or under the seeded scheduler.
//
// Parker: where one thread waits to be woken once. The lowest thing that blocks; use Condition or
// Future instead.
//
// Threads: all methods from anywhere; shutdown() not from a task of the same executor.

#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace weft {

using Task = absl::AnyInvocable<void()>;  // runs once

class Parker {
 public:
  virtual ~Parker() = default;
  // Waits until unpark() was called (before or during) or the time has come. True: it was, and the
  // permit is used up. One thread at a time.
  virtual bool park_until(absl::Time deadline) = 0;
  // The caller keeps the parker alive until this returns: the woken thread may continue before
  // that. Best called with no lock held that the woken thread acquires next.
  virtual void unpark() = 0;
  // The time on the clock that park_until() compares with.
  virtual absl::Time now() const = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;
  // False when shut down; the task is then untouched and still the caller's.
  virtual bool post(Task&& task) = 0;
  // Refuses new tasks, runs those already posted, returns when the last has ended. Idempotent.
  virtual void shutdown() = 0;
  // The same, but gives up at `deadline`: false when tasks still run then. They keep what they
  // need.
  virtual bool shutdown_until(absl::Time deadline) {
    (void)deadline;
    shutdown();
    return true;
  }
  virtual std::unique_ptr<Parker> make_parker() = 0;
};

// Posts, or runs the task here when the executor is null or shut down: for continuations that must
// run exactly once whatever happens.
inline void post_or_run(Executor* executor, Task task) {
  if (executor == nullptr || !executor->post(std::move(task))) task();
}

}  // namespace weft

#endif  // WEFT_COMMON_EXECUTOR_H_
