#ifndef WEFT_COMMON_VALUE_GUARD_H_
#define WEFT_COMMON_VALUE_GUARD_H_

// ValueGuard: work that goes on in the background for a value that is there already, as devices do
// it for tensors whose copy is queued and not done. A future has one beside its value when it needs
// one, and nothing here knows what the work is.
//
// Threads: any, at the same time.

#include <memory>

namespace weft {

class ValueGuard {
 public:
  virtual ~ValueGuard() = default;
  // On the thread that is about to use the value: what that thread queues from now on comes after
  // the work. Short; never waits for the work itself.
  virtual void before_use() = 0;
  // The guard of a value that was made from this one on the calling thread: of what is queued there
  // now. Null: it needs none.
  virtual std::shared_ptr<ValueGuard> derive() = 0;
};

}  // namespace weft

#endif  // WEFT_COMMON_VALUE_GUARD_H_
