#ifndef WEFT_COMMON_MUTEX_H_
#define WEFT_COMMON_MUTEX_H_

// Mutex and MutexLock: std::mutex with Clang's thread-safety annotations.
//
// absl::Mutex would carry the annotations too, but a packaged Abseil is not instrumented, so
// ThreadSanitizer reports correct programs (reference: docs/threading.md). A Mutex guards leaf
// tables for a few lines; it is never held across a callback, a call, or a LibTorch operation.
// To wait for something use Condition (common/condition.h), which works in simulation as well.

#include <mutex>

#include "absl/base/thread_annotations.h"

namespace weft {

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }  // blocks
  void unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }      // by the thread that locked
  // For condition variables of the executors themselves; everybody else uses Condition.
  std::mutex& native() { return mutex_; }

 private:
  std::mutex mutex_;
};

// Holds a Mutex for the length of a scope. unlock() and lock() exist for the few places that must
// let go in the middle; the destructor knows which state it is in.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_->lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() {
    if (held_) mutex_->unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() ABSL_UNLOCK_FUNCTION() {
    held_ = false;
    mutex_->unlock();
  }
  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    mutex_->lock();
    held_ = true;
  }

 private:
  Mutex* const mutex_;
  bool held_ = true;
};

}  // namespace weft

#endif  // WEFT_COMMON_MUTEX_H_
