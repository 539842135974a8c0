#ifndef WEFT_STORE_INTERNAL_QUIET_WAIT_H_
#define WEFT_STORE_INTERNAL_QUIET_WAIT_H_

// QuietWait: waiting on a completion queue that is silent most of the time, without slowing the
// rest of the process.
//
// gRPC has one epoll set per process. Of the threads that wait on it one polls, and it hands every
// event that is another's to that other; so a second thread that merely waits, for a watch of
// the store, say, costs each call of the transport another wake-up: 119 us instead of 24 us for a
// small call (docs/design.md). Hence: after a millisecond this one stays out of the set and looks
// in from time to time, after naps of half of the silence so far, at most 100 ms
// (10 ms for a server, of which there is one). What it waits for is seen at most that much later.
// With a quarter and 10 ms for all, looking in was most of what 64 workers at rest did.
//
// Threads: one at a time.

#include <grpcpp/completion_queue.h>

#include <algorithm>
#include <memory>

#include "absl/time/time.h"
#include "weft/common/runtime.h"
#include "weft/store/internal/grpc_util.h"

namespace weft::internal {

class QuietWait {
 public:
  explicit QuietWait(Runtime* runtime, absl::Duration longest_nap = absl::Milliseconds(100))
      : runtime_(runtime), longest_nap_(longest_nap), parker_(runtime->make_parker()) {}

  // As AsyncNext of the queue, with a deadline on the runtime's clock.
  grpc::CompletionQueue::NextStatus next(grpc::CompletionQueue* queue, void** tag, bool* ok,
                                         absl::Time deadline = absl::InfiniteFuture()) {
    const absl::Time begin = runtime_->now();
    absl::Time now = begin;
    absl::Duration look = std::min(kAwake, deadline - begin);
    while (true) {
      const auto status = queue->AsyncNext(tag, ok, grpc_after(look));
      now = runtime_->now();
      if (status != grpc::CompletionQueue::TIMEOUT || now >= deadline) return status;
      look = absl::ZeroDuration();
      parker_->park_until(std::min(now + std::min((now - begin) / 2, longest_nap_), deadline));
    }
  }

  // Waits for the one operation under way; whether it succeeded.
  bool one(grpc::CompletionQueue* queue) {
    void* tag = nullptr;
    bool ok = false;
    return next(queue, &tag, &ok) == grpc::CompletionQueue::GOT_EVENT && ok;
  }

  // Shuts a queue that the calling thread alone uses, and waits for all that is under way on it.
  void drain(grpc::CompletionQueue* queue) {
    queue->Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (next(queue, &tag, &ok) != grpc::CompletionQueue::SHUTDOWN) {
    }
  }

 private:
  static constexpr absl::Duration kAwake = absl::Milliseconds(1);

  Runtime* const runtime_;
  const absl::Duration longest_nap_;
  const std::unique_ptr<Parker> parker_;
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_QUIET_WAIT_H_
