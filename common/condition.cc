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
  const std::shared_ptr<Parker> parker = runtime_->make_parker();
  {
    MutexLock lock(&mutex_);
    waiting_.push_back(parker);
  }
  mutex->unlock();
  const bool notified = parker->park_until(deadline);
  if (!notified) {
    MutexLock lock(&mutex_);
    waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), parker), waiting_.end());
  }
  mutex->lock();
  if (notified) return absl::OkStatus();
  return make_error(ErrorKind::kDeadline, "the time given for waiting is over");
}

void Condition::notify_all() {
  std::vector<std::shared_ptr<Parker>> waiting;
  {
    MutexLock lock(&mutex_);
    waiting.swap(waiting_);
  }
  for (const std::shared_ptr<Parker>& parker : waiting) parker->unpark();
}

}  // namespace weft
