#ifndef WEFT_RPC_INTERNAL_GRPC_POLLER_H_
#define WEFT_RPC_INTERNAL_GRPC_POLLER_H_

// GrpcPoller: one completion queue and the only thread that waits on it, one of each per transport:
// gRPC has one epoll set per process, and of several threads that wait on it one polls and hands
// the others what is theirs, which costs a small call 100 us (docs/design.md). It spins for a
// bounded time before it sleeps, because waking a sleeping core costs more than a small call
// (transport.md, 9).
//
// Threads: start() and stop() from the owner; the rest from the poller's thread.

#include <atomic>
#include <memory>
#include <string>

#include <grpcpp/completion_queue.h>

#include "absl/time/time.h"
#include "weft/common/runtime.h"
#include "weft/rpc/grpc_transport.h"
#include "weft/rpc/internal/grpc/crowd.h"

namespace weft::internal {

// A tag on a completion queue. Stays where it is until complete() was called.
class GrpcEvent {
 public:
  virtual void complete(bool ok) = 0;

 protected:
  ~GrpcEvent() = default;
};

// Calls a member function: an object with several operations has one of these for each.
template <class T, void (T::*F)(bool)>
class GrpcMemberEvent final : public GrpcEvent {
 public:
  explicit GrpcMemberEvent(T* object) : object_(object) {}
  void complete(bool ok) override { (object_->*F)(ok); }

 private:
  T* const object_;
};

struct PollerCounters {
  std::atomic<int64_t> blocking_waits{0};  // wake-ups: times that the thread slept
  std::atomic<int64_t> spins_paid{0};
  std::atomic<int64_t> spins_missed{0};
  std::atomic<int64_t> spins_crowded{0};  // not done: more threads than cores
  std::atomic<int64_t> events{0};
};

class GrpcPoller {
 public:
  GrpcPoller(std::shared_ptr<Runtime> runtime, const GrpcTransportOptions& options)
      : runtime_(std::move(runtime)), options_(options) {}

  // REQUIRES: called once.
  void start(std::unique_ptr<grpc::CompletionQueue> queue, const std::string& name);
  bool started() const { return queue_ != nullptr; }
  grpc::CompletionQueue* queue() const { return queue_.get(); }
  // Shuts the queue, lets every outstanding operation complete, joins. REQUIRES: nobody starts
  // operations any more (gRPC would abort the process).
  void stop();
  const PollerCounters& counters() const { return counters_; }

 private:
  void run();
  bool next(void** tag, bool* ok);
  bool may_spin(absl::Time now);

  const std::shared_ptr<Runtime> runtime_;
  const GrpcTransportOptions options_;
  std::unique_ptr<grpc::CompletionQueue> queue_;
  std::unique_ptr<Thread> thread_;
  PollerCounters counters_;

  CrowdWatch crowd_;
  absl::Time last_traffic_ = absl::InfinitePast();
  double paid_ = 1.0;  // moving average
  unsigned waits_ = 0;
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_GRPC_POLLER_H_
