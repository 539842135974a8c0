// A step: two phases over several owners, one message when one alone is at another worker (OPT-7).

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/dist_autograd/ended_passes.h"
#include "weft/dist_optim/internal/service.h"
#include "weft/dist_optim/spi/optimizer_core.h"

namespace weft::internal {
namespace {

// Longest deadline of a step: no owner holds parameters and gradients for longer.
constexpr absl::Duration kLongestStep = absl::Minutes(10);
// The end of a step's time is kept to ask those that have not answered: a fifth of it, so much at
// most.
constexpr absl::Duration kAskFor = absl::Seconds(5);
// Between two questions to the same owner.
constexpr absl::Duration kFirstPause = absl::Milliseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(250);

// What an owner says itself: it knows.
std::optional<StepOutcome> told_outcome(const Status& error) {
  const ErrorDetails details = error_details(error);
  if (details.payload == OwnerOptimizer::kPartlyApplied) return StepOutcome::kPartlyApplied;
  if (details.payload == OwnerOptimizer::kNothingApplied) return StepOutcome::kNotApplied;
  return std::nullopt;
}

// The outcome at an owner that has not reported one. Not applied only where that is certain.
StepOutcome outcome_of(const Status& error) {
  if (const auto told = told_outcome(error)) return *told;
  switch (error_kind(error)) {
    case ErrorKind::kNotDelivered:
    case ErrorKind::kNotFound:
    case ErrorKind::kSignature:
    case ErrorKind::kPermission:
    case ErrorKind::kUnimplemented: return StepOutcome::kNotApplied;
    default: return StepOutcome::kUnknown;
  }
}

// Whether the same owner may tell more when it is asked again.
bool worth_asking(const Status& error) {
  switch (error_kind(error)) {
    case ErrorKind::kDeadline:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kResource:
    case ErrorKind::kInternal:
    case ErrorKind::kInvalidArgument:
    case ErrorKind::kUnavailable: return !told_outcome(error).has_value();
    default: return false;
  }
}

}  // namespace

class OptimizerCore::Step : public std::enable_shared_from_this<Step> {
 public:
  using Answer = StatusOr<StepAnswer>;
  using Answers = std::vector<Future<StepAnswer>>;

  Step(std::string text, std::vector<OwnerRef> owners, StepPlan plan, const StepOptions& options,
       std::shared_ptr<DistOptimService> service)
      : text_(std::move(text)),
        owners_(std::move(owners)),
        plan_(std::move(plan)),
        versions_(options.versions),
        service_(std::move(service)),
        runtime_(service_->runtime()),
        time_(std::min(options.deadline.value_or(service_->worker().rpc_timeout()), kLongestStep)),
        end_(runtime_->now() + time_),
        until_(end_ - std::min(time_ / 5, kAskFor)) {
    for (size_t i = 0; i < owners_.size(); ++i) {
      here_ = here_ == nullptr ? owners_[i]->link->here() : here_;
      if (here_ != nullptr && mine_ == kNone) {
        mine_ = i;
      } else {
        others_.push_back(i);
      }
      answers_.emplace_back(StepAnswer());
      outcomes_.push_back(StepOutcome::kNotApplied);
    }
  }
  ~Step() {
    if (prepared_here_) end_here(false);
  }

  bool others() const { return !others_.empty(); }

  // What is here, on the calling thread. False: refused, and that is all.
  bool prepare_here() {
    if (here_ == nullptr) return true;
    if (end_ <= runtime_->now()) {
      answers_[mine_] = make_error(ErrorKind::kDeadline, "the time of the step was over");
      return false;
    }
    answers_[mine_] =
        run_here([&](CallContext& call) { return here_->prepare(call, plan_of(mine_)); });
    prepared_here_ = answers_[mine_].ok();
    return prepared_here_;
  }

  // The first phase at the others; when there is but one, all of it: it decides, as the last one
  // to be asked.
  Answers start() {
    Answers out;
    for (const size_t i : others_) {
      const OwnerLink& link = *owners_[i]->link;
      out.push_back(one() ? link.step(call_options(until_), plan_of(i))
                          : link.prepare(call_options(until_), plan_of(i)));
    }
    return out;
  }

  // The second one: `first` are done. Empty: there is none.
  Answers second(const Answers& first) {
    take(first);
    if (one()) return {};
    for (const size_t i : others_) failed_ = failed_ || !answers_[i].ok();
    Answers out;
    for (const size_t i : others_) {
      const OwnerLink& link = *owners_[i]->link;
      // One that has failed may have prepared nevertheless, when its answer was lost.
      out.push_back(failed_ ? link.cancel(call_options(end_), plan_.step)
                            : link.apply(call_options(until_), plan_.step));
    }
    // Nothing can refuse it any more, however long this thread stood still.
    if (!failed_) end_here(true);
    return out;
  }

  // After that: what became of each, as far as it has told.
  void decide(const Answers& last) {
    if (!one()) {
      // No owner was told to apply, and the errors are those of the first phase.
      if (failed_) return end_here(false);
      take(last);
    }
    for (const size_t i : others_) set_outcome(i, answers_[i]);
  }

  // Those that have not told are asked; when that has ended, all is known that can be.
  Answers ask() {
    Answers out;
    asked_.clear();
    for (const size_t i : others_) {
      if (failed_ || answers_[i].ok() || !worth_asking(answers_[i].status())) continue;
      asked_.push_back(i);
      Promise<StepAnswer> promise(service_->executor());
      out.push_back(promise.future());
      ask(i, std::move(promise), kFirstPause);
    }
    return out;
  }
  void heard(const Answers& answers) {
    for (size_t k = 0; k < asked_.size(); ++k) {
      const size_t i = asked_[k];
      const Answer answer = answers[k].try_wait(absl::ZeroDuration());
      if (answer.ok() && !answer->applied) {
        outcomes_[i] = StepOutcome::kNotApplied;  // and it will not be; the first error says why
      } else if (answer.ok() || told_outcome(answer.status()).has_value()) {
        answers_[i] = answer;
        set_outcome(i, answer);
      }
    }
  }

  // At last: what is here follows the one that has decided.
  StepReport report() {
    if (prepared_here_) {
      end_here(!others() || (one() && outcomes_[others_[0]] == StepOutcome::kApplied));
    }
    StepReport report;
    for (size_t i = 0; i < owners_.size(); ++i) {
      OwnerReport of{owners_[i]->info, outcomes_[i], answers_[i].status(), 0, {}};
      if (answers_[i].ok() && outcomes_[i] == StepOutcome::kApplied) {
        of.updated = answers_[i]->updated;
        of.versions = answers_[i]->versions;
        report.updated += answers_[i]->updated;
        report.stale += answers_[i]->stale;
      }
      report.owners.push_back(std::move(of));
    }
    finish(&report);
    return report;
  }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  bool one() const { return others_.size() == 1; }

  CallOptions call_options(absl::Time until) const {
    return CallOptions{.deadline = std::max(until - runtime_->now(), absl::ZeroDuration()),
                       .retry = Retry::kAtMostOnce,
                       .backpressure = Backpressure::kWait};
  }

  StepPlan plan_of(size_t owner) const {
    StepPlan plan = plan_;
    plan.versions.clear();
    if (versions_.empty()) return plan;
    for (const size_t at : owners_[owner]->parameters) plan.versions.push_back(versions_[at]);
    return plan;
  }

  void take(const Answers& answers) {
    for (size_t k = 0; k < answers.size(); ++k) {
      answers_[others_[k]] = answers[k].try_wait(absl::ZeroDuration());
    }
  }
  void set_outcome(size_t i, const Answer& answer) {
    outcomes_[i] = answer.ok() ? StepOutcome::kApplied : outcome_of(answer.status());
  }

  // Until it has told, or the time is over. While there is time one that is prepared may still
  // apply; then it may not any more, and tells which it was.
  void ask(size_t i, Promise<StepAnswer> promise, absl::Duration pause) {
    const bool apply = !one() && runtime_->now() < until_;
    const OwnerLink& link = *owners_[i]->link;
    const Future<StepAnswer> answer = apply ? link.apply(call_options(until_), plan_.step)
                                            : link.cancel(call_options(end_), plan_.step);
    answer.add_done_callback([self = shared_from_this(), i, promise = std::move(promise),
                              pause](const Future<StepAnswer>& done) mutable {
      Answer heard = done.try_wait(absl::ZeroDuration());
      const bool over = self->runtime_->now() + pause >= self->end_;
      if (heard.ok() || over || !worth_asking(heard.status())) {
        promise.try_set(std::move(heard));
        return;
      }
      self->service_->after(pause, [self, i, promise = std::move(promise), pause]() mutable {
        self->ask(i, std::move(promise), std::min(pause * 2, kLongestPause));
      });
    });
  }

  // What is here is held by the step itself, which ends: so without end for others. As a call of
  // this worker to itself, less the call.
  template <class F>
  Answer run_here(F fn) const {
    const Worker& worker = service_->worker();
    const auto scope = std::make_shared<CallScope>();
    CallContext call(worker, worker.info(), 0, scope, absl::InfiniteDuration());
    try {
      return fn(call);
    } catch (...) {
      return status_from_current_exception();
    }
  }
  void end_here(bool apply) {
    if (!std::exchange(prepared_here_, false)) return;
    const Answer answer = run_here([&](CallContext& call) {
      return apply ? here_->apply(call, plan_.step) : here_->cancel(call, plan_.step);
    });
    if (!apply) return;
    answers_[mine_] = answer;
    set_outcome(mine_, answer);
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
  const StepPlan plan_;
  const std::vector<int64_t> versions_;
  const std::shared_ptr<DistOptimService> service_;
  const std::shared_ptr<Runtime> runtime_;
  const absl::Duration time_;
  const absl::Time end_;
  const absl::Time until_;  // phases; then the rest of the time is for questions
  std::shared_ptr<OwnerOptimizer> here_{};
  size_t mine_ = kNone;
  std::vector<size_t> others_{};
  // By owner.
  std::vector<Answer> answers_{};
  std::vector<StepOutcome> outcomes_{};
  bool prepared_here_ = false;
  bool failed_ = false;  // in the first of two phases
  std::vector<size_t> asked_{};
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
  EndedPasses ended = ended_passes(context);
  plan.ended_below = ended.below;
  plan.last_pass = ended.last;
  plan.running = std::move(ended.running);
  plan.aborted = std::move(ended.aborted);
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
  using Answers = Step::Answers;
  const auto wait = [](Answers answers) {
    // What came of each is read by the step.
    for (const auto& one : answers) one.try_wait(absl::InfiniteDuration()).status().IgnoreError();
    return answers;
  };
  if (!step->prepare_here() || !step->others()) return step->report();
  const Answers first = wait(step->start());
  step->decide(wait(step->second(first)));
  step->heard(wait(step->ask()));
  return step->report();
}

Future<StepReport> OptimizerCore::step_async(const DistAutogradContext& context,
                                             const StepOptions& options) {
  auto begun = begin(context, options);
  if (!begun.ok()) return Future<StepReport>::ready(StepReport{.status = begun.status()});
  using Answers = Step::Answers;
  // The gradients are those of now; what can take long comes later.
  if (!(*begun)->prepare_here()) return Future<StepReport>::ready((*begun)->report());
  if (!(*begun)->others()) {
    Promise<StepReport> promise(service_->executor());
    Future<StepReport> out = promise.future();
    post_or_run(service_->executor().get(),
                [step = *begun, promise = std::move(promise)]() mutable {
                  promise.try_set(step->report());
                });
    return out;
  }
  return collect_all((*begun)->start())
      .then([step = *begun](const Answers& first) { return collect_all(step->second(first)); })
      .then([step = *begun](const Answers& last) {
        step->decide(last);
        return collect_all(step->ask());
      })
      .then([step = *begun](const Answers& answers) {
        step->heard(answers);
        return step->report();
      });
}

StepReport OptimizerCore::checked(StepReport report) {
  throw_if_error(report.status);
  return report;
}

}  // namespace weft::internal
