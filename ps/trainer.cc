#include "weft/ps/trainer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/table_future.h"

namespace weft::ps {
namespace {

constexpr int kMostBatchesAhead = 32;

}  // namespace

Trainer::Trainer(std::vector<Layer*> layers, TrainerOptions options)
    : layers_(std::move(layers)), options_(std::move(options)) {
  if (layers_.empty() || std::count(layers_.begin(), layers_.end(), nullptr) != 0) {
    throw_error(make_error(ErrorKind::kInvalidArgument, "ps::Trainer wants one layer or more"));
  }
  if (options_.ahead < 0 || options_.ahead > kMostBatchesAhead) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("ps::Trainer: ahead is ", options_.ahead,
                                        ", and must be 0 to ", kMostBatchesAhead)));
  }
}

const Worker& Trainer::worker() const {
  return internal::TableAccess::core(layers_[0]->table()).service()->worker();
}

StepOptions Trainer::step_options() const {
  StepOptions options;
  options.refresh = options_.refresh;
  options.deadline = options_.deadline;
  if (options_.rate != nullptr) options.rate = options_.rate(report_.steps);
  return options;
}

void Trainer::begin_step() {
  if (!options_.in_backward) return;
  const StepOptions options = step_options();
  for (Layer* layer : layers_) layer->step_in_backward(options);
}

void Trainer::step(const DistAutogradContext* context) {
  finish();
  // `rate` is asked once for each step.
  const StepOptions options = options_.in_backward ? StepOptions() : step_options();
  for (Layer* layer : layers_) {
    pushes_.push_back(context == nullptr ? layer->step(options) : layer->step(*context, options));
  }
  ++report_.steps;
}

void Trainer::finish() {
  // Waits for each, also after an error: none is under way when this ends.
  Status first;
  for (const Future<PushResult>& push : std::exchange(pushes_, {})) {
    const StatusOr<PushResult> result = push.try_wait(kInfinite);
    if (!result.ok()) {
      first.Update(result.status());
      continue;
    }
    report_.dropped += result->dropped ? 1 : 0;
    report_.most_behind = std::max(report_.most_behind, result->behind);
  }
  throw_if_error(first);
}

void Trainer::drop() {
  pushes_.clear();
  for (Layer* layer : layers_) layer->drop();
}

}  // namespace weft::ps
