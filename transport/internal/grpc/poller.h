#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_POLLER_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_POLLER_H_

// GrpcPoller: one completion queue, and one thread at a time that waits on it: gRPC has one epoll
// set per process, and of several threads that wait on it one polls and hands the others what is
// theirs, which costs a small call 100 us (docs/design.md). That thread has the *lead*:
//
//   the poller's own   spins for a bounded time before it sleeps in gRPC, because waking a sleeping
//                      core costs more than a small call (transport.md, 9);
//   an application's   that waits for an answer and found the lead free (WaitDriver): it finds its
//                      answer itself, without any thread being woken. The poller stands back, and
//                      checks every kStandBack whether a thread still has the lead. It is called
//                      immediately when the driver gives up, and when others sleep for their
//                      answers.
//
// A poller that finds the next event of a lane without having waited for it holds that lane's
// answers back until nothing more is there, for a few events at most (HOLD-1): answers to small
// calls that came one by one then leave together.
//
// Where more threads want to run than there are cores no thread spins; then the waiting thread
// sleeps in gRPC itself, so that a call costs one waking on each side, and not three.
//
//   LEAD-1  AsyncNext() is called, and events are completed, with the lead only.
//   LEAD-2  the lead stays free for kMostStandBack at most, plus a thread's waking; while a thread
//           drives at short intervals, that serves what comes.
//   LEAD-3  the poller that sleeps in gRPC keeps the lead: a thread that waits then is woken.
//   LEAD-4  a thread that sleeps in gRPC for an answer is told when another thread completes it.
//
//   HOLD-1  what is held is let go before the poller waits, leaves the lead, or has completed
//           kMostHeld events.
//
// Threads: start() and stop() from the owner; WaitDriver's from anywhere; the rest with the lead.

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include "absl/time/time.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/common/wait_driver.h"
#include "weft/transport/grpc_transport.h"
#include "weft/transport/internal/crowd.h"

namespace weft::internal {

// A tag on a completion queue. Stays where it is until complete() was called.
class GrpcEvent {
 public:
  virtual void complete(bool ok) = 0;

 protected:
  ~GrpcEvent() = default;
};

// Something that holds its writes back while its poller is busy.
class GrpcHolder {
 public:
  virtual void let_go() = 0;

 protected:
  ~GrpcHolder() = default;
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
  std::atomic<int64_t> drives_paid{0};    // answers that the waiting thread found itself
  std::atomic<int64_t> drives_missed{0};
  std::atomic<int64_t> drives_slept{0};  // times that a waiting thread slept in gRPC itself
  std::atomic<int64_t> kicks{0};         // and was told that another thread completed its future
  std::atomic<int64_t> events{0};
};

class GrpcPoller final : public WaitDriver {
 public:
  GrpcPoller(std::shared_ptr<Runtime> runtime, const GrpcTransportOptions& options)
      : runtime_(std::move(runtime)), options_(options), call_(runtime_->make_parker()) {}

  // REQUIRES: called once.
  void start(std::unique_ptr<grpc::CompletionQueue> queue, const std::string& name);
  bool started() const { return queue_ != nullptr; }
  grpc::CompletionQueue* queue() const { return queue_.get(); }
  // Shuts the queue, lets every outstanding operation complete, joins. REQUIRES: no thread starts
  // operations any more (gRPC would abort the process).
  void stop();
  const PollerCounters& counters() const { return counters_; }

  absl::Time now() const { return runtime_->now(); }
  // There is much to do now: the poller takes the lead unless another thread has it.
  void attend() {
    if (lead_.load() == Lead::kFree) call_->unpark();
  }
  // A large tensor is on its way through shared memory.
  void note_bulk() {
    bulk_ns_.store(absl::ToUnixNanos(runtime_->now()), std::memory_order_relaxed);
  }
  // How often nothing was there. With the lead.
  uint64_t idle() const { return idle_; }
  // False: not now. Otherwise `holder` stays until its let_go(). With the lead.
  bool hold(std::shared_ptr<GrpcHolder> holder) {
    if (driving_ || options_.max_spin <= absl::ZeroDuration()) return false;
    held_.push_back(std::move(holder));
    return true;
  }
  void expect_computation() override {
    computation_ns_.store(absl::ToUnixNanos(runtime_->now()), std::memory_order_relaxed);
  }
  bool drive(const std::atomic<bool>& done, absl::Time deadline) override;
  void begin_sleep() override;
  void end_sleep() override { sleepers_.fetch_sub(1); }
  void completed() override;

 private:
  enum class Lead : uint8_t { kFree, kTaken, kAsleep };
  // What a spin waits for.
  enum Awaited : uint8_t { kSmall, kComputation, kBulk, kAwaited };
  using Status = grpc::CompletionQueue::NextStatus;

  void run();
  bool take_lead();
  void leave_lead(bool call_poller);
  void stand_back();
  absl::Duration since_drive(absl::Time now) const;
  // How closely two waits follow each other between which the lead stays free.
  absl::Duration tight(absl::Time now) const;
  bool claim_lead(const std::atomic<bool>& done);
  Status spin(absl::Duration length, void** tag, bool* ok);
  // What else has come by the time that a drive has found its answer: a thread that has many calls
  // under way then makes the next ones together.
  void take_others();
  Status sleep_for(const std::atomic<bool>& done, absl::Time end, void** tag, bool* ok);
  Status poll(void** tag, bool* ok) {
    const Status status = queue_->AsyncNext(tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
    if (status == Status::TIMEOUT) ++idle_;
    return status;
  }
  Status poll_for_held(void** tag, bool* ok);
  void on_kick(bool ok) {
    (void)ok;
    kicked_.store(false);
  }
  // How long it is worth to spin from now on: 0 for not at all. `*crowded`: because of others.
  absl::Duration spin_length(absl::Time now, bool* crowded);
  void note_spin(bool paid);

  const std::shared_ptr<Runtime> runtime_;
  const GrpcTransportOptions options_;
  std::unique_ptr<grpc::CompletionQueue> queue_;
  std::unique_ptr<Thread> thread_;
  PollerCounters counters_;

  std::atomic<Lead> lead_{Lead::kTaken};  // by the poller that is to start
  std::atomic<int> claims_{0};            // of threads that want to drive now
  std::atomic<int> sleepers_{0};          // threads that wait for what the leader finds
  // A thread that drives sleeps in gRPC; what is done elsewhere reaches it by the alarm.
  std::atomic<bool> blocked_{false};
  std::atomic<bool> kicked_{false};
  GrpcMemberEvent<GrpcPoller, &GrpcPoller::on_kick> kick_event_{this};
  Mutex kick_mutex_;
  bool stopped_ ABSL_GUARDED_BY(kick_mutex_) = false;
  grpc::Alarm kick_ ABSL_GUARDED_BY(kick_mutex_);
  // By the last that drove, in nanoseconds of the runtime's clock.
  std::atomic<int64_t> left_ns_{0};
  std::atomic<int64_t> bulk_ns_{0};
  std::atomic<int64_t> computation_ns_{0};
  const std::unique_ptr<Parker> call_;  // the poller, while it stands back

  // With the lead.
  CrowdWatch crowd_;
  absl::Time no_drive_before_ = absl::InfinitePast();
  absl::Duration gap_;  // from one drive to the next: moving average
  absl::Time last_traffic_ = absl::InfinitePast();
  struct History {
    double paid = 1.0;  // moving average
    unsigned waits = 0;
  };
  History history_[kAwaited];
  bool driving_ = false;
  double others_ = 0;  // moving average: whether take_others() found any
  unsigned others_waits_ = 0;
  uint64_t idle_ = 0;
  std::vector<std::shared_ptr<GrpcHolder>> held_;
  int held_events_ = 0;
  bool woke_last_ = false;    // the last event ended the sleep of the last who slept
  Awaited awaited_ = kSmall;  // of the last spin_length()
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_POLLER_H_
