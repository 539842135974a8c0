#ifndef WEFT_PIPELINE_STAGE_COMPUTE_H_
#define WEFT_PIPELINE_STAGE_COMPUTE_H_

// StageCompute: what the actions of one stage do. The one of the framework calls a module; a test's
// waits instead, so that a run can be compared with its simulation. All calls but cancel() come from
// the one thread that runs the worker's list.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "weft/common/error.h"

namespace weft::pipeline {

using Tensors = std::vector<at::Tensor>;  // inputs or outputs of a stage

struct ForwardCall {    // one forward of a stage
  int64_t step = 0;     // number of the step
  int micro_batch = 0;  // number in the step
  Tensors inputs{};     // of this micro-batch
  // For the last stage: what the loss compares with, and by what it is multiplied. Undefined
  // elsewhere.
  at::Tensor target{};
  double scale = 1;
  bool is_last = false;
  // The stage runs again before its backward: nothing but the inputs is kept.
  bool recompute = false;
  // No backward follows: nothing is kept, and the last stage gives its outputs instead of a loss.
  bool forward_only = false;
};

class StageCompute {
 public:
  virtual ~StageCompute() = default;
  // The outputs; of the last stage the loss before its scale, as one tensor of one element.
  virtual StatusOr<Tensors> forward(ForwardCall call) = 0;
  // The forward once more, with what its backward needs.
  virtual Status recompute(int64_t step, int micro_batch) = 0;
  // `gradients`: one per output (undefined where none is needed); none for the last stage, whose
  // loss begins. Returns one per input, undefined for those that have none.
  virtual StatusOr<Tensors> backward(int64_t step, int micro_batch, Tensors gradients) = 0;
  virtual StatusOr<Tensors> input_grad(int64_t step, int micro_batch, Tensors gradients) = 0;
  virtual Status weight_grad(int64_t step, int micro_batch) = 0;
  // Several, which the worker's list has one after the other and which are the last ones of a stage that is
  // reduced: taken layer by layer, the gradient of a layer is complete, and leaves, before the next layer
  // is computed. `at` comes before anything of that micro-batch is computed, and ends it with its error.
  // Here: one micro-batch after the other.
  virtual Status weight_grads(int64_t step, const std::vector<int>& micro_batches,
                              absl::FunctionRef<Status(int micro_batch)> at) {
    for (const int i : micro_batches) {
      WEFT_RETURN_IF_ERROR(at(i));
      WEFT_RETURN_IF_ERROR(weight_grad(step, i));
    }
    return absl::OkStatus();
  }
  // After the last gradient of a step of a plan with reductions: ends when the stage's gradients are
  // those of all its replicas.
  virtual Status reduce(int64_t step, absl::Duration time_left) {
    (void)step, (void)time_left;
    return make_error(ErrorKind::kUnimplemented, "this stage has no reducer");
  }
  // The gradients of weights that it shares with other stages, and the sums that take their place.
  virtual StatusOr<Tensors> tied_gradients() {
    return make_error(ErrorKind::kUnimplemented, "this stage shares no weights");
  }
  virtual Status set_tied_gradients(Tensors sums) {
    (void)sums;
    return make_error(ErrorKind::kUnimplemented, "this stage shares no weights");
  }
  // In an asynchronous plan: how many versions of its weights are kept, with those of now.
  virtual int64_t weight_versions() const { return 1; }
  // After the last gradient of a step: updates the weights, if there is an optimizer, and begins
  // the gradients anew. Without one they stay until zero_grad().
  virtual Status step(int64_t step) = 0;
  // Options of its optimizer, from this step on.
  virtual Status set_options(const std::vector<double>& options) {
    (void)options;
    return absl::OkStatus();
  }
  // Between the last gradient and the step, for a norm over all stages: the sum of the squares of
  // its gradients, without those of weights that an earlier stage has, too; what they are multiplied
  // with; or that they are dropped, and there is no step.
  virtual StatusOr<double> squared_norm() {
    return make_error(ErrorKind::kUnimplemented, "this stage knows no norm of its gradients");
  }
  virtual Status scale_gradients(double factor) {
    (void)factor;
    return make_error(ErrorKind::kUnimplemented, "this stage cannot scale its gradients");
  }
  virtual void skip_step() {}
  // The pipeline has ended with an error: a reduce() that waits ends with it, and so does a later one.
  // From any thread, while an action may run.
  virtual void cancel(const Status& why) { (void)why; }
  // `why` has ended the step: nothing of its micro-batches is kept. cancel() may come before or after.
  virtual void drop(const Status& why) = 0;
};

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_STAGE_COMPUTE_H_
