#ifndef WEFT_PS_INTERNAL_KEEPER_H_
#define WEFT_PS_INTERNAL_KEEPER_H_

// Keeper: a thread for what waits for the job's store, and for what is due at a time. Any thread.

#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "weft/common/condition.h"
#include "weft/common/executor.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/store/store.h"

namespace weft::ps::internal {

class Keeper {
 public:
  // `tick` runs every half second.
  Keeper(std::shared_ptr<Runtime> runtime, std::shared_ptr<Store> store,
         std::function<void()> tick);
  ~Keeper();

  Store& store() const { return *store_; }
  // Run on the thread, in their order; after stop() they are dropped.
  void post(Task task);
  void at(absl::Time when, Task task);
  void tick_soon();
  // Ends what waits for the store, and the thread. Not from a task of it.
  void stop();

 private:
  void run();

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Store> store_;
  const std::function<void()> tick_;
  Mutex mutex_;
  Condition changed_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::multimap<absl::Time, Task> due_ ABSL_GUARDED_BY(mutex_);
  absl::Time next_tick_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Thread> thread_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_KEEPER_H_
