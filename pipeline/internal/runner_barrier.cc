// RUN-8: a norm over the gradients of all stages, before any of them steps.

#include <cmath>

#include "ATen/ops/scalar_tensor.h"
#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/runner.h"
#include "weft/pipeline/internal/runner_step.h"

namespace weft::pipeline::internal {

// Parts are added in the order of the workers, so that every worker has the same bits.
StatusOr<double> Runner::norm_of_all(const Action& a, Current* now) {
  const int64_t step = now->message->step;
  const int self = static_cast<int>(setup_.self);
  double squares = 0;
  for (const auto& [stage, compute] : setup_.stages) {
    WEFT_ASSIGN_OR_RETURN(const double of_stage, compute->squared_norm());
    squares += of_stage;
  }
  const auto number_of = [](const Tensors& given) -> StatusOr<double> {
    if (given.size() == 1 && given[0].defined() && given[0].numel() == 1) {
      return given[0].item<double>();
    }
    return make_error(ErrorKind::kProtocol, "a norm of gradients that is no number");
  };
  const auto message = [&](int to, int worker, bool backward) {
    return PutMessage{
        setup_.pipeline, setup_.digest, to,       step,
        norm_edge(),     worker,        backward, {at::scalar_tensor(squares, at::kDouble)}};
  };
  if (self != 0) {
    WEFT_RETURN_IF_ERROR(post(a, message(0, self, /*backward=*/true)));
    WEFT_ASSIGN_OR_RETURN(const Tensors given,
                          take(a, {step, norm_edge(), self, false}, now->deadline));
    WEFT_ASSIGN_OR_RETURN(squares, number_of(given));
    return std::sqrt(squares);
  }
  for (int w = 1; w < static_cast<int>(setup_.workers.size()); ++w) {
    WEFT_ASSIGN_OR_RETURN(const Tensors given,
                          take(a, {step, norm_edge(), w, true}, now->deadline));
    WEFT_ASSIGN_OR_RETURN(const double part, number_of(given));
    squares += part;
  }
  for (int w = 1; w < static_cast<int>(setup_.workers.size()); ++w) {
    WEFT_RETURN_IF_ERROR(post(a, message(w, w, /*backward=*/false)));
  }
  return std::sqrt(squares);
}

Status Runner::step_together(Current* now) {
  if (now->put_off.empty()) return absl::OkStatus();
  const std::vector<Action>& list = setup_.plan.workers[setup_.self];
  const int64_t step = now->message->step;
  const Action& first = list[now->put_off.front()];
  const StatusOr<double> norm = norm_of_all(first, now);
  if (!norm.ok()) return annotate(norm.status(), where(first, step));
  now->end.grad_norm = *norm;
  now->end.skipped = setup_.skip_not_finite && !std::isfinite(*norm);
  // As torch::nn::utils::clip_grad_norm_ does.
  const double factor = setup_.clip_norm > 0 ? setup_.clip_norm / (*norm + 1e-6) : 1;
  for (const size_t at : now->put_off) {
    const Action& a = list[at];
    StageCompute& stage = *setup_.stages.at(a.stage);
    now->began = runtime_->now();
    // Also by a factor that is no number: gradients that are none stay so.
    Status status;
    if (now->end.skipped) {
      stage.skip_step();
    } else {
      if (factor < 1 || std::isnan(factor)) status = stage.scale_gradients(factor);
      if (status.ok()) status = run_action(a, now);
    }
    {
      MutexLock lock(&mutex_);
      if (!error_.ok()) return error_;
    }
    if (!status.ok()) return annotate(status, where(a, step));
    if (setup_.record) {
      now->end.times[2 * at] = absl::ToUnixNanos(now->began);
      now->end.times[2 * at + 1] = absl::ToUnixNanos(runtime_->now());
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::pipeline::internal
