#include "weft/collectives/internal/device_staging.h"

#include <optional>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "weft/collectives/internal/text.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::internal {

struct DeviceStaging::Waiting {
  explicit Waiting(std::shared_ptr<Runtime> runtime_in)
      : runtime(std::move(runtime_in)), changed(runtime.get()) {}
  void end(const Status& with) {
    {
      MutexLock lock(&mutex);
      if (!ended.has_value()) ended = with;
    }
    changed.notify_all();
  }
  const std::shared_ptr<Runtime> runtime;
  Mutex mutex;
  Condition changed;
  std::optional<Status> ended ABSL_GUARDED_BY(mutex);
};

DeviceStaging::DeviceStaging(std::shared_ptr<Runtime> runtime, Logger log)
    : runtime_(std::move(runtime)), log_(std::move(log)) {}

DeviceStaging::~DeviceStaging() { close(); }

StatusOr<std::shared_ptr<DeviceCopies>> DeviceStaging::copies() {
  MutexLock lock(&mutex_);
  if (!interrupted_.ok()) return interrupted_;
  if (copies_ == nullptr) {
    WEFT_ASSIGN_OR_RETURN(copies_, open_device_copies(runtime_, log_));
  }
  return copies_;
}

Status DeviceStaging::prepare(Operation* operation) {
  const Tensors& first = operation->outputs.empty() ? operation->inputs : operation->outputs;
  if (first.empty() || first[0].is_cpu()) return absl::OkStatus();
  const at::NoGradGuard no_grad;
  try {
    WEFT_ASSIGN_OR_RETURN(const std::shared_ptr<DeviceCopies> copies, this->copies());
    const bool in_place = operation->inputs.empty();
    for (at::Tensor& t : operation->outputs) {
      if (is_plain(t)) continue;
      const at::Tensor dense = in_place ? plain(t) : at::empty(t.sizes(), t.options());
      operation->scattered.emplace_back(dense, t);
      t = dense;
    }
    for (at::Tensor& t : operation->inputs) t = plain(t);
    WEFT_ASSIGN_OR_RETURN(operation->after, copies->mark({first[0]}));
    operation->staging = this;
    return absl::OkStatus();
  } catch (...) {
    return annotate(status_from_current_exception(), operation->name);
  }
}

void DeviceStaging::wait(const std::shared_ptr<DeviceCopies>& copies, const Turn& turn,
                         std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                         DeviceCopies::Mark after) {
  const auto waiting = std::make_shared<Waiting>(runtime_);
  {
    MutexLock lock(&mutex_);
    throw_if_error(interrupted_);
    waiting_ = waiting;
  }
  copies->copy(std::move(from), std::move(to), std::move(after),
               [waiting](const Status& done) { waiting->end(done); });
  MutexLock lock(&waiting->mutex);
  while (!waiting->ended.has_value()) {
    const Status waited = waiting->changed.wait_until(&waiting->mutex, turn.deadline);
    if (!waited.ok() && !waiting->ended.has_value()) {
      throw_error(
          annotate(waited, "copies from or to a GPU, behind what was queued on it, are not done"));
    }
  }
  throw_if_error(*waiting->ended);
}

void DeviceStaging::copy(const Operation& operation, const Turn& turn, std::vector<at::Tensor> from,
                         std::vector<at::Tensor> to) {
  uint64_t bytes = 0;
  for (const at::Tensor& t : from) bytes += t.nbytes();
  wait(value_or_throw(copies()), turn, std::move(from), std::move(to), operation.after);
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void DeviceStaging::finish(const Operation& operation, const Turn& turn) {
  if (operation.scattered.empty()) return;
  for (const auto& [dense, tensor] : operation.scattered) tensor.copy_(dense);
  const auto copies = value_or_throw(this->copies());
  wait(copies, turn, {}, {}, value_or_throw(copies->mark({operation.scattered[0].second})));
}

void DeviceStaging::interrupt(const Status& why) {
  std::shared_ptr<Waiting> waiting;
  {
    MutexLock lock(&mutex_);
    if (interrupted_.ok()) interrupted_ = why;
    waiting = waiting_;
  }
  if (waiting != nullptr) waiting->end(why);
}

void DeviceStaging::close() {
  std::shared_ptr<DeviceCopies> copies;
  {
    MutexLock lock(&mutex_);
    if (interrupted_.ok()) interrupted_ = make_error(ErrorKind::kState, "the group was left");
    copies = std::move(copies_);
  }
  if (copies != nullptr) copies->shutdown(make_error(ErrorKind::kState, "the group was left"));
}

}  // namespace weft::internal
