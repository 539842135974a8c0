#include "weft/pipeline/pipeline.h"

#include <atomic>
#include <set>
#include <utility>

#include "ATen/ops/tensor_split.h"
#include "absl/strings/str_cat.h"
#include "weft/common/mutex.h"
#include "weft/pipeline/internal/messages.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/verifier.h"

namespace weft::pipeline {
namespace {

using internal::BeginMessage;
using internal::EndMessage;
using internal::OpenMessage;
using internal::PipelineMessage;

Status refused(std::string_view what) { return make_error(ErrorKind::kInvalidArgument, what); }

// A call with one value there and one back.
template <class Answer, class Message>
Future<Answer> ask(const Worker& worker, const WorkerInfo& to, std::string_view method,
                   const Message& message, const CallOptions& options) {
  Promise<Answer> promise;
  Future<Answer> future = promise.future();
  weft::internal::expect_answer(worker, method, Destination(to), future.state().get());
  internal::call(worker, to, method, message, options,
                 [promise = std::move(promise)](StatusOr<Payload> result) mutable {
                   if (!result.ok()) {
                     promise.try_set(result.status());
                   } else {
                     promise.try_set(internal::decode<Answer>(*std::move(result)));
                   }
                 });
  return future;
}

}  // namespace

class Pipeline::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<const Worker> worker, Plan plan, PipelineOptions options)
      : worker_(std::move(worker)), plan_(std::move(plan)), options_(std::move(options)) {}

  void open(const std::vector<Stage>& stages);
  Future<StepResult> begin(std::vector<Tensors> inputs, std::vector<at::Tensor> targets,
                           std::vector<double> weights);
  void close(bool wait);
  Status status() const {
    MutexLock lock(&mutex_);
    return error_;
  }
  Future<std::map<std::string, at::Tensor>> fetch(int stage, internal::Fetch what,
                                                  std::map<std::string, at::Tensor> state) const {
    if (stage < 0 || stage >= plan_.stages()) {
      throw_error(refused(absl::StrCat("there is no stage ", stage, " of ", plan_.stages())));
    }
    return ask<std::map<std::string, at::Tensor>>(
        *worker_, workers_[plan_.placement[stage]], "@pipeline.fetch",
        internal::FetchMessage{id_, stage, static_cast<int64_t>(what), std::move(state)}, {});
  }
  const Plan& plan() const { return plan_; }
  const PipelineOptions& options() const { return options_; }

 private:
  struct Step;
  void ended(size_t w, StatusOr<Payload> answer, const std::shared_ptr<Step>& step);
  void tell_of(size_t w, const Status& why) const;
  std::string stages_of(size_t w) const;
  CallOptions call_options() const {
    // A connection that breaks ends no step; a process that has ended is known when it is dialled.
    CallOptions o{.retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait};
    // Workers end a step by their own clocks; this is for one that does not answer at all.
    if (options_.deadline.is_set() && !options_.deadline.is_infinite()) {
      o.deadline = options_.deadline.value_or(absl::ZeroDuration()) * 2 + absl::Seconds(5);
    } else {
      o.deadline = Timeout::infinite();
    }
    return o;
  }

  const std::shared_ptr<const Worker> worker_;
  const Plan plan_;
  const PipelineOptions options_;
  uint64_t id_ = 0;
  std::vector<WorkerInfo> workers_;

  mutable Mutex mutex_;
  int64_t next_step_ ABSL_GUARDED_BY(mutex_) = 0;
  Status error_ ABSL_GUARDED_BY(mutex_);
  // `error_` is about a worker that did not answer; what its peers say says more.
  bool unanswered_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

struct Pipeline::State::Step {
  int64_t number = 0;
  std::vector<double> weights;
  Promise<StepResult> promise;
  Mutex mutex;
  size_t left ABSL_GUARDED_BY(mutex) = 0;
  Status first ABSL_GUARDED_BY(mutex);   // that a worker has answered
  Status silent ABSL_GUARDED_BY(mutex);  // of a worker that has not
  StepResult result ABSL_GUARDED_BY(mutex);
};

void Pipeline::State::open(const std::vector<Stage>& stages) {
  throw_if_error(verify(plan_, {.memory_cap = options_.memory_cap}).status());
  if (static_cast<int>(stages.size()) != plan_.stages()) {
    throw_error(refused(
        absl::StrCat("a pipeline of ", stages.size(), " stages for a plan of ", plan_.stages())));
  }
  if (plan_.asynchronous) {
    throw_error(make_error(ErrorKind::kUnimplemented,
                           "asynchronous plans are simulated and verified, and not run yet"));
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
  std::set<WorkerInfo> seen;
  for (size_t w = 0; w < workers_.size(); ++w) {
    if (placed[w] < 0)
      throw_error(refused(absl::StrCat("worker ", w, " of the plan has no stage")));
    if (!seen.insert(workers_[w]).second) {
      throw_error(
          refused(absl::StrCat("worker '", workers_[w].name, "' is two workers of the plan: stage ",
                               placed[w], " is at the second")));
    }
  }
  id_ = worker_->runtime().random().next() >> 16;
  std::vector<Future<void>> handed;
  for (int s = 0; s < plan_.stages(); ++s) {
    handed.push_back(stages[s].hand_over(internal::host_key(id_, s)));
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
  message.optimizer_options = options_.optimizer.options;
  message.has_seed = options_.seed.has_value();
  message.seed = options_.seed.value_or(0);
  if (options_.deadline.is_set() && !options_.deadline.is_infinite()) {
    message.deadline_ns =
        absl::ToInt64Nanoseconds(options_.deadline.value_or(absl::ZeroDuration()));
  }
  message.record = options_.record;
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
                                          std::vector<double> weights) {
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
    step->result.peak_activations.resize(workers_.size());
    step->result.times.resize(workers_.size());
  }
  // In the order of their numbers to every worker.
  MutexLock lock(&mutex_);
  if (!error_.ok()) {
    const Status error = error_;
    lock.unlock();
    throw_error(error);
  }
  step->number = next_step_++;
  BeginMessage message{id_, step->number, {}, {}, {}};
  std::vector<BeginMessage> all(workers_.size(), message);
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

void Pipeline::State::ended(size_t w, StatusOr<Payload> answer, const std::shared_ptr<Step>& step) {
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
    if (static_cast<int>(w) == plan_.placement[plan_.stages() - 1]) {
      step->result.losses = std::move(end->losses);
    }
  }
  if (--step->left > 0) return;
  const Status first = step->first.ok() ? step->silent : step->first;
  StepResult result = std::move(step->result);
  lock.unlock();
  if (!first.ok()) {
    step->promise.try_set(first);
    return;
  }
  for (size_t i = 0; i < result.losses.size(); ++i)
    result.loss += result.losses[i] * step->weights[i];
  step->promise.try_set(std::move(result));
}

void Pipeline::State::close(bool wait) {
  {
    MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
    if (error_.ok()) error_ = make_error(ErrorKind::kState, "the pipeline is closed");
  }
  std::vector<Future<PipelineMessage>> closing;
  for (const WorkerInfo& w : workers_) {
    if (w.name.empty()) continue;
    closing.push_back(ask<PipelineMessage>(*worker_, w, "@pipeline.close", PipelineMessage{id_},
                                           {.deadline = absl::Seconds(30)}));
  }
  if (!wait) return;
  // One that is gone has closed its part.
  for (auto& future : closing) future.try_wait().status().IgnoreError();
}

Pipeline::Pipeline(const Worker& worker, std::vector<Stage> stages, Plan plan,
                   PipelineOptions options) {
  const auto service = worker.service<internal::PipelineService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' does not list pipeline_service()")));
  }
  state_ = std::make_shared<State>(service->context().worker, std::move(plan), std::move(options));
  state_->open(stages);
}

Pipeline::~Pipeline() {
  if (state_ != nullptr) state_->close(/*wait=*/false);
}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&& other) noexcept {
  if (state_ != nullptr && state_ != other.state_) state_->close(/*wait=*/false);
  state_ = std::move(other.state_);
  return *this;
}

Future<StepResult> Pipeline::step_async(const Tensors& inputs, const at::Tensor& target) {
  const int64_t m = plan().micro_batches;
  if (inputs.empty()) throw_error(refused("a step without inputs"));
  int64_t n = -1;
  Tensors all = inputs;
  if (target.defined()) all.push_back(target);
  for (const at::Tensor& t : all) {
    if (!t.defined() || t.dim() == 0) throw_error(refused("a batch has a first dimension"));
    if (n >= 0 && t.size(0) != n) {
      throw_error(
          refused(absl::StrCat("a batch of ", n, " with an input or target of ", t.size(0))));
    }
    n = t.size(0);
  }
  if (n < m) throw_error(refused(absl::StrCat("a batch of ", n, " for ", m, " micro-batches")));
  std::vector<Tensors> parts(static_cast<size_t>(m));
  for (const at::Tensor& t : inputs) {
    const auto cut = at::tensor_split(t, m);
    for (int64_t i = 0; i < m; ++i) parts[i].push_back(cut[i]);
  }
  std::vector<double> weights;
  for (int64_t i = 0; i < m; ++i) {
    weights.push_back(state_->options().reduction == Reduction::kSum
                          ? 1.0
                          : static_cast<double>(parts[i][0].size(0)) / static_cast<double>(n));
  }
  std::vector<at::Tensor> targets;
  if (target.defined()) targets = at::tensor_split(target, m);
  return step_async(std::move(parts), std::move(targets), std::move(weights));
}

Future<StepResult> Pipeline::step_async(std::vector<Tensors> inputs,
                                        std::vector<at::Tensor> targets,
                                        std::vector<double> weights) {
  return state_->begin(std::move(inputs), std::move(targets), std::move(weights));
}

StepResult Pipeline::step(const Tensors& inputs, const at::Tensor& target) {
  return step_async(inputs, target).wait();
}

std::map<std::string, at::Tensor> Pipeline::gradients(int stage) const {
  return state_->fetch(stage, internal::Fetch::kGradients, {}).wait();
}

void Pipeline::zero_grad() const {
  std::vector<Future<std::map<std::string, at::Tensor>>> all;
  for (int s = 0; s < plan().stages(); ++s) {
    all.push_back(state_->fetch(s, internal::Fetch::kZeroGrad, {}));
  }
  for (auto& f : all) f.wait();
}

std::map<std::string, at::Tensor> Pipeline::state_dict(int stage) const {
  return state_->fetch(stage, internal::Fetch::kState, {}).wait();
}

void Pipeline::load_state_dict(int stage, const std::map<std::string, at::Tensor>& state) const {
  state_->fetch(stage, internal::Fetch::kLoadState, state).wait();
}

const Plan& Pipeline::plan() const { return state_->plan(); }
Status Pipeline::status() const { return state_->status(); }
void Pipeline::close() { state_->close(/*wait=*/true); }

}  // namespace weft::pipeline
