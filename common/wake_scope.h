#ifndef WEFT_COMMON_WAKE_SCOPE_H_
#define WEFT_COMMON_WAKE_SCOPE_H_

// WakeScope: while one lives on a thread, that thread wakes threads that wait for futures only at
// its end, or at flush(). A poller has one for each batch of frames: a thread that waits for 64
// answers would otherwise be woken, on a busy core run at once, and wait again, 64 times.
//
//   WAKE-1  nothing that may wait, and no code of a user, runs before a flush: what it waits for
//           may depend on a thread that is to be woken. Futures and conditions see to it
//           themselves.
//
// Threads: belongs to the thread that made it. Scopes nest; the outermost wakes.

#include <memory>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/executor.h"

namespace weft {

class WEFT_API WakeScope {
 public:
  WakeScope();
  ~WakeScope();
  WakeScope(const WakeScope&) = delete;
  WakeScope& operator=(const WakeScope&) = delete;

  // Wakes `parkers`, now or when the thread's scope ends.
  static void wake(std::vector<std::shared_ptr<Parker>> parkers);
  // Wakes all that the thread's scope holds back.
  static void flush();

 private:
  const bool outermost_;
  std::vector<std::shared_ptr<Parker>> held_;
};

}  // namespace weft

#endif  // WEFT_COMMON_WAKE_SCOPE_H_
