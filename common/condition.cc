#include "weft/common/condition.h"

#include <algorithm>

#include "weft/common/call_scope.h"
#include "weft/common/error.h"

namespace weft {

// Lets go of the caller's mutex in the middle, which the analysis cannot follow through a pointer.
absl::Status Condition::wait_until(Mutex* mutex,
                                   absl::Time deadline) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  BlockingRegion region;
  if (!region.status().ok()) return region.status();
  const std::unique_ptr<Parker> parker = runtime_->make_parker();
  {
    MutexLock lock(&mutex_);
    waiting_.push_back(parker.get());
  }
  mutex->unlock();
  const bool notified = parker->park_until(deadline);
  {
    // notify_all() unparks under mutex_, so after this no one can touch the parker any more.
    MutexLock lock(&mutex_);
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), parker.get()), waiting_.end());
  }
  mutex->lock();
  if (notified) return absl::OkStatus();
  return make_error(ErrorKind::kDeadline, "the time given for waiting is over");
}

void Condition::notify_all() {
  MutexLock lock(&mutex_);
  for (Parker* parker : waiting_) parker->unpark();
  waiting_.clear();
}

}  // namespace weft
