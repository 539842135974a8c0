#ifndef WEFT_PIPELINE_SERVICE_H_
#define WEFT_PIPELINE_SERVICE_H_

// What a worker lists at join to run stages of pipelines, and to make pipelines; weft::join does.
//
//   weft::Worker::join({.library = library(),
//                       .services = {weft::rref_service(), weft::pipeline_service()}});
//
// debug_info() then has "pipelines" (that have a part here), "pipeline_steps" (done),
// "pipeline_sends", "pipeline_slots" (what waits for an action) and "pipeline_modules" (given, and
// not yet part of one). weft-inspect shows a table `pipelines`: what each part does.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"
#include "weft/pipeline/stage_compute.h"
#include "weft/rpc/spi/service.h"

namespace weft {

namespace pipeline {
class GradReducer;
class StageOptimizer;
namespace internal {
enum class RunnerBug : uint8_t;
}
}  // namespace pipeline

struct PipelineServiceOptions {  // what a service makes of stages
  // Instead of calling the module: for tests, which let a stage wait. Null, or giving null: the
  // module.
  std::function<std::shared_ptr<pipeline::StageCompute>(const ServiceContext& context,
                                                        const pipeline::Plan& plan, int stage)>
      make_compute{};
  // What reduces the gradients of a stage over its replicas, of plans with reductions (reducer.h).
  // Null, or giving null: nothing, as for a module that is a DistributedDataParallel.
  std::function<std::shared_ptr<pipeline::GradReducer>(const ServiceContext& context,
                                                       const pipeline::Plan& plan, int stage)>
      make_reducer{};
  // What steps the parameters of a stage, instead of the rule that PipelineOptions::optimizer names
  // (stage_optimizer.h). Null, or giving null: that rule.
  std::function<std::shared_ptr<pipeline::StageOptimizer>(const ServiceContext& context,
                                                          const pipeline::Plan& plan, int stage,
                                                          std::vector<at::Tensor> parameters)>
      make_optimizer{};
  // For tests: one that the runtime has then.
  pipeline::internal::RunnerBug bug{};
};

WEFT_API ServiceFactory pipeline_service(PipelineServiceOptions options = {});

}  // namespace weft

#endif  // WEFT_PIPELINE_SERVICE_H_
