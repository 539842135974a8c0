#include "weft/dist_optim/service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_optim/internal/functional.h"
#include "weft/dist_optim/internal/service.h"

namespace weft {
namespace internal {

std::shared_ptr<DistOptimService> DistOptimService::of(const Worker& worker) {
  auto service = worker.service<DistOptimService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' has no distributed optimizers: list "
                                                           "dist_optim_service() at join")));
  }
  return service;
}

// ---- time --------------------------------------------------------------------------------------

void DistOptimService::arm_locked(absl::Time when) {
  if (closed_ || when >= armed_) return;
  armed_ = when;
  if (timer_ == nullptr) {
    timer_ = runtime_->make_timer([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      Task task = [self] { self->tick(); };
      self->executor_->post(std::move(task));
    });
  }
  timer_->arm(when);
}

void DistOptimService::expire_at(absl::Time when) {
  if (when == absl::InfiniteFuture()) return;
  MutexLock lock(&mutex_);
  expiry_ = std::min(expiry_, when);
  arm_locked(when);
}

void DistOptimService::after(absl::Duration wait, Task fn) {
  const absl::Time when = runtime_->now() + wait;
  {
    MutexLock lock(&mutex_);
    if (!closed_) {
      later_.emplace(when, std::move(fn));
      arm_locked(when);
      return;
    }
  }
  fn();
}

void DistOptimService::tick() {
  const absl::Time now = runtime_->now();
  std::vector<std::shared_ptr<OwnerOptimizer>> parts;
  std::vector<Task> due;
  {
    MutexLock lock(&mutex_);
    armed_ = absl::InfiniteFuture();
    while (!later_.empty() && later_.begin()->first <= now) {
      due.push_back(std::move(later_.begin()->second));
      later_.erase(later_.begin());
    }
    if (expiry_ <= now) {
      expiry_ = absl::InfiniteFuture();
      for (const auto& [key, part] : parts_) {
        if (auto alive = part.lock()) parts.push_back(std::move(alive));
      }
    }
  }
  for (const auto& part : parts) expire_at(part->drop_expired());
  for (Task& one : due) one();
  MutexLock lock(&mutex_);
  arm_locked(later_.empty() ? expiry_ : std::min(expiry_, later_.begin()->first));
}

void DistOptimService::on_shutdown(const Status&) {
  std::unique_ptr<Timer> timer;  // its end waits for its callback
  std::multimap<absl::Time, Task> left;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    timer = std::move(timer_);
    left.swap(later_);
  }
  for (auto& [when, fn] : left) fn();
}

void DistOptimService::put_debug_info(std::map<std::string, int64_t>* out) const {
  (*out)["optimizers"] = optimizers.load();
  (*out)["optimizer_parameters"] = static_cast<int64_t>(parameters_.in_use());
  (*out)["optimizer_parameters_looked_at"] = parameters_.looked_at();
  (*out)["optimizer_lock_waits"] = parameters_.waits();
  (*out)["optimizer_steps"] = steps.load();
  (*out)["optimizer_refusals"] = refusals.load();
  (*out)["optimizer_reservations"] = reservations.load();
}

}  // namespace internal

ServiceFactory dist_optim_service() {
  return [](const ServiceContext& context) -> std::shared_ptr<Service> {
    return std::make_shared<internal::DistOptimService>(context);
  };
}

Library dist_optim_library() {
  Library library("weft_optim");
  auto def = library.class_<internal::FunctionalOptimizer>("Functional", {.concurrent = true});
  def.constructor<std::string>();
  internal::def_owner_methods(def);
  return library;
}

}  // namespace weft
