#ifndef WEFT_RPC_INTERNAL_MEMBERSHIP_SUBSCRIBERS_H_
#define WEFT_RPC_INTERNAL_MEMBERSHIP_SUBSCRIBERS_H_

// Subscribers: whom a worker tells about changes of the membership.
//
//   SUB-1  once a Subscription is gone its function neither runs nor will run, unless the
//          Subscription was dropped by that function itself. So it may refer to what its owner has.
//   SUB-2  a subscriber hears all changes in order, one at a time, on the worker's pool: one that
//          blocks holds up neither the membership's thread nor other subscribers.
//
// Threads: subscribe() and dropping a Subscription from anywhere; tell() from one thread.

#include <functional>
#include <memory>
#include <vector>

#include "weft/common/executor.h"
#include "weft/common/log.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

class Subscribers {
 public:
  Subscribers(std::shared_ptr<Runtime> runtime, std::shared_ptr<Executor> pool, Logger log)
      : runtime_(std::move(runtime)), pool_(std::move(pool)), log_(std::move(log)) {}

  Worker::Subscription subscribe(std::function<void(const MembershipChange&)> on_change)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Does not wait for those who hear it.
  void tell(MembershipChange change) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the calling thread runs a subscriber's function.
  bool telling_here() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Subscriber;
  std::vector<std::shared_ptr<Subscriber>> live() const ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Executor> pool_;
  const Logger log_;
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<Subscriber>> subscribers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_MEMBERSHIP_SUBSCRIBERS_H_
