// The root of a pass, and the timers that watch passes.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_autograd/internal/service.h"

namespace weft::internal {
namespace {

// A root waits for so long for all to have been told of a failure, before it throws.
constexpr absl::Duration kGrace = absl::Seconds(1);

}  // namespace

Status DistAutogradService::backward(const ContextRef& context, torch::autograd::edge_list roots,
                                     std::vector<at::Tensor> gradients,
                                     const BackwardOptions& options, std::string effect,
                                     LeafOutcomes* outcomes) {
  const absl::Duration otherwise = worker().rpc_timeout();
  const absl::Duration deadline = options.deadline.is_set()
                                      ? options.deadline.value_or(otherwise)
                                      : default_deadline(roots, context->sends(), otherwise);
  const absl::Time end = runtime().now() + deadline;
  WEFT_ASSIGN_OR_RETURN(const auto pass, context->begin(end, shared_from_this()));
  watch_pass(end);  // this thread may be busy with a node then
  pass->start(std::move(roots), std::move(gradients),
              PassOptions{options.retain_graph, options.mode == BackwardMode::kFast,
                          std::move(effect), deadline});
  pass->wait_until(end);
  pass->time_is_over();
  if (outcomes != nullptr) *outcomes = pass->outcomes();
  if (pass->state() == BackwardPass::State::kDone) {
    context->ended(*pass, true);
    return absl::OkStatus();
  }
  const Status status = pass->error();
  context->ended(*pass, pass->told().try_wait(kGrace).ok());
  return status;
}

void DistAutogradService::watch(absl::Time when) {
  MutexLock lock(&mutex_);
  watch_locked(when);
}

void DistAutogradService::watch_pass(absl::Time due) {
  const absl::Time now = runtime().now();
  MutexLock lock(&mutex_);
  if (next_look_ == absl::InfiniteFuture()) next_look_ = now + report_stall_after_ / 2;
  watch_locked(std::min(due, next_look_));
}

void DistAutogradService::look_at_passes(absl::Time now) {
  bool running = false;
  for (const ContextRef& context : contexts()) {
    for (const auto& pass : context->passes()) {
      if (pass->state() != BackwardPass::State::kRunning) continue;
      running = true;
      if (!pass->look()) continue;
      {
        MutexLock lock(&mutex_);
        ++stall_reports_;
      }
      WEFT_LOG(worker().log(), kWarning)
          << to_string(pass->id()) << ": nothing has happened here for "
          << absl::FormatDuration(report_stall_after_) << "; it waits for " << pass->waits_for();
    }
  }
  MutexLock lock(&mutex_);
  next_look_ = running ? now + report_stall_after_ / 2 : absl::InfiniteFuture();
  watch_locked(next_look_);
}

void DistAutogradService::watch_locked(absl::Time when) {
  if (!closed_.ok() || when >= armed_) return;
  armed_ = when;
  if (timer_ == nullptr) {
    timer_ = context_.runtime->make_timer([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      Task task = [self] { self->tick(); };
      self->context_.executor->post(std::move(task));
    });
  }
  timer_->arm(when);
}

void DistAutogradService::tick() {
  const absl::Time now = runtime().now();
  std::deque<std::pair<ReleaseRef, WorkerKey>> again;
  absl::Time look;
  {
    MutexLock lock(&mutex_);
    armed_ = absl::InfiniteFuture();
    again.swap(again_);
    look = next_look_;
  }
  for (auto& [release, to] : again) tell_released(release, to);
  flush_riding(now);
  absl::Time next = absl::InfiniteFuture();
  for (const ContextRef& context : contexts()) {
    for (const auto& pass : context->passes()) {
      const bool runs = pass->state() == BackwardPass::State::kRunning;
      if (pass->is_root() && !runs) continue;
      const absl::Time due =
          pass->deadline() + (pass->is_root() ? absl::ZeroDuration() : kPassMargin);
      if (due > now) {
        next = std::min(next, due);
      } else if (runs) {
        pass->time_is_over();
      } else {
        pass->ask_root();
      }
    }
  }
  if (next < absl::InfiniteFuture()) watch(next);
  if (look <= now) {
    look_at_passes(now);
  } else {
    watch(look);
  }
}

}  // namespace weft::internal
