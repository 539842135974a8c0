// What a service answers about the state of stages: gradients, states, and copies of them.

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/service.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::pipeline::internal {

StatusOr<std::map<std::string, at::Tensor>> PipelineService::copy_of(
    uint64_t pipeline, const FetchMessage& message) const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<Part> all, find_all(pipeline));
  if (all.front().copies == nullptr) {
    return make_error(ErrorKind::kState, absl::StrCat("pipeline ", pipeline, " keeps no copies"));
  }
  return all.front().copies->get(message.owner, message.steps, message.stage);
}

void PipelineService::on_fetch(CallContext& call, FetchMessage message, ReplyFn reply) {
  (void)call;
  const auto what = static_cast<Fetch>(message.what);
  const auto refuse = [&](const Status& why) {
    reply(annotate(why, absl::StrCat("stage ", message.stage)));
  };
  if (what == Fetch::kCopy) {
    const auto copy = copy_of(message.pipeline, message);
    if (!copy.ok()) return refuse(copy.status());
    return reply(encode(*copy));
  }
  const auto all = find_all(message.pipeline);
  if (!all.ok()) return reply(all.status());
  const Part* part = nullptr;
  for (const Part& p : *all) {
    if (p.modules.count(static_cast<int>(message.stage)) > 0) part = &p;
  }
  if (part == nullptr) {
    return reply(make_error(ErrorKind::kInvalidArgument,
                            absl::StrCat("stage ", message.stage, " is not at worker '",
                                         context_.worker->name(), "'")));
  }
  ModuleCompute& compute = *part->modules.at(static_cast<int>(message.stage));
  Status status;
  switch (what) {
    case Fetch::kGradients: return reply(encode(compute.gradients()));
    case Fetch::kState: return reply(encode(compute.state()));
    case Fetch::kShapes: return reply(encode(compute.shapes()));
    case Fetch::kSetSteps: status = part->runner->set_steps(message.steps); break;
    case Fetch::kZeroGrad: compute.zero_grad(); break;
    case Fetch::kLoadCopy: {
      auto copy = copy_of(message.from, message);
      if (!copy.ok()) return refuse(copy.status());
      message.state = *std::move(copy);
      status = compute.load_state(message.state);
      break;
    }
    case Fetch::kLoadState: status = compute.load_state(message.state); break;
    case Fetch::kKeep: break;
    default: status = make_error(ErrorKind::kProtocol, absl::StrCat("fetch ", message.what));
  }
  compute.publish();  // what was loaded comes before the next step
  if (!status.ok()) return refuse(status);
  auto done = [reply = std::move(reply)](const Status& kept) mutable {
    if (!kept.ok()) return reply(kept);
    reply(encode(std::map<std::string, at::Tensor>{}));
  };
  if (what != Fetch::kKeep) return done(absl::OkStatus());
  part->runner->keep(std::move(done));
}

void PipelineService::on_keep(CallContext& call, KeepMessage message, ReplyFn reply) {
  (void)call;
  const auto all = find_all(message.pipeline);
  if (!all.ok()) return reply(all.status());
  if (all->front().copies == nullptr) {
    return reply(make_error(ErrorKind::kProtocol, "this pipeline keeps no copies"));
  }
  for (const StageState& one : message.states) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : one.state) tensors.push_back(tensor);
    publish_here(*context_.worker, tensors);  // before a worker that fetches it
  }
  all->front().copies->put(message.owner, message.steps, std::move(message.states));
  reply(encode(PipelineMessage{}));
}

// The parts stay for their copies until the pipeline is closed; what they run has ended.
void PipelineService::on_survey(CallContext& call, PipelineMessage message, ReplyFn reply) {
  (void)call;
  SurveyAnswer out;
  const auto all = find_all(message.pipeline);
  if (all.ok()) {
    for (const Part& part : *all) {
      part.runner->close(make_error(ErrorKind::kState, "the pipeline is being rebuilt"));
      part.runner->join();
    }
    if (all->front().copies != nullptr) out.copies = all->front().copies->list();
    // A worker that is asked again, because another one is silent, says what it has found out meanwhile.
    const std::vector<WorkerInfo>& workers = all->front().runner->setup().workers;
    ask_whether_gone(workers);
    const std::set<WorkerInfo> of_plan(workers.begin(), workers.end());
    MutexLock lock(&mutex_);
    for (const WorkerInfo& worker : of_plan) {
      if (gone_.count(worker) > 0) out.gone.push_back(worker);
    }
  }
  reply(encode(out));
}

}  // namespace weft::pipeline::internal
