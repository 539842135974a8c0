#ifndef WEFT_COLLECTIVES_GRAD_ACCESSOR_H_
#define WEFT_COLLECTIVES_GRAD_ACCESSOR_H_

// GradAccessor: where the gradients of one backward are. A reducer that works while a backward runs
// (data parallelism) goes through it and never to `.grad`: so the same reducer works for a local
// backward, whose gradients are in `.grad`, and inside of a DistAutogradContext, which keeps its
// own.
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
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "torch/csrc/autograd/function_hook.h"
#include "weft/common/api.h"
#include "weft/common/worker_key.h"

namespace weft {

// Lives as long as it is referred to. Threads: all methods from anywhere; the gradient of one
// parameter from one thread at a time, and not before its hook was called.
class WEFT_API GradAccessor {
 public:
  // That of an AutogradContextId.
  using ContextId = CreatedId<struct AutogradContextIdTag>;

  GradAccessor() = default;
  virtual ~GradAccessor() = default;
  GradAccessor(const GradAccessor&) = delete;
  GradAccessor& operator=(const GradAccessor&) = delete;

  // Which backward of this process. Two accessors that live at the same time have equal ids if and
  // only if they are of the same backward: a local backward makes an accessor for every hook, a
  // pass one for all.
  struct BackwardId {
    std::optional<ContextId> context{};  // unset: a local backward
    uint64_t number = 0;                 // of the backward within it
    friend constexpr auto operator<=>(const BackwardId&, const BackwardId&) = default;
  };
  virtual BackwardId backward_id() const = 0;
  // None: a local backward.
  std::optional<ContextId> context_id() const { return backward_id().context; }
  // Until the deadline of this backward; infinite for a local one. What runs at_end() waits no
  // longer than this: while it waits, the backward cannot end.
  virtual absl::Duration time_left() const = 0;
  // Calls `fn` once with what this backward has for `parameter`, undefined if it has nothing; when
  // `fn` returns true, what it left there is written back. In a context: of this pass alone.
  // Throws what `fn` throws, and then writes nothing.
  virtual void with_grad(const at::Tensor& parameter,
                         absl::FunctionRef<bool(at::Tensor& grad)> fn) = 0;
  // Runs `fn` when all nodes of this backward that run at this worker have run, on the thread that
  // ran the last one, in the order of the calls; the backward is not over before it has returned,
  // and fails with what it throws. When the backward fails before, `fn` is destroyed without having
  // been called, and so is what was asked for after an `fn` that throws. The gradients that other
  // workers wait for have left by then. To be called from on_grad_ready().
  virtual void at_end(absl::AnyInvocable<void()> fn) = 0;
  // What at_end() waits for while it runs, for observers of the backward and for the error of its
  // deadline; "": nothing now. Called by any thread, which may hold locks of the backward: `text`
  // must not use this object. A local backward has no observers.
  virtual void show_wait(std::function<std::string()> text) { (void)text; }
};

namespace internal {

// What the passes of weft::dist_autograd ask of a GradReadyHook. Nothing of this class is in the
// library of weft::collectives, so that they need none of it.
class WEFT_API GradReadyReceiver {
 public:
  GradReadyReceiver() = default;
  virtual ~GradReadyReceiver() = default;
  GradReadyReceiver(const GradReadyReceiver&) = delete;
  GradReadyReceiver& operator=(const GradReadyReceiver&) = delete;

  virtual void on_grad_ready(const std::shared_ptr<GradAccessor>& accessor) = 0;
  virtual std::optional<absl::Duration> default_deadline() const = 0;
};

}  // namespace internal

// A hook on a node that is told whose gradient it is. On the accumulator of a leaf: once per
// backward, after all contributions to the leaf have been added up. On any other node: when that
// has run, so that one on the node of a model's output sees backwards in which no parameter of the
// model is used.
class WEFT_API GradReadyHook : public torch::autograd::FunctionPostHook,
                               public internal::GradReadyReceiver {
 public:
  void on_grad_ready(const std::shared_ptr<GradAccessor>& accessor) override = 0;
  // The deadline that a backward of a DistAutogradContext gets when its caller gave none: of the
  // hooks on nodes of the worker which begins it, below its losses or below what the context has
  // sent from there, the longest. None: no opinion.
  std::optional<absl::Duration> default_deadline() const override { return std::nullopt; }

  // By LibTorch's engine: a local backward.
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) final;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_GRAD_ACCESSOR_H_
