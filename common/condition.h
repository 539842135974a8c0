#ifndef WEFT_COMMON_CONDITION_H_
#define WEFT_COMMON_CONDITION_H_

// Condition: a condition variable that works on threads and in simulation alike, because it waits
// through the Runtime's Parker. Tells the pool that the thread is about to wait.
//
//   MutexLock lock(&mutex_);
//   while (!ready_) WEFT_RETURN_IF_ERROR(changed_.wait_until(&mutex_, deadline));
//
// wait_until: OK when notified (spurious wake-ups are possible), deadline_exceeded when the time
// has come, resource_exhausted when the pool allows no more waiting threads. Any thread.

#include <memory>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft {

class WEFT_API Condition {
 public:
  explicit Condition(Runtime* runtime) : runtime_(runtime) {}
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  absl::Status wait_until(Mutex* mutex, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Wakes all waiting threads. May be called with or without the user's mutex held.
  void notify_all();

 private:
  Runtime* const runtime_;
  Mutex mutex_;
  std::vector<std::shared_ptr<Parker>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft

#endif  // WEFT_COMMON_CONDITION_H_
