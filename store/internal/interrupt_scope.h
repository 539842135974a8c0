#ifndef WEFT_STORE_INTERNAL_INTERRUPT_SCOPE_H_
#define WEFT_STORE_INTERNAL_INTERRUPT_SCOPE_H_

// InterruptScope: what interrupt() of one client over gRPC has to end: calls under way, and pauses
// between attempts. Threads: any.

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "weft/common/call_scope.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/store/internal/grpc_util.h"

namespace weft::internal {

class InterruptScope {
 public:
  explicit InterruptScope(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  void interrupt() {
    MutexLock lock(&mutex_);
    interrupted_ = true;
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
    for (grpc::Alarm* alarm : alarms_) alarm->Cancel();
  }
  bool interrupted() const {
    MutexLock lock(&mutex_);
    return interrupted_;
  }

  // Waits for `length`; less when `deadline` comes before or the channel gets ready. False when
  // interrupted. It waits on a queue: a client has no thread of its own, and gRPC connects only
  // while a thread polls.
  bool pause(absl::Duration length, absl::Time deadline, grpc::Channel* channel) {
    const absl::Time until = std::min(runtime_->now() + length, deadline);
    const bool was_ready = channel->GetState(true) == GRPC_CHANNEL_READY;
    const BlockingRegion region;
    while (!interrupted()) {
      const absl::Duration left = until - runtime_->now();
      if (left <= absl::ZeroDuration()) return true;
      if (!was_ready && channel->GetState(true) == GRPC_CHANNEL_READY) return true;
      poll(std::min(left, absl::Milliseconds(20)));
    }
    return false;
  }

  // Cancels the context when interrupted, now or while the guard lives.
  class Guard {
   public:
    Guard(InterruptScope* scope, grpc::ClientContext* context) : scope_(scope), context_(context) {
      MutexLock lock(&scope_->mutex_);
      if (scope_->interrupted_) context_->TryCancel();
      scope_->contexts_.insert(context_);
    }
    ~Guard() {
      MutexLock lock(&scope_->mutex_);
      scope_->contexts_.erase(context_);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    InterruptScope* const scope_;
    grpc::ClientContext* const context_;
  };

 private:
  void poll(absl::Duration length) {
    grpc::CompletionQueue queue;
    grpc::Alarm alarm;
    alarm.Set(&queue, grpc_after(length), this);
    {
      MutexLock lock(&mutex_);
      alarms_.insert(&alarm);
      if (interrupted_) alarm.Cancel();
    }
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
    MutexLock lock(&mutex_);
    alarms_.erase(&alarm);
  }

  const std::shared_ptr<Runtime> runtime_;
  mutable Mutex mutex_;
  bool interrupted_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
  std::set<grpc::Alarm*> alarms_ ABSL_GUARDED_BY(mutex_);
};

// Pauses between attempts: from 20 ms, growing by 1.6 to 1 s, each times 0.5 to 1.5.
class RetryBackoff {
 public:
  explicit RetryBackoff(Random* random) : random_(random) {}
  absl::Duration next() {
    const absl::Duration now = length_ * (0.5 + random_->unit());
    length_ = std::min(length_ * 1.6, absl::Seconds(1));
    ++attempts_;
    return now;
  }
  int attempts() const { return attempts_; }

 private:
  Random* const random_;
  absl::Duration length_ = absl::Milliseconds(20);
  int attempts_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_INTERRUPT_SCOPE_H_
