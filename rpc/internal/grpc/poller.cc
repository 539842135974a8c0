#include "weft/rpc/internal/grpc/poller.h"

#include <sched.h>

#include <utility>

namespace weft::internal {
namespace {

// Of the moving average over spins.
constexpr double kWeight = 1.0 / 8;
constexpr double kWorthwhile = 0.5;
// After a phase in which spinning did not pay, every so-manieth wait tries it again.
constexpr unsigned kProbe = 16;

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
  queue_->Shutdown();
  thread_->join();
  thread_ = nullptr;
}

void GrpcPoller::run() {
  void* tag = nullptr;
  bool ok = false;
  while (next(&tag, &ok)) {
    bump(&counters_.events);
    static_cast<GrpcEvent*>(tag)->complete(ok);
  }
}

bool GrpcPoller::may_spin(absl::Time now) {
  if (options_.max_spin <= absl::ZeroDuration()) return false;
  if (now - last_traffic_ > options_.spin_after_traffic) return false;
  if (crowd_.crowded(now)) {
    bump(&counters_.spins_crowded);
    return false;
  }
  return paid_ >= kWorthwhile || ++waits_ % kProbe == 0;
}

bool GrpcPoller::next(void** tag, bool* ok) {
  auto status = grpc::CompletionQueue::TIMEOUT;
  absl::Time now = runtime_->now();
  if (may_spin(now)) {
    const absl::Time end = now + options_.max_spin;
    while (true) {
      status = queue_->AsyncNext(tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
      now = runtime_->now();
      if (status != grpc::CompletionQueue::TIMEOUT || now >= end) break;
      sched_yield();
    }
    const bool paid = status != grpc::CompletionQueue::TIMEOUT;
    paid_ += ((paid ? 1.0 : 0.0) - paid_) * kWeight;
    bump(paid ? &counters_.spins_paid : &counters_.spins_missed);
  }
  if (status == grpc::CompletionQueue::TIMEOUT) {
    bump(&counters_.blocking_waits);
    status = queue_->AsyncNext(tag, ok, gpr_inf_future(GPR_CLOCK_MONOTONIC));
    now = runtime_->now();
  }
  last_traffic_ = now;
  return status == grpc::CompletionQueue::GOT_EVENT;
}

}  // namespace weft::internal
