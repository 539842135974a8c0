// A step: two phases over several owners, one message when one alone is at another worker (OPT-7).

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/dist_optim/internal/service.h"
#include "weft/dist_optim/optimizer_core.h"

namespace weft::internal {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);

// Of an apply, or of both phases in one, that has failed.
StepOutcome outcome_of(const Status& error) {
  const ErrorDetails details = error_details(error);
  if (details.payload == OwnerOptimizer::kPartlyApplied) return StepOutcome::kPartlyApplied;
  if (details.payload == OwnerOptimizer::kNothingApplied) return StepOutcome::kNotApplied;
  switch (details.kind) {
    case ErrorKind::kDeadline:
    case ErrorKind::kCancelled:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kPeerLost:
    case ErrorKind::kInternal:
    case ErrorKind::kProtocol: return StepOutcome::kUnknown;
    default: return StepOutcome::kNotApplied;
  }
}

template <class T>
bool any_failed(const std::vector<Future<T>>& futures) {
  for (const Future<T>& future : futures) {
    if (future.has_error()) return true;
  }
  return false;
}

}  // namespace

class OptimizerCore::Step {
 public:
  Step(std::string text, std::vector<OwnerRef> owners, StepPlan plan, const StepOptions& options,
       std::shared_ptr<DistOptimService> service)
      : text_(std::move(text)),
        owners_(std::move(owners)),
        plan_(std::move(plan)),
        versions_(options.versions),
        service_(std::move(service)),
        runtime_(service_->runtime()),
        until_(runtime_->now() + options.deadline.value_or(kDeadline)) {}

  bool in_one() const { return owners_.size() == 1; }

  // The first phase, or all of it.
  std::vector<Future<StepAnswer>> start() {
    std::vector<Future<StepAnswer>> out;
    for (const OwnerRef& owner : owners_) {
      out.push_back(in_one() ? owner->link->step(call_options(), plan_of(*owner))
                             : owner->link->prepare(call_options(), plan_of(*owner)));
    }
    return out;
  }

  // REQUIRES: all of `first` are done, none with an error.
  std::vector<Future<StepAnswer>> apply() {
    std::vector<Future<StepAnswer>> out;
    for (const OwnerRef& owner : owners_) {
      out.push_back(owner->link->apply(call_options(), plan_.step));
    }
    return out;
  }

  // On the calling thread, with one message at most: when all parameters are here, or but for those
  // of one other owner, which then decides, as the last one to be asked: what is here has been
  // prepared, and is applied if and only if the other one has applied its part.
  std::optional<StepReport> on_this_thread() {
    if (owners_.size() > 2) return std::nullopt;
    std::shared_ptr<OwnerOptimizer> here;
    size_t mine = 0;
    for (size_t i = 0; i < owners_.size() && here == nullptr; ++i) {
      here = owners_[i]->link->here();
      mine = i;
    }
    if (here == nullptr) return std::nullopt;
    const StepPlan plan = plan_of(*owners_[mine]);
    if (in_one()) {
      return applied({Future<StepAnswer>::ready(
          run_here([&](CallContext& call) { return here->step(call, plan); }))});
    }
    const OwnerRef& other = owners_[1 - mine];
    using Answer = Future<StepAnswer>;
    const auto in_order = [mine](const Answer& of_mine, const Answer& of_other) {
      return mine == 0 ? std::vector<Answer>{of_mine, of_other}
                       : std::vector<Answer>{of_other, of_mine};
    };
    const Answer prepared =
        Answer::ready(run_here([&](CallContext& call) { return here->prepare(call, plan); }));
    if (prepared.has_error()) return refused(in_order(prepared, Answer::ready(StepAnswer{})));
    const Answer last = other->link->step(call_options(), plan_of(*other));
    const Status decided = last.try_wait(absl::InfiniteDuration()).status();
    if (decided.ok()) {
      return applied(in_order(
          Answer::ready(run_here([&](CallContext& call) { return here->apply(call, plan.step); })),
          last));
    }
    run_here([&](CallContext& call) {
      here->cancel(call, plan.step);
      return StepAnswer();
    }).IgnoreError();
    StepReport report = refused(in_order(prepared, last));
    report.owners[1 - mine].outcome = outcome_of(decided);
    report.status = absl::OkStatus();
    finish(&report);
    return report;
  }

  // One that has failed may have prepared nevertheless, when its answer was lost.
  std::vector<Future<void>> cancel() {
    std::vector<Future<void>> out;
    for (const OwnerRef& owner : owners_) {
      out.push_back(owner->link->cancel(call_options(), plan_.step));
    }
    return out;
  }

  StepReport refused(const std::vector<Future<StepAnswer>>& first) const {
    StepReport report;
    for (size_t i = 0; i < owners_.size(); ++i) {
      const auto answer = first[i].try_wait(absl::ZeroDuration());
      report.owners.push_back(
          OwnerReport{owners_[i]->info, StepOutcome::kNotApplied, answer.status(), 0, {}});
    }
    finish(&report);
    return report;
  }

  StepReport applied(const std::vector<Future<StepAnswer>>& last) const {
    StepReport report;
    for (size_t i = 0; i < owners_.size(); ++i) {
      auto answer = last[i].try_wait(absl::ZeroDuration());
      OwnerReport one{owners_[i]->info, StepOutcome::kApplied, answer.status(), 0, {}};
      if (answer.ok()) {
        one.updated = answer->updated;
        one.versions = std::move(answer->versions);
        report.updated += answer->updated;
        report.stale += answer->stale;
      } else {
        one.outcome = outcome_of(answer.status());
      }
      report.owners.push_back(std::move(one));
    }
    finish(&report);
    return report;
  }

 private:
  CallOptions call_options() const {
    return CallOptions{.deadline = std::max(until_ - runtime_->now(), absl::ZeroDuration())};
  }

  StepPlan plan_of(const Owner& owner) const {
    StepPlan plan = plan_;
    plan.versions.clear();
    if (versions_.empty()) return plan;
    for (const size_t at : owner.parameters) plan.versions.push_back(versions_[at]);
    return plan;
  }

  // As a call of this worker to itself, less the call.
  template <class F>
  StatusOr<StepAnswer> run_here(F fn) const {
    const Worker& worker = service_->worker();
    const auto scope = std::make_shared<CallScope>();
    scope->deadline = until_;
    CallContext call(worker, worker.info(), 0, scope, until_ - runtime_->now());
    try {
      if (until_ <= runtime_->now()) {
        return make_error(ErrorKind::kDeadline, "the time of the step was over");
      }
      return fn(call);
    } catch (...) {
      return status_from_current_exception();
    }
  }

  void finish(StepReport* report) const {
    std::vector<std::string> outcomes;
    const Status* first = nullptr;
    std::string of;
    for (const OwnerReport& one : report->owners) {
      outcomes.push_back(absl::StrCat("'", one.owner.name, "' ", to_string(one.outcome)));
      if (one.error.ok() || first != nullptr) continue;
      first = &one.error;
      of = one.owner.name;
    }
    if (first == nullptr) return;
    const std::string message = absl::StrCat("step ", plan_.step, " of ", text_, ": owner '", of,
                                             "': ", std::string(first->message()), " [",
                                             absl::StrJoin(outcomes, ", "), "]");
    report->status = with_details(Status(first->code(), message), error_details(*first));
  }

  const std::string text_;
  const std::vector<OwnerRef> owners_;
  StepPlan plan_;
  const std::vector<int64_t> versions_;
  const std::shared_ptr<DistOptimService> service_;
  const std::shared_ptr<Runtime> runtime_;
  const absl::Time until_;
};

StatusOr<StepPlan> OptimizerCore::plan_of(const DistAutogradContext& context,
                                          const StepOptions& options) {
  if (context.released()) {
    return make_error(
        ErrorKind::kState,
        absl::StrCat("step of ", text(), ": ", to_string(context.id()), " has been released"));
  }
  const AutogradContextId& id = context.id();
  StepPlan plan;
  plan.creator = id.creator.id.value();
  plan.incarnation = id.creator.incarnation.value();
  plan.context = id.counter;
  plan.require_finite = options.require_finite;
  plan.max_staleness = options.max_staleness;
  MutexLock lock(&mutex_);
  if (!options.versions.empty() && options.versions.size() != parameters_) {
    const size_t count = parameters_;
    lock.unlock();
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("step of ", text(), ": ", options.versions.size(),
                                   " versions, but it has ", count, " parameters"));
  }
  plan.step = ++last_step_;
  plan.options = groups_;
  return plan;
}

StatusOr<std::shared_ptr<OptimizerCore::Step>> OptimizerCore::begin(
    const DistAutogradContext& context, const StepOptions& options) {
  WEFT_ASSIGN_OR_RETURN(StepPlan plan, plan_of(context, options));
  return std::make_shared<Step>(text(), owners(), std::move(plan), options, service_);
}

StepReport OptimizerCore::step(const DistAutogradContext& context, const StepOptions& options) {
  auto begun = begin(context, options);
  if (!begun.ok()) return StepReport{.status = begun.status()};
  const std::shared_ptr<Step>& step = *begun;
  if (std::optional<StepReport> report = step->on_this_thread()) return *std::move(report);
  const auto wait = [](const auto& futures) {
    // What came of each is read by applied() and refused().
    for (const auto& future : futures)
      future.try_wait(absl::InfiniteDuration()).status().IgnoreError();
  };
  std::vector<Future<StepAnswer>> first = step->start();
  wait(first);
  if (step->in_one()) return step->applied(first);
  if (any_failed(first)) {
    const std::vector<Future<void>> cancelled = step->cancel();
    for (const Future<void>& one : cancelled) one.try_wait(absl::InfiniteDuration()).IgnoreError();
    return step->refused(first);
  }
  std::vector<Future<StepAnswer>> last = step->apply();
  wait(last);
  return step->applied(last);
}

Future<StepReport> OptimizerCore::step_async(const DistAutogradContext& context,
                                             const StepOptions& options) {
  auto begun = begin(context, options);
  if (!begun.ok()) return Future<StepReport>::ready(StepReport{.status = begun.status()});
  using Answers = std::vector<Future<StepAnswer>>;
  return collect_all(begun.value()->start())
      .then([step = *begun](const Answers& first) -> Future<StepReport> {
        if (step->in_one()) return Future<StepReport>::ready(step->applied(first));
        if (any_failed(first)) {
          return collect_all(step->cancel()).then([step, first](const std::vector<Future<void>>&) {
            return step->refused(first);
          });
        }
        return collect_all(step->apply()).then([step](const Answers& last) {
          return step->applied(last);
        });
      });
}

StepReport OptimizerCore::checked(StepReport report) {
  throw_if_error(report.status);
  return report;
}

}  // namespace weft::internal
