#ifndef WEFT_PIPELINE_INTERNAL_DATA_PARALLEL_H_
#define WEFT_PIPELINE_INTERNAL_DATA_PARALLEL_H_

// DataParallelHooks: a stage whose module is a DistributedDataParallel. Gradients of a pipeline are
// captured, so no accumulator's hook runs by itself; here they are called, once per step, with a
// GradAccessor that stands for the sum over all micro-batches.
//
// The node that DistributedDataParallel puts behind its outputs is left out of the graph: LibTorch's
// engine would begin a reduction there in every backward. It stands directly behind the module's
// outputs, or the stage is refused.
//
// One thread.

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "torch/csrc/autograd/edge.h"
#include "weft/collectives/grad_accessor.h"
#include "weft/common/error.h"

namespace weft::pipeline::internal {

class StepAccessor;

class DataParallelHooks {
 public:
  // Null when no parameter has a hook.
  static std::unique_ptr<DataParallelHooks> of(const std::vector<at::Tensor>& parameters);
  ~DataParallelHooks();

  // After a forward with a graph.
  void unwrap(std::vector<at::Tensor>* outputs);
  // The sum of a step is in `.grad()`. Throws what a hook throws.
  void ready(const at::Tensor& parameter);
  // All are. Ends with what was to run at the end of the backward.
  Status finish(absl::Duration time_left);
  void drop();

 private:
  using Node = decltype(torch::autograd::Edge::function);
  void begin();

  Node watcher_;  // of the last forward
  std::shared_ptr<StepAccessor> accessor_;
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_DATA_PARALLEL_H_
