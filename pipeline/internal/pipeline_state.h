#ifndef WEFT_PIPELINE_INTERNAL_PIPELINE_STATE_H_
#define WEFT_PIPELINE_INTERNAL_PIPELINE_STATE_H_

// What stands behind a Pipeline: the workers' parts as their maker sees them. Any thread.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/mutex.h"
#include "weft/dist_optim/update_rule.h"
#include "weft/pipeline/internal/messages.h"
#include "weft/pipeline/pipeline.h"
#include "weft/rpc/call.h"

namespace weft::pipeline {
namespace internal {

inline Status refused(std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument, what);
}

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

}  // namespace internal

namespace internal {

// Options of the stages' optimizers, as their maker has them.
class StageRates final : public Rates {
 public:
  explicit StageRates(const OptimizerChoice& choice);
  size_t num_groups() const override { return names_.empty() ? 0 : 1; }
  double lr(size_t group) const override;
  void set_lr(double lr, size_t group) override;
  double initial_lr(size_t group) override;
  void set_initial_lr(double lr, size_t group) override;
  std::optional<double> option(std::string_view name, size_t group) const override;
  void set_option(std::string_view name, double value, size_t group) override;
  std::vector<double> options() const;

 private:
  size_t place(std::string_view name, size_t group) const;  // in options_, or their number
  void set(size_t at, double value);

  const std::shared_ptr<const UpdateRule> rule_;  // null: of no optimizer, or one that is unknown
  const std::vector<std::string> names_;
  mutable Mutex mutex_;
  std::vector<double> options_ ABSL_GUARDED_BY(mutex_);
  std::optional<double> initial_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal

class Pipeline::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<const Worker> worker, Plan plan, PipelineOptions options)
      : worker_(std::move(worker)),
        rates_(std::make_shared<internal::StageRates>(options.optimizer)),
        plan_(std::move(plan)),
        options_(std::move(options)) {}

  void open(std::vector<Stage> stages);
  // A new one over the same modules, but for lost ones; this one is ended, and kept until then.
  std::shared_ptr<State> rebuilt(const std::function<Stage(int)>& replace,
                                 const RebuildOptions& rebuild);
  Future<StepResult> begin(std::vector<Tensors> inputs, std::vector<at::Tensor> targets,
                           std::vector<double> weights, bool forward_only = false);
  // Tied parameters get the values of their first stage.
  void tie() const;
  void close(bool wait);
  Status status() const {
    MutexLock lock(&mutex_);
    return error_;
  }
  Future<std::map<std::string, at::Tensor>> fetch(int stage, internal::Fetch what,
                                                  std::map<std::string, at::Tensor> state) const {
    if (stage < 0 || stage >= plan_.stages()) {
      throw_error(
          internal::refused(absl::StrCat("there is no stage ", stage, " of ", plan_.stages())));
    }
    internal::FetchMessage message{.pipeline = id_, .stage = stage};
    message.what = static_cast<int64_t>(what);
    message.state = std::move(state);
    return fetch_at(workers_[plan_.placement[stage]], message);
  }
  // checkpoint.cc.
  void save(const std::string& path, const CheckpointOptions& options) const;
  void load(const std::string& path, const CheckpointOptions& options);
  // With copies: the state that stages have now becomes theirs.
  void keep() const;
  const Plan& plan() const { return plan_; }
  int64_t next_step() const {
    MutexLock lock(&mutex_);
    return next_step_;
  }
  const PipelineOptions& options() const { return options_; }
  Rates& rates() { return *rates_; }

 private:
  struct Step;
  struct Survey;
  using StateMap = std::map<std::string, at::Tensor>;
  void check(const std::vector<Stage>& stages);
  void check_tied() const;
  Future<StateMap> fetch_at(const WorkerInfo& worker, const internal::FetchMessage& message) const {
    return internal::ask<StateMap>(*worker_, worker, "@pipeline.fetch", message, long_options());
  }
  Survey survey() const;
  void restore(const State& old, const Survey& found, int64_t steps) const;
  void ended(size_t w, StatusOr<Payload> answer, const std::shared_ptr<Step>& step);
  void tell_of(size_t w, const Status& why) const;
  // Told by another one: it answers no step, though nothing is known of it here.
  void worker_ended(const WorkerInfo& worker, const Status& why);
  std::string stages_of(size_t w) const;
  // Options of calls that carry states: their deadline is a step's, and the default at least.
  CallOptions long_options() const {
    CallOptions o;
    if (options_.deadline.is_infinite() ||
        options_.deadline.value_or(absl::ZeroDuration()) > absl::Seconds(60)) {
      o.deadline = options_.deadline;
    }
    return o;
  }
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
  std::shared_ptr<internal::StageRates> rates_;  // the rebuilt one has the same
  const Plan plan_;
  const PipelineOptions options_;
  uint64_t id_ = 0;
  internal::PartDigest digest_;
  std::vector<WorkerInfo> workers_;
  std::vector<Stage> stages_;

  mutable Mutex mutex_;
  int64_t next_step_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t done_steps_ ABSL_GUARDED_BY(mutex_) = 0;            // whose results were given
  std::vector<double> sent_options_ ABSL_GUARDED_BY(mutex_);  // of the optimizer, to all workers
  Status error_ ABSL_GUARDED_BY(mutex_);
  // `error_` is about a worker that did not answer; what its peers say says more.
  bool unanswered_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<WorkerInfo> gone_ ABSL_GUARDED_BY(mutex_);  // workers that have nothing to close
  std::map<int64_t, std::shared_ptr<Step>> under_way_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_INTERNAL_PIPELINE_STATE_H_
