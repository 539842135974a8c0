// call_reducer(): replicas of a stage reduced by calls. The sums of a step are spread over the replicas'
// workers: bucket k is added up at replica k modulo their number.

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/common/condition.h"
#include "weft/pipeline/internal/call_sums.h"
#include "weft/pipeline/internal/pipeline_state.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/reducer.h"
#include "weft/rpc/call_context.h"

namespace weft::pipeline {
namespace internal {
namespace {

// A wait of this length is worth a question.
constexpr absl::Duration kAskReplicasAfter = absl::Milliseconds(500);
constexpr absl::Duration kAskReplicasFor = absl::Seconds(5);

Status status_of(int64_t kind, const std::string& why, const std::string& origin) {
  const bool known = kind > 0 && kind <= static_cast<int64_t>(ErrorKind::kPermission);
  const Status status =
      make_error(known ? static_cast<ErrorKind>(kind) : ErrorKind::kInternal, why);
  ErrorDetails details = error_details(status);
  details.origin = origin;
  return with_details(status, details);
}

class CallReducer final : public GradReducer {
 public:
  CallReducer(std::shared_ptr<const Worker> worker, const PipelineService& service,
              std::vector<WorkerInfo> replicas, size_t rank, CallReducerOptions options)
      : worker_(std::move(worker)),
        sums_(service.sums()),
        runtime_(service.context().runtime),
        replicas_(std::move(replicas)),
        rank_(rank),
        options_(std::move(options)),
        round_(std::make_shared<Round>(runtime_)) {}
  ~CallReducer() override { sums_->remove_reducer(options_.name); }

  Status ready(const at::Tensor& gradient) override {
    if (!gradient.defined() || gradient.layout() != at::kStrided) {
      return make_error(ErrorKind::kInvalidArgument, "call_reducer() takes dense gradients");
    }
    bucket_.push_back(gradient);
    bytes_ += static_cast<int64_t>(gradient.nbytes());
    if (bytes_ >= options_.bucket_bytes) launch();
    return absl::OkStatus();
  }

  Status finish(absl::Duration time_left) override {
    launch();
    const absl::Time deadline = runtime_->now() + time_left;
    const std::shared_ptr<Round> round = this_round();
    const std::vector<Tensors> given = std::exchange(given_, {});
    ++number_;
    while (!round->wait(given.size(), std::min(deadline, runtime_->now() + kAskReplicasAfter)) &&
           runtime_->now() < deadline) {
      probe(round);
    }
    next_round();
    std::vector<Tensors> sums;
    Status first;
    {
      MutexLock lock(&round->mutex);
      first = round->first;
      if (first.ok() && round->sums.size() < given.size()) {
        first = make_error(ErrorKind::kDeadline,
                           absl::StrCat(given.size() - round->sums.size(), " of ", given.size(),
                                        " buckets have no sum in the step's time"));
      }
      for (auto& [bucket, tensors] : round->sums) sums.push_back(std::move(tensors));
    }
    const c10::AutoGradMode off(false);
    for (size_t b = 0; first.ok() && b < given.size(); ++b) {
      if (sums[b].size() != given[b].size()) {
        first = make_error(ErrorKind::kProtocol, absl::StrCat(sums[b].size(), " sums for ",
                                                              given[b].size(), " gradients"));
        break;
      }
      for (size_t k = 0; k < given[b].size(); ++k) given[b][k].copy_(sums[b][k]);
    }
    if (first.ok()) return first;
    tell_others(first);
    return annotate(first, absl::StrCat("reducing over calls, reducer '", options_.name, "' of ",
                                        replicas_.size(), " replicas"));
  }

  void cancel(const Status& why) override {
    std::shared_ptr<Round> round;
    {
      MutexLock lock(&mutex_);
      if (cancelled_.ok()) cancelled_ = why;
      round = round_;
    }
    round->fail(why);
  }

  void drop(const Status& why) override {
    bucket_.clear();
    bytes_ = 0;
    given_.clear();
    next_round();
    tell_others(make_error(
        error_kind(why),
        absl::StrCat("replica ", rank_, " of reducer '", options_.name, "', worker '",
                     replicas_[rank_].name, "', has failed: ", std::string(why.message()))));
  }

 private:
  // What one finish() waits for; answers may come after it.
  struct Round {
    explicit Round(const std::shared_ptr<Runtime>& runtime)
        : runtime(runtime), changed(runtime.get()) {}
    // Whether there is no more to wait for: an error, or so many sums.
    bool wait(size_t buckets, absl::Time until) {
      MutexLock lock(&mutex);
      while (first.ok() && sums.size() < buckets) {
        if (runtime->now() >= until) return false;
        (void)changed.wait_until(&mutex, until);
      }
      return true;
    }
    void fail(const Status& why) { put(0, why); }
    void put(int64_t bucket, StatusOr<Tensors> sum) {
      {
        MutexLock lock(&mutex);
        if (sum.ok()) {
          sums.emplace(bucket, *std::move(sum));
        } else if (first.ok()) {
          first = sum.status();
        }
      }
      changed.notify_all();
    }
    const std::shared_ptr<Runtime> runtime;
    Mutex mutex;
    Condition changed;
    std::map<int64_t, Tensors> sums ABSL_GUARDED_BY(mutex);
    Status first ABSL_GUARDED_BY(mutex);
    std::set<size_t> probing ABSL_GUARDED_BY(mutex);  // replicas that have not answered
  };

  std::shared_ptr<Round> this_round() const {
    MutexLock lock(&mutex_);
    return round_;
  }
  void next_round() {
    auto next = std::make_shared<Round>(runtime_);
    MutexLock lock(&mutex_);
    if (!cancelled_.ok()) next->fail(cancelled_);
    round_ = std::move(next);
  }

  // One that has ended gives no part, and says nothing to those that wait for it: they ask, as
  // workers do that wait for a tensor (RUN-6). Silence says nothing.
  void probe(const std::shared_ptr<Round>& round) {
    for (size_t r = 0; r < replicas_.size(); ++r) {
      if (r == rank_) continue;
      {
        MutexLock lock(&round->mutex);
        if (!round->probing.insert(r).second) continue;
      }
      call(*worker_, replicas_[r], "@pipeline.touch", PipelineMessage{},
           {.deadline = kAskReplicasFor,
            .retry = Retry::kAtMostOnce,
            .backpressure = Backpressure::kWait},
           [round, r, sums = sums_, replica = replicas_[r]](const StatusOr<Payload>& answer) {
             {
               MutexLock lock(&round->mutex);
               round->probing.erase(r);
             }
             if (!has_ended(answer.status())) return;
             sums->on_worker_gone(replica,
                                  answer.status());  // other replicas' parts wait here, too
             round->fail(CallSums::gone_error(r, replica, answer.status()));
           });
    }
  }

  void launch() {
    if (bucket_.empty()) return;
    const auto bucket = static_cast<int64_t>(given_.size());
    given_.push_back(std::exchange(bucket_, {}));
    bytes_ = 0;
    SumMessage message{options_.name,
                       number_,
                       bucket,
                       static_cast<int64_t>(rank_),
                       static_cast<int64_t>(replicas_.size()),
                       options_.op.kind() == ReduceOp::kAvg,
                       given_.back()};
    const size_t root = static_cast<size_t>(bucket) % replicas_.size();
    if (root == rank_) {
      const absl::Time now = runtime_->now();
      sums_->give(std::move(message), now, absl::InfiniteFuture(),
                  [round = this_round(), bucket](StatusOr<Tensors> sum) {
                    round->put(bucket, std::move(sum));
                  });
      return;
    }
    CallOptions options{.retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait};
    options.deadline = options_.timeout;
    call(*worker_, replicas_[root], "@pipeline.sum", message, options,
         [round = this_round(), bucket](StatusOr<Payload> answer) {
           if (!answer.ok()) return round->put(bucket, answer.status());
           auto sum = decode<SumAnswer>(*std::move(answer));
           if (!sum.ok()) return round->put(bucket, sum.status());
           round->put(bucket, std::move(sum->tensors));
         });
  }

  // Those that wait for a part of this replica.
  void tell_others(const Status& why) {
    if (std::exchange(told_, true)) return;
    sums_->fail(options_.name, why);
    const SumFailMessage message{options_.name, static_cast<int64_t>(error_kind(why)),
                                 std::string(why.message())};
    for (size_t r = 0; r < replicas_.size(); ++r) {
      if (r == rank_) continue;
      call(*worker_, replicas_[r], "@pipeline.sum_fail", message,
           {.deadline = absl::Seconds(10),
            .retry = Retry::kAtMostOnce,
            .backpressure = Backpressure::kWait},
           [](const StatusOr<Payload>&) {});
    }
  }

  const std::shared_ptr<const Worker> worker_;
  const std::shared_ptr<CallSums> sums_;
  const std::shared_ptr<Runtime> runtime_;
  const std::vector<WorkerInfo> replicas_;
  const size_t rank_;
  const CallReducerOptions options_;
  int64_t number_ = 0;  // of the round
  mutable Mutex mutex_;
  std::shared_ptr<Round> round_ ABSL_GUARDED_BY(mutex_);
  Status cancelled_ ABSL_GUARDED_BY(mutex_);  // the error of the pipeline
  std::vector<Tensors> given_;                // by bucket
  Tensors bucket_;
  int64_t bytes_ = 0;
  bool told_ = false;
};

}  // namespace

void PipelineService::on_sum(CallContext& call, SumMessage message, ReplyFn reply) {
  const absl::Time now = context_.runtime->now();
  sums_->give(std::move(message), now, now + call.remaining(),
              [reply = std::move(reply)](StatusOr<Tensors> sum) mutable {
                if (!sum.ok()) return reply(sum.status());
                reply(encode(SumAnswer{*std::move(sum)}));
              });
}

void PipelineService::on_sum_fail(CallContext& call, SumFailMessage message, ReplyFn reply) {
  sums_->fail(message.reducer, status_of(message.kind, message.why, call.caller().name));
  reply(encode(PipelineMessage{}));
}

}  // namespace internal

std::shared_ptr<GradReducer> call_reducer(const ServiceContext& context,
                                          const std::vector<std::string>& replicas,
                                          const CallReducerOptions& options) {
  const auto refused = [](std::string_view what) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument, absl::StrCat("call_reducer: ", std::string(what))));
  };
  if (options.name.empty() || options.name.size() > 200) {
    refused("a name of 1 to 200 bytes, which all replicas of the stage have in common");
  }
  if (options.bucket_bytes < 1) {
    refused(absl::StrCat("buckets of ", options.bucket_bytes, " bytes"));
  }
  if (options.op.kind() != ReduceOp::kAvg && options.op.kind() != ReduceOp::kSum) {
    refused("gradients are averaged or summed");
  }
  auto service = context.worker->service<internal::PipelineService>();
  if (service == nullptr) refused("the worker lists no pipeline_service()");
  std::vector<WorkerInfo> infos;
  size_t rank = replicas.size();
  for (const std::string& name : replicas) {
    infos.push_back(context.worker->get_worker_info(name));
    if (std::count(replicas.begin(), replicas.end(), name) > 1) {
      refused(absl::StrCat("worker '", name, "' is there twice"));
    }
    if (infos.back() == context.worker->info()) rank = infos.size() - 1;
  }
  if (rank == replicas.size()) {
    refused(absl::StrCat("this worker, '", context.worker->name(), "', is none of the replicas"));
  }
  // The replicas meet before anything is timed; the end of one that is connected is known at once.
  std::vector<Future<internal::PipelineMessage>> met;
  for (const WorkerInfo& replica : infos) {
    if (replica == context.worker->info()) continue;
    met.push_back(internal::ask<internal::PipelineMessage>(
        *context.worker, replica, "@pipeline.touch", internal::PipelineMessage{}, {}));
  }
  for (auto& future : met) {
    throw_if_error(annotate(future.try_wait().status(), "call_reducer: connecting the replicas"));
  }
  throw_if_error(service->sums()->add_reducer(options.name, infos));
  return std::make_shared<internal::CallReducer>(context.worker, *service, std::move(infos), rank,
                                                 options);
}

}  // namespace weft::pipeline
