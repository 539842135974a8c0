#include "weft/transport/internal/grpc/poller.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace weft::internal {
namespace {

// So long after a large tensor the next one may be due.
constexpr absl::Duration kNoteLasts = absl::Milliseconds(1);
// Weight of a spin in the moving average.
constexpr double kSpinWeight = 1.0 / 8;
constexpr double kWorthwhile = 0.5;
// After a phase in which spinning did not pay, every so-manieth wait tries it again.
constexpr unsigned kProbe = 16;
// A yield costs half a poll, and a thread that waits for this core can wait for a few polls.
constexpr unsigned kPollsPerYield = 4;
// How often the poller checks whether a thread has the lead (LEAD-2). Its waking in the middle of a
// call doubles that call's time.
constexpr absl::Duration kStandBack = absl::Milliseconds(1);
constexpr absl::Duration kMostStandBack = absl::Milliseconds(4);
// A sleep of a thread that drives; it goes on when nothing has happened.
constexpr absl::Duration kMostSleep = absl::Seconds(10);
// Between two waits that follow each other as closely as this the lead is left free.
constexpr absl::Duration kTight = absl::Microseconds(50);
// The same in the middle of a computation, whose parts lie between: a poller that is woken there
// takes its core from it.
constexpr absl::Duration kTightComputation = absl::Milliseconds(1);
bool is_new(const std::atomic<int64_t>& ns, absl::Time now) {
  return now - absl::FromUnixNanos(ns.load(std::memory_order_relaxed)) < kNoteLasts;
}

// How long a thread tries to get the lead: a few handlers that run on the poller.
constexpr absl::Duration kClaim = absl::Microseconds(20);
// A thread that drives cannot run the handlers of users, so one that got requests for them leaves
// the lead to the poller for so long.
constexpr absl::Duration kDear = absl::Milliseconds(10);

// Events of a poller that holds answers back: as many small calls wait for their answers.
constexpr int kMostHeld = 16;
// Events that a drive takes besides those of its own answer.
constexpr int kMostTaken = 16;

void bump(std::atomic<int64_t>* counter) {
  counter->store(counter->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace

void GrpcPoller::start(std::unique_ptr<grpc::CompletionQueue> queue, const std::string& name) {
  queue_ = std::move(queue);
  thread_ = runtime_->spawn(name, [this] { run(); });
}

void GrpcPoller::stop() {
  if (thread_ == nullptr) return;
  {
    MutexLock lock(&kick_mutex_);
    stopped_ = true;
    queue_->Shutdown();
  }
  thread_->join();
  thread_ = nullptr;
}

bool GrpcPoller::take_lead() {
  Lead free = Lead::kFree;
  return lead_.compare_exchange_strong(free, Lead::kTaken, std::memory_order_acquire,
                                       std::memory_order_relaxed);
}

void GrpcPoller::leave_lead(bool call_poller) {
  lead_.store(Lead::kFree);
  if (call_poller || sleepers_.load() > 0) call_->unpark();
}

void GrpcPoller::begin_sleep() {
  sleepers_.fetch_add(1);
  if (lead_.load() == Lead::kFree) call_->unpark();
}

void GrpcPoller::completed() {
  // Against the driver's own order: it says that it sleeps, then looks whether it is done.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!blocked_.load() || driving() || kicked_.exchange(true)) return;
  MutexLock lock(&kick_mutex_);
  counters_.kicks.fetch_add(1, std::memory_order_relaxed);
  if (!stopped_) kick_.Set(queue_.get(), gpr_now(GPR_CLOCK_MONOTONIC), &kick_event_);
}

// The poller's thread; with the lead before and after.
void GrpcPoller::run() {
  void* tag = nullptr;
  bool ok = false;
  while (true) {
    Status status = held_.empty() ? Status::TIMEOUT : poll_for_held(&tag, &ok);
    bool crowded = false;
    const absl::Duration length =
        status == Status::TIMEOUT ? spin_length(runtime_->now(), &crowded) : absl::ZeroDuration();
    if (crowded && woke_last_) {
      // The thread that was woken will probably wait again, and can sleep in gRPC as well as we.
      woke_last_ = false;
      lead_.store(Lead::kFree);
      stand_back();
    }
    if (length > absl::ZeroDuration()) {
      status = spin(length, &tag, &ok);
    } else if (crowded && status == Status::TIMEOUT) {
      // It has probably come while others had this core: then nothing waits, and HOLD-1 counts.
      status = poll(&tag, &ok);
    }
    if (status == Status::TIMEOUT) {
      ++idle_;
      bump(&counters_.blocking_waits);
      lead_.store(Lead::kAsleep, std::memory_order_relaxed);  // LEAD-3
      status = queue_->AsyncNext(&tag, &ok, gpr_inf_future(GPR_CLOCK_MONOTONIC));
      lead_.store(Lead::kTaken, std::memory_order_relaxed);
    }
    // It keeps the lead for ever: no thread touches the queue any more.
    if (status == Status::SHUTDOWN) return;
    last_traffic_ = runtime_->now();
    bump(&counters_.events);
    const int sleepers = sleepers_.load();
    static_cast<GrpcEvent*>(tag)->complete(ok);
    woke_last_ = sleepers > 0 && sleepers_.load() == 0;
  }
}

GrpcPoller::Status GrpcPoller::poll_for_held(void** tag, bool* ok) {
  const Status status = poll(tag, ok);
  if (status != Status::GOT_EVENT || ++held_events_ >= kMostHeld) {
    held_events_ = 0;
    for (const auto& holder : held_) holder->let_go();
    held_.clear();
  }
  return status;
}

GrpcPoller::Status GrpcPoller::spin(absl::Duration length, void** tag, bool* ok) {
  unsigned polls = 0;
  absl::Time end = runtime_->now() + length;
  while (true) {
    const Status status = poll(tag, ok);
    if (status != Status::TIMEOUT || runtime_->now() >= end) {
      note_spin(status != Status::TIMEOUT);
      return status;
    }
    if (++polls % kPollsPerYield != 0) continue;
    lead_.store(Lead::kFree, std::memory_order_release);
    if (claims_.load() == 0) sched_yield();
    if (claims_.load() > 0 || !take_lead()) {
      stand_back();
      end = runtime_->now() + length;
    }
  }
}

absl::Duration GrpcPoller::since_drive(absl::Time now) const {
  return now - absl::FromUnixNanos(left_ns_.load(std::memory_order_relaxed));
}

absl::Duration GrpcPoller::tight(absl::Time now) const {
  return is_new(computation_ns_, now) ? kTightComputation : kTight;
}

void GrpcPoller::stand_back() {
  absl::Duration length = kStandBack;
  while (true) {
    const bool called = call_->park_until(runtime_->now() + length);
    // Between two drives that follow each other closely the lead is free by chance.
    const absl::Time now = runtime_->now();
    if (!called && since_drive(now) < tight(now)) {
      length = std::min(2 * length, kMostStandBack);
      continue;
    }
    if (take_lead()) return;
    length = called ? kStandBack : std::min(2 * length, kMostStandBack);
  }
}

bool GrpcPoller::claim_lead(const std::atomic<bool>& done) {
  if (take_lead()) return true;
  if (lead_.load() == Lead::kAsleep) return false;
  bool mine = false;
  claims_.fetch_add(1);
  const absl::Time end = runtime_->now() + kClaim;
  while (!done.load(std::memory_order_acquire) && lead_.load() != Lead::kAsleep &&
         !(mine = take_lead()) && runtime_->now() < end) {
    sched_yield();
  }
  claims_.fetch_sub(1);
  return mine;
}

GrpcPoller::Status GrpcPoller::sleep_for(const std::atomic<bool>& done, absl::Time end, void** tag,
                                         bool* ok) {
  blocked_.store(true);
  Status status = Status::TIMEOUT;
  if (!done.load()) {
    bump(&counters_.drives_slept);
    const absl::Duration left = std::min(end - runtime_->now(), kMostSleep);
    status = queue_->AsyncNext(
        tag, ok,
        gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                     gpr_time_from_nanos(absl::ToInt64Nanoseconds(left), GPR_TIMESPAN)));
  }
  blocked_.store(false);
  return status;
}

bool GrpcPoller::drive(const std::atomic<bool>& done, absl::Time deadline) {
  if (sleepers_.load(std::memory_order_relaxed) > 0 || !claim_lead(done)) {
    return done.load(std::memory_order_acquire);
  }
  absl::Time now = runtime_->now();
  bool crowded = false;
  const absl::Duration length =
      now < no_drive_before_ ? absl::ZeroDuration() : spin_length(now, &crowded);
  if (length <= absl::ZeroDuration() && !crowded) {
    leave_lead(true);
    return done.load(std::memory_order_acquire);
  }
  gap_ += (std::min(since_drive(now), kStandBack) - gap_) * kSpinWeight;
  DrivingScope scope;
  driving_ = true;
  unsigned polls = 0;
  absl::Time end = crowded ? deadline : std::min(deadline, now + length);
  while (!done.load(std::memory_order_acquire) && now < end && !scope.dear()) {
    void* tag = nullptr;
    bool ok = false;
    const Status status = crowded ? sleep_for(done, end, &tag, &ok) : poll(&tag, &ok);
    if (status == Status::SHUTDOWN) break;  // the poller has to see it
    if (status == Status::GOT_EVENT) {
      bump(&counters_.events);
      static_cast<GrpcEvent*>(tag)->complete(ok);
      now = last_traffic_ = runtime_->now();
      if (!crowded) end = std::min(deadline, now + length);
    } else if (crowded) {
      now = runtime_->now();
    } else {
      if (++polls % kPollsPerYield == 0) sched_yield();
      now = runtime_->now();
    }
  }
  if (!crowded && done.load(std::memory_order_acquire) && !scope.dear()) take_others();
  if (scope.dear()) no_drive_before_ = now + kDear;
  const bool found = done.load(std::memory_order_acquire);
  if (!crowded) note_spin(found);
  bump(found ? &counters_.drives_paid : &counters_.drives_missed);
  left_ns_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
  driving_ = false;
  leave_lead(!found || (!crowded && gap_ > tight(now)));
  return found;
}

void GrpcPoller::take_others() {
  if (others_ < kWorthwhile && ++others_waits_ % kProbe != 0) return;
  int taken = 0;
  for (; taken < kMostTaken; ++taken) {
    void* tag = nullptr;
    bool ok = false;
    if (poll(&tag, &ok) != Status::GOT_EVENT) break;
    bump(&counters_.events);
    static_cast<GrpcEvent*>(tag)->complete(ok);
  }
  others_ += ((taken > 1 ? 1.0 : 0.0) - others_) * kSpinWeight;
}

absl::Duration GrpcPoller::spin_length(absl::Time now, bool* crowded) {
  if (options_.max_spin <= absl::ZeroDuration()) return absl::ZeroDuration();
  if (now - last_traffic_ > options_.spin_after_traffic) return absl::ZeroDuration();
  if (crowd_.crowded(now)) {
    bump(&counters_.spins_crowded);
    *crowded = true;
    return absl::ZeroDuration();
  }
  awaited_ = is_new(bulk_ns_, now) ? kBulk : is_new(computation_ns_, now) ? kComputation : kSmall;
  History& history = history_[awaited_];
  if (history.paid < kWorthwhile && ++history.waits % kProbe != 0) return absl::ZeroDuration();
  switch (awaited_) {
    case kBulk: return std::max(options_.max_spin, options_.max_bulk_spin);
    case kComputation: return std::max(options_.max_spin, options_.max_compute_spin);
    default: return options_.max_spin;
  }
}

void GrpcPoller::note_spin(bool paid) {
  History& history = history_[awaited_];
  history.paid += ((paid ? 1.0 : 0.0) - history.paid) * kSpinWeight;
  bump(paid ? &counters_.spins_paid : &counters_.spins_missed);
}

}  // namespace weft::internal
