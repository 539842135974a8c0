// Copies of the state of a runner's stages, at a neighbour.

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/pipeline/internal/runner.h"

namespace weft::pipeline::internal {

Status Runner::set_steps(int64_t steps) {
  MutexLock lock(&mutex_);
  if (!error_.ok()) return error_;
  if (steps < 0 || last_begun_ + 1 != done_steps_ || !begun_.empty()) {
    return make_error(ErrorKind::kState, absl::StrCat("step ", done_steps_, " is under way"));
  }
  last_begun_ = steps - 1;
  done_steps_ = steps;
  return absl::OkStatus();
}

void Runner::keep(absl::AnyInvocable<void(Status)> done) {
  if (setup_.copies == nullptr) return done(absl::OkStatus());
  KeepMessage message{setup_.pipeline, static_cast<int64_t>(setup_.self), 0, setup_.snapshot()};
  {
    MutexLock lock(&mutex_);
    message.steps = done_steps_;
  }
  setup_.copies->put(message.owner, message.steps, message.states);
  // The next worker that is another process: only that one may outlive this one.
  const WorkerInfo& self = setup_.workers[setup_.self];
  const WorkerInfo* neighbour = nullptr;
  for (size_t k = 1; k < setup_.workers.size() && neighbour == nullptr; ++k) {
    const WorkerInfo& w = setup_.workers[(setup_.self + k) % setup_.workers.size()];
    if (w != self) neighbour = &w;
  }
  if (neighbour == nullptr) return done(absl::OkStatus());
  CallOptions options{.retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait};
  options.deadline = setup_.deadline;
  call(*worker_, *neighbour, "@pipeline.keep", message, options,
       [done = std::move(done),
        what = absl::StrCat("a copy of the state of worker '", self.name, "' at worker '",
                            neighbour->name, "'")](const StatusOr<Payload>& answer) mutable {
         done(answer.ok() ? absl::OkStatus() : annotate(answer.status(), what));
       });
}

// COPY-1. The step's answer says that it is kept: what a caller has seen done can be gone on from.
Status Runner::keep_and_wait() {
  answer_held();
  {
    MutexLock lock(&mutex_);
    kept_.reset();
  }
  keep([weak = weak_from_this()](const Status& status) {
    const auto self = weak.lock();
    if (self == nullptr) return;
    {
      MutexLock lock(&self->mutex_);
      self->kept_ = status;
    }
    self->changed_.notify_all();
  });
  MutexLock lock(&mutex_);
  // The call has a deadline, so it ends.
  while (!kept_.has_value() && error_.ok()) {
    (void)changed_.wait_until(&mutex_, absl::InfiniteFuture());
  }
  return error_.ok() ? *kept_ : error_;
}

}  // namespace weft::pipeline::internal
