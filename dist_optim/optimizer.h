#ifndef WEFT_DIST_OPTIM_OPTIMIZER_H_
#define WEFT_DIST_OPTIM_OPTIMIZER_H_

// DistributedOptimizer: one optimizer over parameters of any workers.
//
//   std::vector<weft::RRef<at::Tensor>> parameters = server.parameters();   // a RemoteModule's
//   weft::DistributedOptimizer<weft::optim::Adam> optimizer(worker, parameters, {.lr = 1e-2});
//   {
//     weft::DistAutogradContext context(worker);
//     context.backward({loss});
//     optimizer.step(context);
//   }
//
// Each parameter is updated at its owner, with the gradient that the context has for it there;
// gradients do not travel, `.grad` is neither read nor written, and a parameter without a gradient
// in this context is not changed. The optimizer's state (momenta and the like) lives at the owner,
// too, as long as the DistributedOptimizer does.
//
// A step over several owners has two phases: first all owners check whether they can apply it, then
// all apply it. An error in the first phase changes nothing anywhere. When an owner fails or dies
// in the second, the error lists the outcome at each. A step over one owner is one message.
//
// T is one of weft::optim (weft/dist_optim/optim.h), or a user-defined class that is a
// torch::optim::Optimizer and registered by optimizer_() (weft/dist_optim/user_optimizer.h).
// Closures, and optimizers that need one (LBFGS), are not supported.
//
// All workers list dist_optim_service() at join and have dist_optim_library() in their library;
// weft::join does both. Threads: all methods from anywhere. Several trainers may each have an
// optimizer over the same parameters; Isolation says how their steps mix.

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/common/time.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_optim/isolation.h"
#include "weft/dist_optim/optim.h"
#include "weft/dist_optim/spi/optimizer_core.h"
#include "weft/dist_optim/step.h"
#include "weft/rref/rref.h"

namespace torch::optim {
class LBFGS;
}

namespace weft {

// Options of a parameter group of a user-defined optimizer.
struct UserOptimizerOptions {
  std::optional<double> lr{};
};

namespace internal {

// A user's class behind an RRef (weft/dist_optim/user_optimizer.h).
template <class T>
class ServedOptimizer;

template <class T, class = void>
struct IsOptimTag : std::false_type {};
template <class T>
struct IsOptimTag<T, std::void_t<typename T::Options, decltype(T::kName)>> : std::true_type {};

template <class T, bool Ours = IsOptimTag<T>::value>
struct OptimOptions {
  using type = UserOptimizerOptions;
};
template <class T>
struct OptimOptions<T, true> {
  using type = typename T::Options;
};

template <class T>
struct IsLBFGS : std::is_same<T, torch::optim::LBFGS> {};

inline PackedOptions user_options(const UserOptimizerOptions& options) {
  return options.lr.has_value() ? PackedOptions{*options.lr} : PackedOptions{};
}

}  // namespace internal

template <class T>
class DistributedOptimizer {
  static constexpr bool kOurs = internal::IsOptimTag<T>::value;

 public:
  using Parameters = std::vector<RRef<at::Tensor>>;  // at any workers
  // The rule's options; those of a user-defined class are only lr.
  using Options = typename internal::OptimOptions<T>::type;

  // Makes the optimizer's parts at all owners and waits for them. Without parameters there are no
  // parts, and steps do nothing. On an error nothing is left anywhere. Throws weft::Error:
  //   invalid_argument  an option out of its range; a parameter that is no leaf, not of a real
  //                     floating type, or given twice
  //   state             an owner that does not list dist_optim_service()
  //   not_found         an owner without dist_optim_library(), or without the user's class
  //   any other kind    thrown by the constructor of a user's class; origin() is its worker
  explicit DistributedOptimizer(const Worker& worker, const Parameters& parameters,
                                const Options& options = {},
                                const OptimizerOptions& how = {}) requires(kOurs)
      : core_(worker, T::kName, how, internal::functional_link_factory(T::kName)) {
    core_.add_group(parameters, internal::pack_options<T>(options));
  }
  // For a user-defined class: `arguments` are those of its constructor after the parameters.
  template <class... Args>
  explicit DistributedOptimizer(const Worker& worker, const Parameters& parameters,
                                const OptimizerOptions& how,
                                const Args&... arguments) requires(!kOurs)
      : core_(worker, "", how,
              internal::make_link_factory<internal::ServedOptimizer<T>>(arguments...)) {
    core_.add_group(parameters, {});
  }

  // Updates the parameters with the gradients of the context's backwards that have ended. Throws
  // weft::Error, the first owner's by cause, with the outcome at each owner in its text; try_step()
  // returns the outcomes as values.
  //   invalid_argument  a gradient that does not fit, is sparse where it cannot be, or is not
  //                     finite, with StepOptions::require_finite
  //   state             the context was released; the gradients have already been added up with
  //                     those of later backwards; a versioned step that came too late
  //   peer_lost         an owner died
  StepReport step(const DistAutogradContext& context, const StepOptions& options = {}) {
    return core_.checked(core_.step(context, options));
  }
  StepReport try_step(const DistAutogradContext& context, const StepOptions& options = {}) {
    return core_.step(context, options);
  }
  // Begins a step. The context must live until it is done; the next backward may begin earlier. The
  // future never has an error: see StepReport::status.
  Future<StepReport> step_async(const DistAutogradContext& context,
                                const StepOptions& options = {}) {
    return core_.step_async(context, options);
  }

  // Runs context.backward(losses) and a step in one, without a message for the step: each parameter
  // is updated as soon as its gradient of this pass is final, and that gradient is not kept.
  // Gradients of earlier passes stay in the context, and are not applied.
  //
  // There is no first phase: when the pass fails, some parameters may have been updated. The error
  // lists the outcome at each owner as far as it is known: applied, or unknown. A user-defined
  // class steps once per owner, at the end of that owner's part. When another alias of a
  // parameter's memory (x.detach()) takes part in the backward, it may see the new value.
  //
  // Throws what backward() and step() throw; invalid_argument for retain_graph, versions, or
  // Isolation::kVersioned. Deadline: that of `backward`, else that of `options`, else the worker's
  // rpc_timeout.
  StepReport backward_and_step(const DistAutogradContext& context,
                               const std::vector<at::Tensor>& losses,
                               const BackwardOptions& backward = {},
                               const StepOptions& options = {}) {
    return core_.checked(core_.backward_and_step(context, losses, backward, options));
  }
  StepReport try_backward_and_step(const DistAutogradContext& context,
                                   const std::vector<at::Tensor>& losses,
                                   const BackwardOptions& backward = {},
                                   const StepOptions& options = {}) {
    return core_.backward_and_step(context, losses, backward, options);
  }

  // Adds a group of parameters with its own options, or nothing when it throws, as the constructor.
  void add_param_group(const Parameters& parameters, const Options& options = {}) {
    if constexpr (kOurs) {
      core_.add_group(parameters, internal::pack_options<T>(options));
    } else {
      core_.add_group(parameters, internal::user_options(options));
    }
  }
  size_t num_param_groups() const { return core_.num_groups(); }

  // The learning rate of a group; a change holds from the next step on. See lr_scheduler.h. Throws,
  // kind invalid_argument, for a rate that is negative or not finite, or an unknown group.
  double lr(size_t group = 0) const { return core_.lr(group); }
  void set_lr(double lr, size_t group) { core_.set_lr(lr, group); }
  void set_lr(double lr) {  // of all groups
    for (size_t i = 0; i < num_param_groups(); ++i) core_.set_lr(lr, i);
  }

  // All options of a group; a change holds from the next step on, and keeps the state of the
  // group's parameters.
  //   auto o = optimizer.options(1);
  //   o.weight_decay = 0;
  //   optimizer.set_options(o, 1);
  // Throws, kind invalid_argument, naming an option out of its range, or for a group that does not
  // exist; then nothing is changed.
  Options options(size_t group = 0) const requires(kOurs) {
    return internal::unpack_options<T>(core_.options(group));
  }
  void set_options(const Options& options, size_t group) requires(kOurs) {
    core_.set_options(internal::pack_options<T>(options), group);
  }

  // Returns how often each parameter has been updated, by any optimizer at its owner, in the order
  // in which the parameters were given. A versioned step needs the values read before its forward.
  std::vector<int64_t> versions() const { return core_.versions(); }

  // Returns a copy of the state of all owners, on the CPU. A key such as "3.exp_avg" has the
  // parameter's index, in the order in which they were given, and the buffer's name; options are
  // "group.0.lr" and so on. A step that is under way may be included for some parameters only.
  std::map<std::string, at::Tensor> state_dict() const { return core_.state_dict(); }
  // Replaces the state. Throws, kind invalid_argument, naming what is missing, unknown, or of
  // another shape; then nothing is changed.
  void load_state_dict(const std::map<std::string, at::Tensor>& state) {
    core_.load_state_dict(state);
  }

  // For schedulers.
  internal::OptimizerCore& core() { return core_; }

 private:
  static_assert(!internal::IsLBFGS<T>::value,
                "weft: LBFGS evaluates the loss again within a step, by a closure; a loss over "
                "several workers cannot be evaluated from their owners. Use another optimizer");
  internal::OptimizerCore core_;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_OPTIMIZER_H_
