#ifndef WEFT_PIPELINE_STAGE_COMPUTE_H_
#define WEFT_PIPELINE_STAGE_COMPUTE_H_

// StageCompute: what the actions of one stage do. The one of the framework calls a module; a test's
// waits instead, so that a run can be compared with its simulation. All calls come from the one
// thread that runs the worker's list.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/error.h"

namespace weft::pipeline {

using Tensors = std::vector<at::Tensor>;  // inputs or outputs of a stage

struct ForwardCall {    // one forward of a stage
  int64_t step = 0;     // number of the step
  int micro_batch = 0;  // number in the step
  Tensors inputs{};     // of this micro-batch
  // Of the last stage: what the loss compares with, and by what it is multiplied. Undefined
  // elsewhere.
  at::Tensor target{};
  double scale = 1;
  bool is_last = false;
  // The stage runs again before its backward: nothing but the inputs is kept.
  bool recompute = false;
};

class StageCompute {
 public:
  virtual ~StageCompute() = default;
  // The outputs; of the last stage the loss before its scale, as one tensor of one element.
  virtual StatusOr<Tensors> forward(ForwardCall call) = 0;
  // The forward once more, with what its backward needs.
  virtual Status recompute(int64_t step, int micro_batch) = 0;
  // `gradients`: one per output (an undefined one: nobody needs it); none for the last stage, whose
  // loss begins. Returns one per input, undefined for those that have none.
  virtual StatusOr<Tensors> backward(int64_t step, int micro_batch, Tensors gradients) = 0;
  virtual StatusOr<Tensors> input_grad(int64_t step, int micro_batch, Tensors gradients) = 0;
  virtual Status weight_grad(int64_t step, int micro_batch) = 0;
  // After the last gradient of a step: updates the weights, if there is an optimizer, and begins
  // the gradients anew. Without one they stay until zero_grad().
  virtual Status step(int64_t step) = 0;
  // An error has ended the step: nothing of its micro-batches is kept.
  virtual void drop() = 0;
};

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_STAGE_COMPUTE_H_
