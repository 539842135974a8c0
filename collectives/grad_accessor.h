#ifndef WEFT_COLLECTIVES_GRAD_ACCESSOR_H_
#define WEFT_COLLECTIVES_GRAD_ACCESSOR_H_

// GradAccessor: where the gradients of one backward are. Who reduces gradients while a backward
// runs (data parallelism) goes through it and never to `.grad`: so the same reducer works for a
// local backward, whose gradients are in `.grad`, and inside of a DistAutogradContext, which keeps
// its own.
//
//   class Ready : public GradReadyHook {
//     void on_grad_ready(const std::shared_ptr<GradAccessor>& of) override {
//       of->with_grad(parameter, [](at::Tensor& grad) { grad /= 2; return true; });
//     }
//   };
//   const auto accumulator = torch::autograd::impl::grad_accumulator(parameter);  // to be kept
//   accumulator->add_post_hook(std::make_unique<Ready>());

#include <functional>
#include <memory>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "torch/csrc/autograd/function_hook.h"
#include "weft/common/api.h"
#include "weft/common/worker_key.h"

namespace weft {

// Lives as long as somebody keeps it. Threads: all methods from anywhere; the gradient of one
// parameter from one thread at a time, and not before its hook was called.
class WEFT_API GradAccessor {
 public:
  // That of an AutogradContextId.
  using ContextId = CreatedId<struct AutogradContextIdTag>;

  GradAccessor() = default;
  virtual ~GradAccessor() = default;
  GradAccessor(const GradAccessor&) = delete;
  GradAccessor& operator=(const GradAccessor&) = delete;

  // None: a local backward.
  virtual std::optional<ContextId> context_id() const = 0;
  // Calls `fn` once with what this backward has for `parameter`, undefined if it has nothing; when
  // `fn` returns true, what it left there is written back. In a context: of this pass alone.
  // Throws what `fn` throws, and then writes nothing.
  virtual void with_grad(const at::Tensor& parameter,
                         absl::FunctionRef<bool(at::Tensor& grad)> fn) = 0;
  // Runs `fn` when all nodes of this backward that run at this worker have run, on the thread that
  // ran the last one, in the order of the calls; the backward is not over before it has returned,
  // and fails with what it throws. To be called from on_grad_ready().
  virtual void at_end(absl::AnyInvocable<void()> fn) = 0;
};

// A hook on the accumulator of a leaf that is told whose gradient it is. Once per backward, after
// all contributions to the leaf have been added up.
class WEFT_API GradReadyHook : public torch::autograd::FunctionPostHook {
 public:
  virtual void on_grad_ready(const std::shared_ptr<GradAccessor>& accessor) = 0;

  // By LibTorch's engine: a local backward.
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) final;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_GRAD_ACCESSOR_H_
