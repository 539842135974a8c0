#include "weft/pipeline/internal/pipeline_state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/verifier.h"

namespace weft::pipeline {

using internal::ask;
using internal::BeginMessage;
using internal::EndMessage;
using internal::OpenMessage;
using internal::PipelineMessage;
using internal::refused;

struct Pipeline::State::Step {
  int64_t number = 0;
  std::vector<double> weights;
  Promise<StepResult> promise;
  Mutex mutex;
  std::vector<bool> answered ABSL_GUARDED_BY(mutex);  // by worker of the plan
  size_t left ABSL_GUARDED_BY(mutex) = 0;
  Status first ABSL_GUARDED_BY(mutex);   // that a worker has answered
  Status silent ABSL_GUARDED_BY(mutex);  // of a worker that has not
  StepResult result ABSL_GUARDED_BY(mutex);
};

void Pipeline::State::check_tied() const {
  if (options_.tied.empty()) return;
  std::map<int, const std::vector<int>*> groups;
  for (const auto& group : plan_.tied) {
    for (int s : group) {
      if (!groups.emplace(s, &group).second) {
        throw_error(refused(absl::StrCat("stage ", s, " is tied twice")));
      }
    }
  }
  for (const auto& [s, names] : options_.tied) {
    if (groups.count(s) == 0) {
      throw_error(refused(absl::StrCat("stage ", s, " is tied in the options, not in the plan")));
    }
    for (int other : *groups.at(s)) {
      const auto it = options_.tied.find(other);
      if (it != options_.tied.end() && it->second.size() == names.size()) continue;
      throw_error(refused(absl::StrCat(
          "stages ", s, " and ", other, " share weights: ", names.size(), " of one are named, and ",
          it == options_.tied.end() ? 0 : it->second.size(), " of the other")));
    }
  }
}

void Pipeline::State::tie() const {
  for (const auto& group : plan_.tied) {
    const int first = *std::min_element(group.begin(), group.end());
    const auto names = options_.tied.find(first);
    if (names == options_.tied.end()) continue;
    const StateMap from = fetch(first, internal::Fetch::kState, {}).wait();
    for (int s : group) {
      if (s == first) continue;
      StateMap to = fetch(s, internal::Fetch::kState, {}).wait();
      for (size_t k = 0; k < names->second.size(); ++k) {
        to[options_.tied.at(s)[k]] = from.at(names->second[k]);
      }
      fetch(s, internal::Fetch::kLoadState, std::move(to)).wait();
    }
  }
}

void Pipeline::State::check(const std::vector<Stage>& stages) {
  throw_if_error(verify(plan_, {.memory_cap = options_.memory_cap}).status());
  if (static_cast<int>(stages.size()) != plan_.stages()) {
    throw_error(refused(
        absl::StrCat("a pipeline of ", stages.size(), " stages for a plan of ", plan_.stages())));
  }
  check_tied();
  const bool barrier = options_.clip_norm != 0 || options_.skip_not_finite;
  if (!(options_.clip_norm >= 0) || std::isinf(options_.clip_norm)) {
    throw_error(refused(
        absl::StrCat("clip_norm is ", options_.clip_norm, ": a finite number, and not negative")));
  }
  if (barrier && plan_.asynchronous) {
    throw_error(
        refused("clip_norm and skip_not_finite are of steps that all stages take at once; "
                "those of an asynchronous plan are taken one by one"));
  }
  const auto from = edges_from(plan_);
  const auto to = edges_to(plan_);
  for (int s = 0; s < plan_.stages(); ++s) {
    if (to[s].empty() != (s == 0) || from[s].empty() != (s == plan_.stages() - 1)) {
      throw_error(refused(absl::StrCat("stage ", s, " of ", plan_.stages(), " has ", to[s].size(),
                                       " edges to it and ", from[s].size(),
                                       " from it: the first stage begins, the last one ends, and "
                                       "every other one stands between two")));
    }
  }
  workers_.resize(plan_.workers.size());
  std::vector<int> placed(plan_.workers.size(), -1);
  for (int s = 0; s < plan_.stages(); ++s) {
    const WorkerInfo owner = stages[s].owner();
    const int w = plan_.placement[s];
    if (placed[w] >= 0 && workers_[w] != owner) {
      throw_error(refused(absl::StrCat("stages ", placed[w], " and ", s,
                                       " are at one worker of the plan, and at '", workers_[w].name,
                                       "' and '", owner.name, "'")));
    }
    placed[w] = s;
    workers_[w] = owner;
  }
  for (size_t w = 0; w < workers_.size(); ++w) {
    if (placed[w] < 0) {
      throw_error(refused(absl::StrCat("worker ", w, " of the plan has no stage")));
    }
  }
  if (options_.keep_copies && workers_.size() == 1) {
    throw_error(refused("keep_copies needs a second worker in the plan, which keeps them"));
  }
}

void Pipeline::State::open(std::vector<Stage> stages) {
  check(stages);
  stages_ = std::move(stages);
  {
    MutexLock lock(&mutex_);
    next_step_ = options_.first_step;
    done_steps_ = options_.first_step;
  }
  id_ = worker_->runtime().random().next() >> 16;
  if (const auto service = worker_->service<internal::PipelineService>(); service != nullptr) {
    service->watch(id_, [weak = weak_from_this()](const WorkerInfo& worker, const Status& why) {
      if (const auto self = weak.lock()) self->worker_ended(worker, why);
    });
  }
  std::vector<Future<void>> handed;
  for (int s = 0; s < plan_.stages(); ++s) {
    handed.push_back(stages_[s].hand_over(internal::host_key(id_, s)));
  }
  Status first;
  for (int s = 0; s < plan_.stages(); ++s) {
    const Status status = handed[s].try_wait();
    if (!status.ok() && first.ok()) first = annotate(status, absl::StrCat("stage ", s));
  }
  OpenMessage message;
  message.pipeline = id_;
  message.plan = to_text(plan_);
  message.workers = workers_;
  message.loss = options_.loss;
  message.optimizer = std::string(options_.optimizer.name);
  message.optimizer_options = rates_->options();
  {
    // Optimizers of one's own begin with rates of their own: rates that were set before, for a pipeline
    // that this one takes the place of, are told with the first step.
    MutexLock lock(&mutex_);
    sent_options_ = internal::StageRates(options_.optimizer).options();
  }
  message.has_seed = options_.seed.has_value();
  message.seed = options_.seed.value_or(0);
  if (options_.deadline.is_set() && !options_.deadline.is_infinite()) {
    message.deadline_ns =
        absl::ToInt64Nanoseconds(options_.deadline.value_or(absl::ZeroDuration()));
  }
  message.record = options_.record;
  message.first_step = options_.first_step;
  message.keep_copies = options_.keep_copies;
  message.clip_norm = options_.clip_norm;
  message.skip_not_finite = options_.skip_not_finite;
  if (!options_.tied.empty()) message.tied.resize(plan_.placement.size());
  for (const auto& [s, names] : options_.tied) message.tied[s] = names;
  digest_ = internal::digest_of(message);
  std::vector<Future<PipelineMessage>> opened;
  for (size_t w = 0; w < workers_.size() && first.ok(); ++w) {
    message.self = static_cast<int64_t>(w);
    opened.push_back(ask<PipelineMessage>(*worker_, workers_[w], "@pipeline.open", message, {}));
  }
  for (size_t w = 0; w < opened.size(); ++w) {
    const auto status = opened[w].try_wait().status();
    if (!status.ok() && first.ok()) {
      first = annotate(status, absl::StrCat("worker '", workers_[w].name, "'"));
    }
  }
  if (!first.ok()) {
    close(/*wait=*/true);
    throw_error(annotate(first, absl::StrCat("making a pipeline of ", plan_.stages(), " stages")));
  }
}

Future<StepResult> Pipeline::State::begin(std::vector<Tensors> inputs,
                                          std::vector<at::Tensor> targets,
                                          std::vector<double> weights, bool forward_only) {
  const auto m = static_cast<size_t>(plan_.micro_batches);
  if (inputs.size() != m || weights.size() != m || (!targets.empty() && targets.size() != m)) {
    throw_error(refused(absl::StrCat(inputs.size(), " inputs, ", targets.size(), " targets and ",
                                     weights.size(), " weights for ", m, " micro-batches")));
  }
  const auto step = std::make_shared<Step>();
  step->promise = Promise<StepResult>(executor_of(*worker_));
  Future<StepResult> future = step->promise.future();
  future.state()->set_default_wait(absl::InfiniteDuration());
  step->weights = weights;
  {
    MutexLock lock(&step->mutex);
    step->left = workers_.size();
    step->answered.resize(workers_.size());
    step->result.peak_activations.resize(workers_.size());
    step->result.times.resize(workers_.size());
    step->result.weight_versions.resize(workers_.size());
  }
  // In the order of their numbers to every worker.
  MutexLock lock(&mutex_);
  if (!error_.ok()) {
    const Status error = error_;
    lock.unlock();
    throw_error(error);
  }
  step->number = next_step_++;
  under_way_.emplace(step->number, step);
  BeginMessage message{.pipeline = id_, .of = digest_, .step = step->number};
  message.forward_only = forward_only;
  // As they were when the parts were made, until they change.
  if (auto now = rates_->options(); now != sent_options_) {
    message.optimizer_options = sent_options_ = std::move(now);
  }
  std::vector<BeginMessage> all(workers_.size(), message);
  for (size_t w = 0; w < workers_.size(); ++w) all[w].worker = static_cast<int64_t>(w);
  BeginMessage& head = all[plan_.placement[0]];
  head.inputs = std::move(inputs);
  BeginMessage& tail = all[plan_.placement[plan_.stages() - 1]];
  tail.targets = std::move(targets);
  tail.scales = std::move(weights);
  lock.unlock();
  for (size_t w = 0; w < workers_.size(); ++w) {
    internal::call(*worker_, workers_[w], "@pipeline.begin", all[w], call_options(),
                   [self = shared_from_this(), w, step](StatusOr<Payload> answer) {
                     self->ended(w, std::move(answer), step);
                   });
  }
  return future;
}

std::string Pipeline::State::stages_of(size_t w) const {
  std::string out;
  for (int s = 0; s < plan_.stages(); ++s) {
    if (plan_.placement[s] == static_cast<int>(w)) {
      absl::StrAppend(&out, out.empty() ? " with stage " : ", ", s);
    }
  }
  return out;
}

// A worker that is gone cannot tell the others, so the maker does.
void Pipeline::State::tell_of(size_t w, const Status& why) const {
  const internal::FailMessage message{id_, static_cast<int64_t>(why.code()),
                                      static_cast<int64_t>(error_kind(why)),
                                      std::string(why.message()), error_details(why).origin};
  for (size_t other = 0; other < workers_.size(); ++other) {
    if (other == w) continue;
    internal::call(*worker_, workers_[other], "@pipeline.fail", message,
                   {.deadline = absl::Seconds(10),
                    .retry = Retry::kAtMostOnce,
                    .backpressure = Backpressure::kWait},
                   [](const StatusOr<Payload>&) {});
  }
}

void Pipeline::State::worker_ended(const WorkerInfo& worker, const Status& why) {
  std::vector<std::shared_ptr<Step>> steps;
  {
    MutexLock lock(&mutex_);
    gone_.insert(worker);
    for (const auto& [number, step] : under_way_) steps.push_back(step);
  }
  for (const auto& step : steps) {
    for (size_t w = 0; w < workers_.size(); ++w) {
      if (workers_[w] == worker) ended(w, why, step);
    }
  }
}

void Pipeline::State::ended(size_t w, StatusOr<Payload> answer, const std::shared_ptr<Step>& step) {
  {
    MutexLock lock(&step->mutex);
    if (step->answered[w]) return;
    step->answered[w] = true;
  }
  const bool answered = answer.ok() || !error_details(answer.status()).origin.empty();
  StatusOr<EndMessage> end = answer.ok() ? internal::decode<EndMessage>(*std::move(answer))
                                         : StatusOr<EndMessage>(answer.status());
  if (!end.ok() && !answered) {
    end = annotate(end.status(), absl::StrCat("pipeline step ", step->number, ", worker '",
                                              workers_[w].name, "'", stages_of(w)));
  }
  if (!end.ok()) {
    bool first = false;
    {
      MutexLock lock(&mutex_);
      first = error_.ok();
      if (first || (unanswered_ && answered)) {
        error_ = end.status();
        unanswered_ = !answered;
      }
    }
    if (first) tell_of(w, end.status());
  }
  MutexLock lock(&step->mutex);
  if (!end.ok()) {
    Status& to = answered ? step->first : step->silent;
    if (to.ok()) to = end.status();
  } else {
    step->result.peak_activations[w] = end->peak_activations;
    step->result.times[w] = std::move(end->times);
    step->result.weight_versions[w] = end->weight_versions;
    step->result.grad_norm = end->grad_norm;  // the same at all
    step->result.skipped = end->skipped;
    if (static_cast<int>(w) == plan_.placement[plan_.stages() - 1]) {
      step->result.losses = std::move(end->losses);
      step->result.outputs = std::move(end->outputs);
    }
  }
  if (--step->left > 0) return;
  const Status first = step->first.ok() ? step->silent : step->first;
  StepResult result = std::move(step->result);
  lock.unlock();
  {
    MutexLock over(&mutex_);
    under_way_.erase(step->number);
  }
  if (!first.ok()) {
    step->promise.try_set(first);
    return;
  }
  {
    MutexLock done(&mutex_);
    done_steps_ = std::max(done_steps_, step->number + 1);
  }
  for (size_t i = 0; i < result.losses.size(); ++i) {
    result.loss += result.losses[i] * step->weights[i];
  }
  step->promise.try_set(std::move(result));
}

void Pipeline::State::close(bool wait) {
  std::set<WorkerInfo> gone;
  {
    MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
    gone = gone_;
    if (error_.ok()) error_ = make_error(ErrorKind::kState, "the pipeline is closed");
  }
  if (const auto service = worker_->service<internal::PipelineService>(); service != nullptr) {
    service->unwatch(id_);
  }
  std::vector<Future<PipelineMessage>> closing;
  for (const WorkerInfo& w : workers_) {
    if (w.name.empty() || gone.count(w) > 0) continue;
    closing.push_back(ask<PipelineMessage>(*worker_, w, "@pipeline.close", PipelineMessage{id_},
                                           {.deadline = absl::Seconds(30)}));
  }
  if (!wait) return;
  // One that is gone has closed its part.
  for (auto& future : closing) future.try_wait().status().IgnoreError();
}

}  // namespace weft::pipeline
