#include "weft/dist_optim/internal/parameters.h"

#include <algorithm>
#include <utility>

namespace weft::internal {

Status Parameter::lock() {
  MutexLock lock(&mutex_);
  if (locked_) waits_->fetch_add(1);
  while (locked_) {
    WEFT_RETURN_IF_ERROR(freed_.wait_until(&mutex_, absl::InfiniteFuture()));
  }
  locked_ = true;
  return absl::OkStatus();
}

void Parameter::unlock() {
  {
    MutexLock lock(&mutex_);
    locked_ = false;
  }
  freed_.notify_all();
}

int64_t Parameter::version() const {
  MutexLock lock(&mutex_);
  return version_;
}

void Parameter::updated(const at::Tensor& parameter) {
  queued_here(parameter);
  MutexLock lock(&mutex_);
  ++version_;
}

void Parameter::order_here(c10::ArrayRef<at::Tensor> tensors) {
  GuardRef after;
  {
    MutexLock lock(&mutex_);
    after = after_;
  }
  use_here(after, tensors);
}

void Parameter::queued_here(const at::Tensor& parameter) {
  if (!on_device(parameter)) return;
  MutexLock lock(&mutex_);
  use_here(after_, {});  // after updates that other threads have queued without a lock
  after_ = mark_here(parameter);
}

bool Parameter::reserve(const void* by, absl::Time until) {
  MutexLock lock(&mutex_);
  if (reserved_by_ != nullptr && reserved_by_ != by && runtime_->now() < reserved_until_) {
    return false;
  }
  reserved_by_ = by;
  reserved_until_ = until;
  return true;
}

bool Parameter::keep(const void* by) {
  MutexLock lock(&mutex_);
  if (reserved_by_ != by || reserved_until_ <= runtime_->now()) return false;
  reserved_until_ = absl::InfiniteFuture();
  return true;
}

void Parameter::give_back(const void* by) {
  MutexLock lock(&mutex_);
  if (reserved_by_ == by) reserved_by_ = nullptr;
}

std::shared_ptr<Parameter> ParameterTable::find(const at::Tensor& tensor) {
  MutexLock lock(&mutex_);
  // A sweep looks at all, so it waits until there are twice as many as the last one left. An entry
  // keeps its tensor's address from being used again.
  if (parameters_.size() >= sweep_at_) {
    looked_at_ += static_cast<int64_t>(parameters_.size());
    std::erase_if(parameters_, [](const auto& one) { return one.second.tensor.expired(); });
    sweep_at_ = std::max(kFewParameters, 2 * parameters_.size());
  }
  const auto at = parameters_.find(tensor.unsafeGetTensorImpl());
  if (at != parameters_.end()) return at->second.parameter;
  auto made = std::make_shared<Parameter>(runtime_.get(), &waits_);
  parameters_.emplace(tensor.unsafeGetTensorImpl(),
                      Entry{WeakTensor(tensor.getIntrusivePtr()), made});
  return made;
}

int64_t ParameterTable::looked_at() const {
  MutexLock lock(&mutex_);
  return looked_at_;
}

size_t ParameterTable::in_use() const {
  MutexLock lock(&mutex_);
  size_t count = 0;
  for (const auto& [key, entry] : parameters_) count += entry.parameter.use_count() > 1 ? 1 : 0;
  return count;
}

}  // namespace weft::internal
