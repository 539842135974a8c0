// How a service makes its part of a pipeline.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/verifier.h"
#include "weft/rpc/spi/service_worker.h"

namespace weft::pipeline::internal {

StatusOr<PipelineService::Part> PipelineService::make_part(const WorkerInfo& maker,
                                                           const OpenMessage& message) {
  RunnerSetup setup;
  WEFT_ASSIGN_OR_RETURN(setup.plan, plan_from_text(message.plan));
  WEFT_RETURN_IF_ERROR(verify(setup.plan).status());
  if (message.self < 0 || message.self >= static_cast<int64_t>(setup.plan.workers.size()) ||
      message.workers.size() != setup.plan.workers.size()) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("worker ", message.self, " of ", message.workers.size(),
                                   " for a plan of ", setup.plan.workers.size()));
  }
  setup.pipeline = message.pipeline;
  setup.self = static_cast<size_t>(message.self);
  setup.workers = message.workers;
  setup.maker = maker;
  if (message.deadline_ns > 0) setup.deadline = absl::Nanoseconds(message.deadline_ns);
  setup.record = message.record;
  setup.first_step = message.first_step;
  setup.bug = options_.bug;
  setup.digest = digest_of(message);
  setup.clip_norm = message.clip_norm;
  setup.skip_not_finite = message.skip_not_finite;
  {
    MutexLock lock(&mutex_);
    if (metrics_ == nullptr) {
      metrics_ = std::make_shared<PipelineMetrics>(metrics_of(*context_.worker));
    }
    setup.metrics = metrics_;
  }
  Part part;
  part.maker = maker;
  for (int s = 0; s < setup.plan.stages(); ++s) {
    if (setup.plan.placement[s] != message.self) continue;
    weft::internal::LocalModule module;
    weft::internal::GuardRef made;
    {
      MutexLock lock(&mutex_);
      auto node = modules_.extract(host_key(message.pipeline, s));
      if (!node.empty()) {
        module = std::move(node.mapped().module);
        made = std::move(node.mapped().made);
      }
    }
    std::shared_ptr<StageCompute> compute;
    if (options_.make_compute != nullptr) {
      compute = options_.make_compute(context_, setup.plan, s);
    }
    if (compute == nullptr) {
      if (module.module == nullptr) {
        return make_error(ErrorKind::kState, absl::StrCat("no module was given for stage ", s));
      }
      ModuleComputeOptions o;
      o.stage = s;
      if (s == setup.plan.stages() - 1) o.loss = message.loss;
      o.optimizer = message.optimizer;
      o.optimizer_options = message.optimizer_options;
      if (message.has_seed) o.seed = message.seed;
      o.micro_batches = setup.plan.micro_batches;
      o.asynchronous = setup.plan.asynchronous;
      const auto& list = setup.plan.workers[setup.self];
      o.reduces = std::find(list.begin(), list.end(), Action{ActionKind::kReduce, s}) != list.end();
      if (o.reduces && options_.make_reducer != nullptr) {
        o.reducer = options_.make_reducer(context_, setup.plan, s);
      }
      if (static_cast<size_t>(s) < message.tied.size()) o.tied = message.tied[s];
      for (const auto& group : setup.plan.tied) {
        const bool of_group = std::find(group.begin(), group.end(), s) != group.end();
        if (of_group && *std::min_element(group.begin(), group.end()) < s) o.tied_elsewhere = true;
      }
      if (options_.make_optimizer != nullptr) {
        o.make_optimizer = [this, &setup, s](std::vector<at::Tensor> parameters) {
          return options_.make_optimizer(context_, setup.plan, s, std::move(parameters));
        };
      }
      // RUN-7: what made the module, then what this handler queues, then the first step.
      weft::internal::use_here(made, {});
      auto stage = ModuleCompute::make(context_.worker, std::move(module), std::move(o));
      if (!stage.ok()) return annotate(stage.status(), absl::StrCat("stage ", s));
      (*stage)->publish();
      part.modules[s] = *stage;
      compute = *std::move(stage);
    }
    setup.stages[s] = std::move(compute);
  }
  if (message.keep_copies) {
    const auto others = find_all(message.pipeline);
    part.copies = others.ok() ? others->front().copies : std::make_shared<StateCopies>();
    setup.copies = part.copies;
    setup.snapshot = [modules = part.modules] {
      std::vector<StageState> states;
      for (const auto& [stage, module] : modules) states.push_back({stage, module->state()});
      return states;
    };
  }
  if (!part.modules.empty()) {
    setup.publish = [modules = part.modules] {
      for (const auto& [stage, module] : modules) module->publish();
    };
  }
  setup.on_ended = [weak = weak_from_this()](const WorkerInfo& worker, const Status& why) {
    if (const auto self = weak.lock()) self->on_ended(worker, why);
  };
  setup.on_failed = [weak = weak_from_this(), workers = setup.workers] {
    if (const auto self = weak.lock()) self->ask_whether_gone(workers);
  };
  part.runner = std::make_shared<Runner>(context_.worker, context_.runtime, std::move(setup));
  return part;
}

}  // namespace weft::pipeline::internal
