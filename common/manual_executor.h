#ifndef WEFT_COMMON_MANUAL_EXECUTOR_H_
#define WEFT_COMMON_MANUAL_EXECUTOR_H_

// ManualExecutor: an Executor whose tasks run when the test says so, on the thread that says it.
//
//   auto executor = std::make_shared<ManualExecutor>();
//   Promise<int> p(executor);  auto f = p.future().then(...);
//   p.set_value(1);            EXPECT_FALSE(f.done());
//   executor->run_all();       EXPECT_TRUE(f.done());
//
// Threads: all methods from anywhere; tasks run outside the lock.

#include <cstddef>
#include <deque>
#include <memory>

#include "weft/common/api.h"
#include "weft/common/executor.h"
#include "weft/common/mutex.h"

namespace weft {

class WEFT_API ManualExecutor : public Executor {
 public:
  ~ManualExecutor() override;

  bool post(Task&& task) override;
  // Runs what is queued on the calling thread.
  void shutdown() override;
  // One of the system's: a wait here blocks the calling thread, which then cannot run tasks.
  std::unique_ptr<Parker> make_parker() override;

  // Runs the oldest task. False when there is none.
  bool run_one();
  // Runs until none is left, those posted meanwhile included; returns how many.
  size_t run_all();
  size_t queued() const;

 private:
  mutable Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weft

#endif  // WEFT_COMMON_MANUAL_EXECUTOR_H_
