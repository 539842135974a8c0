#include "weft/dist_optim/spi/owner_part.h"

#include <algorithm>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/isfinite.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "torch/csrc/autograd/function.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/ended_passes.h"
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

// The gradients of the context, by tensor. Empty when the context has not reached this worker.
absl::flat_hash_map<const void*, at::Tensor> gradients_of(const CallContext& call,
                                                          const StepPlan& plan) {
  absl::flat_hash_map<const void*, at::Tensor> out;
  StatusOr<std::vector<AutogradGradient>> found =
      gradients_of_ended(call.worker(), plan.context_id(),
                         EndedPasses{key_of(call.caller()), plan.ended_below, plan.last_pass,
                                     plan.running, plan.aborted});
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
  std::vector<StepLog::Held> left;
  {
    MutexLock lock(&mutex_);
    left = log_.drop_all();
    if (service_ != nullptr) {
      --service_->optimizers;
      service_->reservations -= static_cast<int64_t>(left.size());
    }
  }
  for (const auto& held : left) give_back(*std::static_pointer_cast<Reservation>(held));
}

void OwnerOptimizer::add_parameters(CallContext& call, const ParameterPlan& plan) {
  const auto service = DistOptimService::of(call.worker());
  check_options(plan.options);
  std::vector<Slot> now = slots();
  const size_t first = now.size();
  absl::flat_hash_set<const void*> known;
  for (const Slot& one : now) known.insert(one.parameter.unsafeGetTensorImpl());
  now.reserve(first + plan.parameters.size());
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
    if (!known.insert(p.unsafeGetTensorImpl()).second) {
      refuse(ErrorKind::kInvalidArgument,
             absl::StrCat(who, " (", shape_of(p), ") is in the optimizer already"));
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
  if (service_ == nullptr) {
    ++service->optimizers;
    decided_ = std::make_shared<Condition>(service->runtime().get());
  }
  service_ = service;
}

// ---- the phases --------------------------------------------------------------------------------

StepAnswer OwnerOptimizer::prepare(CallContext& call, const StepPlan& plan) {
  const std::shared_ptr<DistOptimService> service = this->service();
  if (service == nullptr) refuse(ErrorKind::kState, "a step before there are any parameters");
  drop_expired();
  const ReservationRef reservation = reserve(call, plan);
  bool refused = false;
  {
    MutexLock lock(&mutex_);
    refused = log_.prepare(plan.step, reservation, reservation->until) != StepLog::Next::kGo;
    if (!refused) ++service_->reservations;
  }
  if (refused) {
    give_back(*reservation);
    refuse(ErrorKind::kState, absl::StrCat("step ", plan.step,
                                           " cannot be prepared here: it is already, or it was "
                                           "cancelled, or another "
                                           "one has been long after it"));
  }
  service->expire_at(reservation->until);
  return StepAnswer{static_cast<int64_t>(reservation->updates.size()), reservation->stale, {}};
}

StepLog::Answer OwnerOptimizer::ask(CallContext& call, uint64_t step, StepLog::Event event) {
  MutexLock lock(&mutex_);
  while (true) {
    const absl::Time now = service_ == nullptr ? absl::InfinitePast() : service_->runtime()->now();
    StepLog::Answer answer =
        event == StepLog::Event::kApply ? log_.apply(step, now) : log_.cancel(step);
    if (answer.next != StepLog::Next::kWait) {
      if (answer.step.held != nullptr) --service_->reservations;
      return answer;
    }
    const std::shared_ptr<Condition> decided = decided_;
    const absl::Duration left = call.remaining();
    if (Status waited = decided->wait_until(&mutex_, now + left); !waited.ok()) {
      lock.unlock();
      refuse(ErrorKind::kDeadline,
             absl::StrCat("step ", step, " is being applied: ", std::string(waited.message())));
    }
  }
}

StepAnswer OwnerOptimizer::apply(CallContext& call, uint64_t step) {
  const StepLog::Answer answer = ask(call, step, StepLog::Event::kApply);
  const auto reservation = std::static_pointer_cast<Reservation>(answer.step.held);
  if (answer.next == StepLog::Next::kGo) return apply_and_decide(step, reservation);
  StepLog::Step decided = answer.step;
  // Its time is over, and so is that of what it has reserved.
  if (answer.next == StepLog::Next::kDrop) decided.state = StepLog::State::kNotApplied;
  return tell(decided);
}

StepAnswer OwnerOptimizer::step(CallContext& call, const StepPlan& plan) {
  bool refused = false;
  {
    MutexLock lock(&mutex_);
    refused = service_ == nullptr || log_.begin(plan.step) != StepLog::Next::kGo;
  }
  if (refused) {
    throw Error(
        make_error(ErrorKind::kState, absl::StrCat("step ", plan.step,
                                                   " cannot begin here: it was cancelled, or "
                                                   "there are no parameters")))
        .with_payload(std::string(kNothingApplied));
  }
  ReservationRef reservation;
  try {
    reservation = reserve(call, plan);
  } catch (...) {
    const Status failed = status_from_current_exception();
    decide(plan.step, StepLog::State::kNotApplied, failed, 0, 0);
    throw Error(failed).with_payload(std::string(kNothingApplied));
  }
  return apply_and_decide(plan.step, reservation);
}

StepAnswer OwnerOptimizer::cancel(CallContext& call, uint64_t step) {
  const StepLog::Answer answer = ask(call, step, StepLog::Event::kCancel);
  if (answer.step.held != nullptr) {
    give_back(*std::static_pointer_cast<Reservation>(answer.step.held));
  }
  const StepLog::State state = answer.step.state;
  if (answer.next == StepLog::Next::kDrop || state == StepLog::State::kNotApplied) return {};
  return tell(answer.step);
}

StepAnswer OwnerOptimizer::apply_and_decide(uint64_t step, const ReservationRef& reservation) {
  const Applied applied = apply_reserved(reservation);
  using State = StepLog::State;
  StepLog::Step decided;
  decided.state = applied.failed.ok()    ? State::kApplied
                  : applied.touched == 0 ? State::kNotApplied
                                         : State::kPartlyApplied;
  decided.error = applied.failed;
  decided.updated = static_cast<int64_t>(reservation->updates.size());
  decided.stale = reservation->stale;
  decide(step, decided.state, decided.error, decided.updated, decided.stale);
  return tell(decided);
}

void OwnerOptimizer::decide(uint64_t step, StepLog::State state, const Status& error,
                            int64_t updated, int64_t stale) {
  std::shared_ptr<Condition> decided;
  {
    MutexLock lock(&mutex_);
    log_.finish(step, state, error, updated, stale);
    decided = decided_;
  }
  decided->notify_all();  // it is there: a step begins only where there are parameters
}

StepAnswer OwnerOptimizer::tell(const StepLog::Step& step) const {
  if (step.state == StepLog::State::kApplied) {
    return StepAnswer{step.updated, step.stale, versions_of(slots()), true};
  }
  const bool partly = step.state == StepLog::State::kPartlyApplied;
  const Status why = !step.error.ok()
                         ? step.error
                         : make_error(ErrorKind::kState,
                                      "the step is not prepared here: it was cancelled, or its "
                                      "time was over");
  throw Error(why).with_payload(std::string(partly ? kPartlyApplied : kNothingApplied));
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
    const auto gradients = gradients_of(call, plan);
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
  if (isolation() != Isolation::kVersioned) return;
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

Status OwnerOptimizer::keep(const Reservation& reservation) {
  std::vector<std::pair<size_t, std::shared_ptr<Parameter>>> held;
  {
    MutexLock lock(&mutex_);
    if (isolation_ != Isolation::kVersioned) return absl::OkStatus();
    for (const Update& update : reservation.updates) {
      held.emplace_back(update.slot, slots_[update.slot].shared);
    }
  }
  for (const auto& [slot, parameter] : held) {
    if (parameter->keep(&reservation)) continue;
    return make_error(ErrorKind::kState,
                      number(slot, "is not reserved any more: the time of the step was over"));
  }
  return absl::OkStatus();
}

OwnerOptimizer::Applied OwnerOptimizer::apply_reserved(const ReservationRef& reservation) {
  const std::vector<Slot> all = slots();
  Applied applied;
  if (!reservation->updates.empty()) {
    const at::AutoGradMode no_grad(false);
    try {
      applied.failed = keep(*reservation);
      if (applied.failed.ok()) {
        for (const Update& one : reservation->updates) use_here(one.after, one.gradient);
        applied.failed =
            update_and_publish(all, reservation->updates, reservation->options, &applied.touched);
      }
    } catch (...) {
      applied.failed = status_from_current_exception();
    }
  }
  give_back(*reservation);
  if (applied.failed.ok()) ++service()->steps;
  return applied;
}

Status OwnerOptimizer::update_and_publish(const std::vector<Slot>& slots,
                                          const std::vector<Update>& updates,
                                          const Options& options, int64_t* touched) {
  Status status;
  try {
    status = update(slots, updates, options, isolation(), touched);
  } catch (...) {
    status = status_from_current_exception();  // what was queued before is published, too
  }
  std::vector<at::Tensor> gradients;
  for (const Update& one : updates) gradients.push_back(one.gradient);
  publish_here(service()->worker(), gradients);
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
    if (isolation_ != Isolation::kVersioned) return;  // none is reserved: spares their locks
    for (const Update& update : reservation.updates) held.push_back(slots_[update.slot].shared);
  }
  for (const auto& parameter : held) parameter->give_back(&reservation);
}

// Steps whose trainers were not heard of again.
absl::Time OwnerOptimizer::drop_expired() {
  std::vector<StepLog::Held> dropped;
  absl::Time next = absl::InfiniteFuture();
  {
    MutexLock lock(&mutex_);
    if (service_ == nullptr) return next;
    dropped = log_.expire(service_->runtime()->now());
    service_->reservations -= static_cast<int64_t>(dropped.size());
    next = log_.next_expiry();
  }
  for (const auto& one : dropped) give_back(*std::static_pointer_cast<Reservation>(one));
  return next;
}

Isolation OwnerOptimizer::isolation() const {
  MutexLock lock(&mutex_);
  return isolation_;
}

std::vector<OwnerOptimizer::Slot> OwnerOptimizer::slots() const {
  MutexLock lock(&mutex_);
  return slots_;
}

}  // namespace weft::internal
