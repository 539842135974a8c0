#ifndef WEFT_RPC_INTERNAL_SUBSCRIBERS_H_
#define WEFT_RPC_INTERNAL_SUBSCRIBERS_H_

// Subscribers: whom a worker tells about changes of the membership.
//
//   SUB-1  once a Subscription is gone its function neither runs nor will run, unless the
//          Subscription was dropped by that function itself. So it may refer to what its owner has.
//
// Threads: subscribe() and dropping a Subscription from anywhere; tell() from one thread.

#include <functional>
#include <memory>
#include <vector>

#include "weft/common/log.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

class Subscribers {
 public:
  Subscribers(std::shared_ptr<Runtime> runtime, Logger log)
      : runtime_(std::move(runtime)), log_(std::move(log)) {}

  Worker::Subscription subscribe(std::function<void(const MembershipChange&)> on_change)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void tell(const MembershipChange& change) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Subscriber;

  const std::shared_ptr<Runtime> runtime_;
  Logger log_;
  Mutex mutex_;
  std::vector<std::weak_ptr<Subscriber>> subscribers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_SUBSCRIBERS_H_
