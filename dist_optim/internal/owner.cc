#include "weft/dist_optim/owner_part.h"

#include <algorithm>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/isfinite.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "torch/csrc/autograd/function.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_optim/internal/service.h"

namespace weft::internal {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return absl::StrCat(tensor.toString(), " of [", absl::StrJoin(tensor.sizes(), ", "), "]");
}

std::string number(size_t slot, const std::string& what) {
  return absl::StrCat("parameter ", slot, " of this owner ", what);
}

[[noreturn]] void refuse(ErrorKind kind, std::string_view why) {
  throw_error(make_error(kind, why));
}

// Of the context, by tensor. One that has not reached this worker has none.
absl::flat_hash_map<const void*, at::Tensor> gradients_of(const Worker& worker,
                                                          const AutogradContextId& id) {
  absl::flat_hash_map<const void*, at::Tensor> out;
  StatusOr<std::vector<AutogradGradient>> found = try_autograd_gradients(worker, id);
  if (!found.ok()) {
    if (error_kind(found.status()) == ErrorKind::kNotFound) return out;
    throw_error(found.status());
  }
  for (AutogradGradient& one : *found) {
    out[one.leaf.unsafeGetTensorImpl()] = std::move(one.gradient);
  }
  return out;
}

Status check_fits(size_t slot, const at::Tensor& parameter, const at::Tensor& gradient,
                  bool require_finite) {
  if (gradient.sizes() != parameter.sizes() || gradient.dtype() != parameter.dtype() ||
      gradient.device() != parameter.device()) {
    return make_error(ErrorKind::kInvalidArgument,
                      number(slot, absl::StrCat("is ", shape_of(parameter), ", its gradient is ",
                                                shape_of(gradient))));
  }
  if (require_finite) {
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    if (!at::isfinite(values).all().item<bool>()) {
      return make_error(ErrorKind::kInvalidArgument,
                        number(slot, absl::StrCat("(", shape_of(parameter),
                                                  ") has a gradient that is not finite")));
    }
  }
  return absl::OkStatus();
}

}  // namespace

OwnerOptimizer::OwnerOptimizer() = default;

OwnerOptimizer::~OwnerOptimizer() {
  std::map<uint64_t, ReservationRef> left;
  {
    MutexLock lock(&mutex_);
    left.swap(reserved_);
    if (service_ != nullptr) --service_->optimizers;
  }
  for (const auto& [step, reservation] : left) give_back(*reservation);
}

void OwnerOptimizer::add_parameters(CallContext& call, const ParameterPlan& plan) {
  const auto service = DistOptimService::of(call.worker());
  check_options(plan.options);
  std::vector<Slot> now = slots();
  const size_t first = now.size();
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    Slot slot;
    slot.holder = plan.parameters[i].local_value(call.remaining());
    slot.parameter = *slot.holder;
    slot.group = plan.group;
    const at::Tensor& p = slot.parameter;
    const std::string who = absl::StrCat("parameter ", first + i, " of this owner");
    if (!p.defined()) refuse(ErrorKind::kInvalidArgument, absl::StrCat(who, " is undefined"));
    if (!p.is_leaf()) {
      refuse(ErrorKind::kInvalidArgument,
             absl::StrCat(who, " (", shape_of(p), ") is not a leaf: it is the result of ",
                          p.grad_fn()->name(), ", and can have no gradient"));
    }
    if (!p.is_floating_point()) {
      refuse(ErrorKind::kInvalidArgument,
             absl::StrCat(who, " is ", shape_of(p), ": it must be of a real floating type"));
    }
    for (const Slot& other : now) {
      if (other.parameter.is_same(p)) {
        refuse(ErrorKind::kInvalidArgument,
               absl::StrCat(who, " (", shape_of(p), ") is in the optimizer already"));
      }
    }
    slot.shared = service->parameters().find(p);
    now.push_back(std::move(slot));
  }
  {
    const at::AutoGradMode no_grad(false);
    added(now, first, plan.options);
  }
  service->add_part({key_of(call.caller()), plan.optimizer}, shared_from_this());
  MutexLock lock(&mutex_);
  if (slots_.size() != first) {
    lock.unlock();
    refuse(ErrorKind::kState, "two groups of parameters were added to an optimizer at once");
  }
  slots_ = std::move(now);
  isolation_ = static_cast<Isolation>(plan.isolation);
  if (service_ == nullptr) ++service->optimizers;
  service_ = service;
}

StepAnswer OwnerOptimizer::prepare(CallContext& call, const StepPlan& plan) {
  drop_expired();
  const ReservationRef reservation = reserve(call, plan);
  {
    MutexLock lock(&mutex_);
    if (!reserved_.emplace(plan.step, reservation).second) {
      lock.unlock();
      give_back(*reservation);
      refuse(ErrorKind::kState, absl::StrCat("step ", plan.step, " is prepared here already"));
    }
    ++service_->reservations;
  }
  return StepAnswer{static_cast<int64_t>(reservation->updates.size()), reservation->stale, {}};
}

StepAnswer OwnerOptimizer::apply(CallContext&, uint64_t step) {
  ReservationRef reservation;
  {
    MutexLock lock(&mutex_);
    auto at = reserved_.find(step);
    if (at != reserved_.end()) {
      reservation = std::move(at->second);
      reserved_.erase(at);
      --service_->reservations;
    }
  }
  if (reservation == nullptr) {
    throw Error(make_error(ErrorKind::kState,
                           absl::StrCat("step ", step, " is not prepared here: it was cancelled, ",
                                        "or applied, or its time was over")))
        .with_payload(std::string(kNothingApplied));
  }
  return apply_reserved(reservation);
}

StepAnswer OwnerOptimizer::step(CallContext& call, const StepPlan& plan) {
  return apply_reserved(reserve(call, plan));
}

void OwnerOptimizer::cancel(CallContext&, uint64_t step) {
  ReservationRef reservation;
  {
    MutexLock lock(&mutex_);
    auto at = reserved_.find(step);
    if (at == reserved_.end()) return;
    reservation = std::move(at->second);
    reserved_.erase(at);
    --service_->reservations;
  }
  give_back(*reservation);
}

void OwnerOptimizer::check(size_t at, const Slot& slot, const at::Tensor& gradient,
                           const StepPlan& plan) const {
  const auto group = static_cast<size_t>(slot.group);
  if (group >= plan.options.size()) {
    refuse(ErrorKind::kInvalidArgument,
           absl::StrCat("a step with options of ", plan.options.size(), " groups; ",
                        number(at, absl::StrCat("is in group ", group))));
  }
  throw_if_error(check_fits(at, slot.parameter, gradient, plan.require_finite));
  if (Status s = check_gradient(slot, gradient, plan.options[group]); !s.ok()) {
    throw_error(annotate(s, number(at, absl::StrCat("(", shape_of(slot.parameter), ")"))));
  }
}

OwnerOptimizer::ReservationRef OwnerOptimizer::reserve(CallContext& call, const StepPlan& plan) {
  const std::vector<Slot> all = slots();
  const auto service = DistOptimService::of(call.worker());
  auto out = std::make_shared<Reservation>();
  out->options = plan.options;
  const absl::Duration left = call.remaining();
  if (left != absl::InfiniteDuration()) out->until = service->runtime()->now() + left;
  try {
    const at::AutoGradMode no_grad(false);
    const auto gradients = gradients_of(call.worker(), plan.context_id());
    for (const PackedOptions& options : plan.options) check_options(options);
    for (size_t i = 0; i < all.size(); ++i) {
      auto at = gradients.find(all[i].parameter.unsafeGetTensorImpl());
      if (at == gradients.end()) continue;
      check(i, all[i], at->second, plan);
      out->updates.push_back(Update{i, at->second, mark_here(at->second)});
    }
    check_versions(plan, all, out.get());
  } catch (...) {
    ++service->refusals;
    give_back(*out);
    throw;
  }
  return out;
}

void OwnerOptimizer::check_versions(const StepPlan& plan, const std::vector<Slot>& slots,
                                    Reservation* reservation) const {
  {
    MutexLock lock(&mutex_);
    if (isolation_ != Isolation::kVersioned) return;
  }
  if (plan.versions.size() != slots.size()) {
    refuse(ErrorKind::kInvalidArgument,
           absl::StrCat("a versioned step names ", plan.versions.size(),
                        " versions, this owner "
                        "has ",
                        slots.size(), " parameters"));
  }
  for (const Update& update : reservation->updates) {
    if (!slots[update.slot].shared->reserve(reservation, reservation->until)) {
      refuse(ErrorKind::kState,
             number(update.slot, "is between the two phases of another step: compute again"));
    }
    const int64_t behind = slots[update.slot].shared->version() - plan.versions[update.slot];
    if (behind > 0) ++reservation->stale;
    if (behind < 0 || behind > plan.max_staleness) {
      refuse(ErrorKind::kState,
             number(update.slot,
                    absl::StrCat("has been updated ", behind, " times since version ",
                                 plan.versions[update.slot], ", which the gradient is of; ",
                                 plan.max_staleness, " are allowed")));
    }
  }
}

StepAnswer OwnerOptimizer::apply_reserved(const ReservationRef& reservation) {
  const std::vector<Slot> all = slots();
  int64_t touched = 0;
  Status failed;
  if (!reservation->updates.empty()) {
    const at::AutoGradMode no_grad(false);
    try {
      for (const Update& one : reservation->updates) use_here(one.after, one.gradient);
      failed = update_and_publish(all, reservation->updates, reservation->options, &touched);
    } catch (...) {
      failed = status_from_current_exception();
    }
  }
  give_back(*reservation);
  if (!failed.ok()) {
    throw Error(failed).with_payload(std::string(touched == 0 ? kNothingApplied : kPartlyApplied));
  }
  ++service()->steps;
  return StepAnswer{static_cast<int64_t>(reservation->updates.size()), reservation->stale,
                    versions_of(all)};
}

Status OwnerOptimizer::update_and_publish(const std::vector<Slot>& slots,
                                          const std::vector<Update>& updates,
                                          const Options& options, int64_t* touched) {
  Isolation isolation;
  {
    MutexLock lock(&mutex_);
    isolation = isolation_;
  }
  Status status;
  try {
    status = update(slots, updates, options, isolation, touched);
  } catch (...) {
    status = status_from_current_exception();  // what was queued before is published, too
  }
  std::vector<at::Tensor> on_devices;
  for (const Update& one : updates) {
    if (on_device(one.gradient)) on_devices.push_back(one.gradient);
  }
  if (!on_devices.empty()) publish_here(service()->worker(), on_devices);
  return status;
}

std::shared_ptr<DistOptimService> OwnerOptimizer::service() const {
  MutexLock lock(&mutex_);
  return service_;
}

void OwnerOptimizer::give_back(const Reservation& reservation) {
  std::vector<std::shared_ptr<Parameter>> held;
  {
    MutexLock lock(&mutex_);
    if (isolation_ != Isolation::kVersioned) return;
    for (const Update& update : reservation.updates) held.push_back(slots_[update.slot].shared);
  }
  for (const auto& parameter : held) parameter->give_back(&reservation);
}

// A step whose trainer was not heard of again. Its own parameters are free already (OPT-3).
void OwnerOptimizer::drop_expired() {
  std::vector<ReservationRef> dropped;
  MutexLock lock(&mutex_);
  if (service_ == nullptr) return;
  const absl::Time now = service_->runtime()->now();
  for (auto at = reserved_.begin(); at != reserved_.end();) {
    if (at->second->until > now) {
      ++at;
      continue;
    }
    dropped.push_back(std::move(at->second));
    at = reserved_.erase(at);
    --service_->reservations;
  }
  lock.unlock();
  for (const ReservationRef& one : dropped) give_back(*one);
}

std::vector<OwnerOptimizer::Slot> OwnerOptimizer::slots() const {
  MutexLock lock(&mutex_);
  return slots_;
}

}  // namespace weft::internal
