#ifndef WEFT_COMMON_WAIT_DRIVER_H_
#define WEFT_COMMON_WAIT_DRIVER_H_

// WaitDriver: what completes futures, driven by the very thread that waits for one. A small call
// takes less time than a thread takes to fall asleep and be woken, so a thread that waits for an
// answer first polls for it itself, for a bounded time.
//
//   DRIVE-1  inside drive() no handler and no continuation of a user runs, and nothing waits: the
//            thread may hold locks of the user's. driving() tells the code that would run them.
//   DRIVE-2  what a driver finds is served in the order found, by one thread at a time.
//   DRIVE-3  threads of a pool do not drive: their time belongs to the handlers.

#include <atomic>

#include "absl/time/time.h"
#include "weft/common/api.h"

namespace weft {

class WaitDriver {
 public:
  virtual ~WaitDriver() = default;
  // Works until `done`, and no longer than it pays or until `deadline`. Returns `done`.
  virtual bool drive(const std::atomic<bool>& done, absl::Time deadline) = 0;
  // The thread goes to sleep until another thread completes what it waits for; then it has been
  // woken or has timed out. One call each per sleep, on any thread.
  virtual void begin_sleep() = 0;
  virtual void end_sleep() = 0;
  // What a thread may be driving for is done. Called by the thread that completed it.
  virtual void completed() = 0;
  // What comes next is due when another worker has computed, and so later than the answer to a
  // small call. Holds for a moment. Any thread.
  virtual void expect_computation() {}
};

// Whether this thread is inside drive().
WEFT_API bool driving();
// Told by code that would have run a handler of the user here: driving costs others a hop.
WEFT_API void note_driving_is_dear();

// For implementations of drive(): lives for as long as the thread drives.
class WEFT_API DrivingScope {
 public:
  DrivingScope();
  ~DrivingScope();
  DrivingScope(const DrivingScope&) = delete;
  DrivingScope& operator=(const DrivingScope&) = delete;
  bool dear() const { return dear_; }  // polling costs too much now: sleep instead

 private:
  friend void note_driving_is_dear();
  bool dear_ = false;
};

}  // namespace weft

#endif  // WEFT_COMMON_WAIT_DRIVER_H_
