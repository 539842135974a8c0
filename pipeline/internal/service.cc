#include "weft/pipeline/internal/service.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace weft::pipeline::internal {
namespace {

constexpr absl::Duration kConnectTime = absl::Seconds(60);
constexpr absl::Duration kAskTime = absl::Seconds(5);

void answer(ReplyFn reply) { reply(encode(PipelineMessage{})); }

}  // namespace

PipelineService::~PipelineService() {
  for (const auto& [id, part] : parts_) ended_.push_back(part.runner);
  for (const auto& runner : ended_) {
    runner->close(make_error(ErrorKind::kState, "the worker has shut down"));
    runner->join();
  }
}

template <class Message>
Method PipelineService::method(std::string_view name, bool inline_ok,
                               void (PipelineService::*handle)(CallContext&, Message, ReplyFn)) {
  Method m;
  m.name = std::string(name);
  m.signature = std::string(kSignature);
  m.inline_ok = inline_ok;
  m.invoke = [weak = weak_from_this(), handle](CallContext& call, const std::shared_ptr<void>&,
                                               Payload arguments, ReplyFn reply) {
    const auto self = weak.lock();
    if (self == nullptr) return reply(make_error(ErrorKind::kState, "the worker has shut down"));
    StatusOr<Message> message = decode<Message>(std::move(arguments));
    if (!message.ok()) return reply(message.status());
    (self.get()->*handle)(call, *std::move(message), std::move(reply));
  };
  return m;
}

std::vector<Method> PipelineService::methods() {
  std::vector<Method> all;
  all.push_back(method("@pipeline.open", false, &PipelineService::on_open));
  all.push_back(method("@pipeline.touch", true, &PipelineService::on_touch));
  all.push_back(method("@pipeline.begin", true, &PipelineService::on_begin));
  all.push_back(method("@pipeline.put", true, &PipelineService::on_put));
  all.push_back(method("@pipeline.fail", true, &PipelineService::on_fail));
  all.push_back(method("@pipeline.probe", true, &PipelineService::on_probe));
  all.push_back(method("@pipeline.ended", true, &PipelineService::on_ended_told));
  all.push_back(method("@pipeline.fetch", false, &PipelineService::on_fetch));
  all.push_back(method("@pipeline.keep", false, &PipelineService::on_keep));
  all.push_back(method("@pipeline.survey", false, &PipelineService::on_survey));
  all.push_back(method("@pipeline.close", false, &PipelineService::on_close));
  all.push_back(method("@pipeline.sum", false, &PipelineService::on_sum));
  all.push_back(method("@pipeline.sum_fail", false, &PipelineService::on_sum_fail));
  return all;
}

Status PipelineService::missing(uint64_t pipeline) const {
  return make_error(ErrorKind::kNotFound,
                    absl::StrCat("pipeline ", pipeline, " has no part at worker '",
                                 context_.worker->name(), "': it is closed, or was never made"));
}

StatusOr<PipelineService::Part> PipelineService::find(uint64_t pipeline, int64_t worker) const {
  MutexLock lock(&mutex_);
  const auto it = parts_.find({pipeline, worker});
  if (it == parts_.end()) return missing(pipeline);
  return it->second;
}

StatusOr<std::vector<PipelineService::Part>> PipelineService::find_all(uint64_t pipeline) const {
  MutexLock lock(&mutex_);
  std::vector<Part> found;
  for (auto it = parts_.lower_bound({pipeline, 0});
       it != parts_.end() && it->first.first == pipeline; ++it) {
    found.push_back(it->second);
  }
  if (found.empty()) return missing(pipeline);
  return found;
}

StatusOr<PartDigest> PipelineService::digest(uint64_t pipeline) const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<Part> found, find_all(pipeline));
  return found.front().runner->setup().digest;
}

std::vector<PipelineService::Part> PipelineService::parts() const {
  MutexLock lock(&mutex_);
  std::vector<Part> all;
  for (const auto& [id, part] : parts_) all.push_back(part);
  return all;
}

void PipelineService::host(int64_t key, weft::internal::LocalModule module) {
  weft::internal::GuardRef made = weft::internal::mark_all_here(*context_.worker);
  MutexLock lock(&mutex_);
  if (!closed_) modules_[key] = {std::move(module), std::move(made)};
}

void PipelineService::on_open(CallContext& call, OpenMessage message, ReplyFn reply) {
  reap();
  StatusOr<Part> part = make_part(call.caller(), message);
  if (!part.ok()) return reply(part.status());
  {
    MutexLock lock(&mutex_);
    const PartName name{message.pipeline, message.self};
    if (closed_ || parts_.count(name) > 0) {
      const char* const why = closed_ ? "the worker is leaving" : "the pipeline has that part here";
      lock.unlock();
      return reply(make_error(ErrorKind::kState, why));
    }
    parts_[name] = *part;
  }
  part->runner->start();
  connect(part->runner, std::move(reply));
}

// Nothing of a step shall wait until its workers have met.
void PipelineService::connect(const std::shared_ptr<Runner>& runner, ReplyFn reply) {
  const RunnerSetup& setup = runner->setup();
  std::set<int> peers;
  for (const Edge& e : setup.plan.edges) {
    const int from = setup.plan.placement[e.from];
    const int to = setup.plan.placement[e.to];
    if (from == to) continue;
    if (from == static_cast<int>(setup.self)) peers.insert(to);
    if (to == static_cast<int>(setup.self)) peers.insert(from);
  }
  if (peers.empty()) return answer(std::move(reply));
  struct Waiting {
    Mutex mutex;
    size_t left ABSL_GUARDED_BY(mutex) = 0;
    Status first ABSL_GUARDED_BY(mutex);
    ReplyFn reply;
  };
  const auto waiting = std::make_shared<Waiting>();
  waiting->reply = std::move(reply);
  {
    MutexLock lock(&waiting->mutex);
    waiting->left = peers.size();
  }
  for (int peer : peers) {
    call(*context_.worker, setup.workers[peer], "@pipeline.touch", PipelineMessage{setup.pipeline},
         {.deadline = kConnectTime}, [waiting](const StatusOr<Payload>& result) {
           Status first;
           {
             MutexLock lock(&waiting->mutex);
             if (!result.ok() && waiting->first.ok()) waiting->first = result.status();
             if (--waiting->left > 0) return;
             first = waiting->first;
           }
           if (!first.ok()) return waiting->reply(annotate(first, "connecting the pipeline"));
           answer(std::move(waiting->reply));
         });
  }
}

void PipelineService::on_touch(CallContext& call, PipelineMessage message, ReplyFn reply) {
  (void)call, (void)message;
  answer(std::move(reply));
}

void PipelineService::on_begin(CallContext& call, BeginMessage message, ReplyFn reply) {
  (void)call;
  const auto part = find(message.pipeline, message.worker);
  if (!part.ok()) return reply(part.status());
  part->runner->begin(std::move(message), std::move(reply));
}

void PipelineService::on_put(CallContext& call, PutMessage message, ReplyFn reply) {
  const auto part = find(message.pipeline, message.worker);
  if (!part.ok()) return reply(part.status());
  part->runner->put(std::move(message), call.caller().name, std::move(reply));
}

void PipelineService::on_fail(CallContext& call, FailMessage message, ReplyFn reply) {
  const auto all = find_all(message.pipeline);
  if (all.ok()) {
    ErrorDetails details;
    details.kind = message.kind > 0 && message.kind <= static_cast<int64_t>(ErrorKind::kPermission)
                       ? static_cast<ErrorKind>(message.kind)
                       : ErrorKind::kInternal;
    details.origin = message.origin.empty() ? call.caller().name : message.origin;
    const bool known = message.code > 0 && message.code <= 16;
    const Status why(
        known ? static_cast<absl::StatusCode>(message.code) : absl::StatusCode::kUnknown,
        message.message);
    const Status told = with_details(why, details);
    for (const Part& part : *all) {
      if (details.kind == ErrorKind::kPeerLost) {
        part.runner->lost(told, /*tell_others=*/false);
      } else {
        part.runner->fail(told, /*tell_others=*/false);
      }
    }
  }
  answer(std::move(reply));
}

void PipelineService::on_probe(CallContext& call, PipelineMessage message, ReplyFn reply) {
  (void)call;
  const auto all = find_all(message.pipeline);
  if (!all.ok()) return reply(all.status());
  for (const Part& part : *all) {
    if (const Status status = part.runner->status(); !status.ok()) return reply(status);
  }
  answer(std::move(reply));
}

void PipelineService::on_close(CallContext& call, PipelineMessage message, ReplyFn reply) {
  (void)call;
  std::vector<Part> closed;
  {
    MutexLock lock(&mutex_);
    for (auto it = parts_.lower_bound({message.pipeline, 0});
         it != parts_.end() && it->first.first == message.pipeline; it = parts_.erase(it)) {
      closed.push_back(std::move(it->second));
    }
    if (parts_.empty()) gone_.clear();
    const auto low = modules_.lower_bound(host_key(message.pipeline, 0));
    modules_.erase(low, modules_.lower_bound(host_key(message.pipeline + 1, 0)));
  }
  for (const Part& part : closed) {
    part.runner->close(make_error(ErrorKind::kState, "the pipeline is closed"));
    part.runner->join();  // its thread ends with the action that it runs
  }
  answer(std::move(reply));
}

void PipelineService::on_worker_gone(const WorkerInfo& worker, const Status& why) {
  sums_->on_worker_gone(worker, why);
  for (const Part& part : parts()) {
    const bool maker = part.maker.id == worker.id && part.maker.incarnation == worker.incarnation;
    if (!maker && !part.runner->concerns(worker)) continue;
    const RunnerSetup& setup = part.runner->setup();
    std::string stages;
    for (int s = 0; s < setup.plan.stages(); ++s) {
      if (setup.workers[setup.plan.placement[s]] == worker) {
        absl::StrAppend(&stages, stages.empty() ? " with stage " : ", ", s);
      }
    }
    part.runner->lost(make_error(ErrorKind::kPeerLost,
                                 absl::StrCat("pipeline: worker '", worker.name, "'", stages,
                                              " is gone: ", std::string(why.message()))),
                      /*tell_others=*/true);
    if (maker) abandon(part);
  }
}

void PipelineService::on_ended(const WorkerInfo& worker, const Status& why) {
  std::map<uint64_t, WorkerInfo> makers;  // of pipelines that it is a worker of
  {
    MutexLock lock(&mutex_);
    if (parts_.empty() || !gone_.insert(worker).second) return;
    for (const auto& [name, part] : parts_) {
      if (part.runner->concerns(worker)) makers.emplace(name.first, part.maker);
    }
  }
  sums_->on_worker_gone(worker, why);
  for (const auto& [pipeline, maker] : makers) {
    if (maker == worker) continue;
    call(*context_.worker, maker, "@pipeline.ended",
         EndedMessage{pipeline, worker, std::string(why.message())},
         {.deadline = kAskTime, .retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait},
         [](const StatusOr<Payload>&) {});
  }
}

void PipelineService::on_ended_told(CallContext& call, EndedMessage message, ReplyFn reply) {
  OnEnded told;
  {
    MutexLock lock(&mutex_);
    const auto it = makers_.find(message.pipeline);
    if (it != makers_.end()) told = it->second;
  }
  if (told != nullptr) {
    told(message.worker,
         make_error(ErrorKind::kPeerLost,
                    absl::StrCat("worker '", call.caller().name, "' knows: ", message.why)));
  }
  answer(std::move(reply));
}

void PipelineService::watch(uint64_t pipeline, OnEnded on_ended) {
  MutexLock lock(&mutex_);
  makers_[pipeline] = std::move(on_ended);
}
void PipelineService::unwatch(uint64_t pipeline) {
  OnEnded ended;  // outlives the lock
  MutexLock lock(&mutex_);
  const auto it = makers_.find(pipeline);
  if (it == makers_.end()) return;
  ended = std::move(it->second);
  makers_.erase(it);
}

void PipelineService::ask_whether_gone(const std::vector<WorkerInfo>& workers) {
  for (const WorkerInfo& worker : workers) {
    if (worker == context_.worker->info()) continue;
    {
      MutexLock lock(&mutex_);
      if (gone_.count(worker) > 0 || !asking_.insert(worker).second) continue;
    }
    call(*context_.worker, worker, "@pipeline.touch", PipelineMessage{},
         {.deadline = kAskTime, .retry = Retry::kAtMostOnce, .backpressure = Backpressure::kWait},
         [weak = weak_from_this(), worker](const StatusOr<Payload>& answer) {
           const auto self = weak.lock();
           if (self == nullptr) return;
           {
             MutexLock lock(&self->mutex_);
             self->asking_.erase(worker);
           }
           if (has_ended(answer.status())) self->on_ended(worker, answer.status());
         });
  }
}

// Closes a part whose maker is gone: no other worker will.
void PipelineService::abandon(const Part& part) {
  const RunnerSetup& setup = part.runner->setup();
  part.runner->close(make_error(ErrorKind::kPeerLost, "the maker of the pipeline is gone"));
  MutexLock lock(&mutex_);
  if (parts_.erase({setup.pipeline, static_cast<int64_t>(setup.self)}) > 0)
    ended_.push_back(part.runner);
}

// Threads of pipelines that were abandoned are joined once they have ended, here or at the shutdown.
void PipelineService::reap() {
  std::vector<std::shared_ptr<Runner>> done;
  {
    MutexLock lock(&mutex_);
    const auto middle = std::stable_partition(ended_.begin(), ended_.end(), [](const auto& runner) {
      return !runner->thread_has_ended();
    });
    done.assign(std::make_move_iterator(middle), std::make_move_iterator(ended_.end()));
    ended_.erase(middle, ended_.end());
  }
  for (const auto& runner : done) runner->join();
}

void PipelineService::on_shutdown(const Status& why) {
  sums_->close(make_error(
      ErrorKind::kPeerLost,
      absl::StrCat("worker '", context_.worker->name(), "' leaves: ", std::string(why.message()))));
  std::map<PartName, Part> parts;
  {
    MutexLock lock(&mutex_);
    closed_ = true;
    parts.swap(parts_);
    modules_.clear();
  }
  for (auto& [id, part] : parts) {
    part.runner->close(
        make_error(ErrorKind::kPeerLost, absl::StrCat("pipeline: worker '", context_.worker->name(),
                                                      "' leaves: ", std::string(why.message()))));
  }
  MutexLock lock(&mutex_);
  for (auto& [id, part] : parts) ended_.push_back(std::move(part.runner));
}

void PipelineService::put_debug_info(std::map<std::string, int64_t>* out) const {
  Runner::Counts sum;
  const auto all = parts();
  for (const Part& part : all) {
    const Runner::Counts c = part.runner->counts();
    sum.slots += c.slots;
    sum.steps += c.steps;
    sum.sends += c.sends;
  }
  (*out)["pipelines"] = static_cast<int64_t>(all.size());
  (*out)["pipeline_slots"] = sum.slots;
  (*out)["pipeline_steps"] = sum.steps;
  (*out)["pipeline_sends"] = sum.sends;
  MutexLock lock(&mutex_);
  (*out)["pipeline_modules"] = static_cast<int64_t>(modules_.size());
}

void PipelineService::put_inspection(Inspection* out) const {
  Inspection::Table& table =
      out->table("pipelines", {"id", "maker", "schedule", "stages", "steps", "slots", "doing"});
  for (const Part& part : parts()) {
    const RunnerSetup& setup = part.runner->setup();
    const Runner::Counts c = part.runner->counts();
    std::string stages;
    for (const auto& [s, compute] : setup.stages) {
      absl::StrAppend(&stages, stages.empty() ? "" : " ", s);
    }
    table.add({absl::StrCat(setup.pipeline), part.maker.name, setup.plan.schedule, stages, c.steps,
               c.slots, part.runner->doing()});
  }
}

}  // namespace weft::pipeline::internal

namespace weft {

ServiceFactory pipeline_service(PipelineServiceOptions options) {
  return [options](const ServiceContext& context) {
    return std::make_shared<pipeline::internal::PipelineService>(context, options);
  };
}

}  // namespace weft
