#ifndef WEFT_PIPELINE_STAGE_OPTIMIZER_H_
#define WEFT_PIPELINE_STAGE_OPTIMIZER_H_

// StageOptimizer: what steps the parameters of one stage, for PipelineServiceOptions::make_optimizer:
// an optimizer of one's own, where PipelineOptions::optimizer names one of weft::optim.
//
//   weft::pipeline_service({.make_optimizer = [](const weft::ServiceContext&,
//       const weft::pipeline::Plan&, int stage, std::vector<at::Tensor> parameters) {
//     return weft::pipeline::torch_optimizer(
//         std::make_unique<torch::optim::AdamW>(std::move(parameters), 1e-3));
//   }});
//
// All calls come from the thread that runs the worker's list, or between steps.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace torch::optim {
class Optimizer;
}

namespace weft::pipeline {

class StageOptimizer {
 public:
  virtual ~StageOptimizer() = default;
  // Once, before anything else: the stage's parameters by name. One that calls what it keeps of
  // parameter NAME "NAME/..." goes into checkpoints by layer.
  virtual void set_names(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
    (void)parameters;
  }
  // After the stage's last gradient of a step. One gradient for each parameter, in their order, as
  // it is in `.grad()` of the parameter; undefined where there is none. They are cleared afterwards.
  virtual Status step(const std::vector<at::Tensor>& gradients) = 0;
  // The options of PipelineOptions::optimizer as Pipeline::rates() has them now, the rate first;
  // before a step for which they have changed.
  virtual Status set_options(const std::vector<double>& options) = 0;
  // What it keeps, by names of its own; load_state() takes it back, or changes nothing.
  virtual std::map<std::string, at::Tensor> state() const = 0;
  virtual Status load_state(const std::map<std::string, at::Tensor>& state) = 0;
};

// Around one of LibTorch's, or a class of one's own. step() is called without a closure; what it
// throws ends the pipeline. The rate of all of its groups is that of Pipeline::rates(), once it was
// set there. state() of Adam, AdamW, SGD, Adagrad and RMSprop is by parameter, as those classes call it
// ("weight/exp_avg"). Of others, LBFGS among them, it is one archive of bytes, of the whole stage: such
// a stage is loaded into the same stage only, not by layer. Throws weft::Error, kind invalid_argument,
// for null.
WEFT_API std::shared_ptr<StageOptimizer> torch_optimizer(
    std::unique_ptr<torch::optim::Optimizer> optimizer);

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_STAGE_OPTIMIZER_H_
