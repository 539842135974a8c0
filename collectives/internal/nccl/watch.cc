#include "weft/collectives/internal/nccl/watch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

// Between two looks at the GPU: each takes locks of CUDA that the threads which queue operations need.
constexpr absl::Duration kShortestNap = absl::Microseconds(20);  // while a barrier is waited for
constexpr absl::Duration kUsualNap = absl::Microseconds(200);
constexpr absl::Duration kLongestNap = absl::Milliseconds(2);
// Between two looks at the other ranks.
constexpr absl::Duration kLookAround = absl::Milliseconds(10);
// Events for as many operations as are queued between two looks: making one, and destroying it, costs a
// caller more than all else here does, by locks of CUDA that both take.
constexpr size_t kMostSpare = 4096;
// After the last operation it goes on looking this often, so that a burst which follows does not begin
// with waking this thread.
constexpr int kIdleLooks = 8;
// What operations that were aborted may take to end; they use memory until then.
constexpr absl::Duration kDrainTime = absl::Seconds(5);

// A thread that captures a graph in CUDA's global mode must not be disturbed by this one.
void allow_captures_elsewhere() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace

Watch::Watch(std::shared_ptr<Runtime> runtime, Comm* comm, int device, std::string where,
             DeviceHooks hooks)
    : runtime_(std::move(runtime)),
      comm_(comm),
      device_(device),
      where_(std::move(where)),
      hooks_(std::move(hooks)),
      changed_(runtime_.get()) {
  thread_ = runtime_->spawn("weft-nccl", [this] { run(); });
}

Watch::~Watch() { close(); }

void Watch::add(Followed operation) {
  MutexLock lock(&mutex_);
  if (!aborted_.ok() && operation.ended.has_value()) {
    operation.ended->try_set(aborted_);
    operation.ended.reset();
  }
  const bool hurry = asleep_ || operation.ended.has_value();
  operations_.push_back(std::move(operation));
  if (hurry) changed_.notify_all();
}

std::shared_ptr<c10::cuda::CUDAEvent> Watch::take_event() {
  MutexLock lock(&mutex_);
  if (spare_.empty()) return std::make_shared<c10::cuda::CUDAEvent>();
  std::shared_ptr<c10::cuda::CUDAEvent> event = std::move(spare_.back());
  spare_.pop_back();
  return event;
}

std::string Watch::text_of(const Followed& one) const {
  return cat(one.name, one.sequence > 0 ? cat(" #", one.sequence) : std::string(), where_);
}

void Watch::abort(const Status& cause) {
  comm_->refuse(cause);
  MutexLock lock(&mutex_);
  if (aborted_.ok()) aborted_ = cause;
  changed_.notify_all();
}

void Watch::drain() {
  MutexLock lock(&mutex_);
  while (!operations_.empty() && aborted_.ok()) {
    if (!changed_.wait_until(&mutex_, absl::InfiniteFuture()).ok()) return;
  }
}

void Watch::close() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_ != nullptr) thread_->join();
  thread_ = nullptr;
}

Status Watch::take_ended() {
  std::vector<Followed> ended;  // their tensors go without the lock
  Status error;
  {
    MutexLock lock(&mutex_);
    try {
      // They end in their order, so few are asked.
      const auto first_open =
          std::partition_point(operations_.begin(), operations_.end(),
                               [](const Followed& one) { return one.end->query(); });
      ended.assign(std::make_move_iterator(operations_.begin()),
                   std::make_move_iterator(first_open));
      operations_.erase(operations_.begin(), first_open);
    } catch (const c10::Error& e) {
      error = make_error(ErrorKind::kInternal,
                         cat(text_of(operations_.front()), ": CUDA: ", e.what_without_backtrace()));
    }
    for (Followed& one : ended) {
      // Else a reader may still wait for it.
      if (one.end.use_count() == 1 && spare_.size() < kMostSpare)
        spare_.push_back(std::move(one.end));
    }
    if (!ended.empty() && operations_.empty()) changed_.notify_all();
  }
  for (Followed& one : ended) {
    if (one.ended.has_value()) one.ended->try_set({});
  }
  return error;
}

Status Watch::trouble() {
  std::string what;
  uint64_t sequence = 0;
  {
    MutexLock lock(&mutex_);
    if (operations_.empty()) return absl::OkStatus();
    const Followed& first = operations_.front();
    if (runtime_->now() >= first.deadline) {
      return make_error(ErrorKind::kDeadline,
                        cat(text_of(first), ": the time given is over; the GPU has not ended it"));
    }
    what = text_of(first);
    sequence = first.sequence;
  }
  WEFT_RETURN_IF_ERROR(annotate(comm_->async_error(), what));
  const absl::Time now = runtime_->now();
  if (now - looked_ < kLookAround) return absl::OkStatus();
  looked_ = now;
  return annotate(hooks_.look(sequence), what);
}

void Watch::end_all(const Status& cause) {
  std::vector<Promise<void>> promises;
  {
    MutexLock lock(&mutex_);
    for (Followed& one : operations_) {
      if (!one.ended.has_value()) continue;
      promises.push_back(std::move(*one.ended));
      one.ended.reset();
    }
  }
  for (Promise<void>& promise : promises) promise.try_set(cause);
}

absl::Duration Watch::first_nap_locked() const {
  const bool awaited = std::any_of(operations_.begin(), operations_.end(),
                                   [](const Followed& one) { return one.ended.has_value(); });
  return awaited ? kShortestNap : kUsualNap;
}

void Watch::run() {
  // Else CUDA would take memory of the first GPU for this thread.
  (void)cudaSetDevice(device_);
  allow_captures_elsewhere();
  absl::Duration nap = kUsualNap;
  int idle_looks = 0;
  absl::Time end = absl::InfiniteFuture();  // of an abort
  while (true) {
    Status bad = take_ended();
    Status aborted;
    {
      MutexLock lock(&mutex_);
      aborted = aborted_;
    }
    if (aborted.ok()) {
      if (bad.ok()) bad = trouble();
      if (!bad.ok()) {
        hooks_.fail(bad);
        // Where the group had failed already, its abort is on its way.
        abort(bad);
        continue;
      }
    } else if (end == absl::InfiniteFuture()) {
      comm_->abort();
      end_all(aborted);
      end = runtime_->now() + kDrainTime;
      nap = kShortestNap;
    }
    MutexLock lock(&mutex_);
    const bool over = operations_.empty() || runtime_->now() >= end;
    if (over && closing_) return;
    idle_looks = over ? idle_looks + 1 : 0;
    asleep_ = idle_looks > kIdleLooks;
    const absl::Time until = asleep_ ? absl::InfiniteFuture() : runtime_->now() + nap;
    const Status waited = changed_.wait_until(&mutex_, until);
    if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return;
    nap = waited.ok() ? first_nap_locked() : std::min(2 * nap, kLongestNap);
    asleep_ = false;
  }
}

}  // namespace weft::internal
