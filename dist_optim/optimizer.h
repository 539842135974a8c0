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
// Each parameter is updated where it lives, with what the context has for it there; gradients do
// not travel, `.grad` is neither read nor written, and a parameter without a gradient in this
// context is not touched. The optimizer's state (momenta and the like) lives there, too, as long as
// the DistributedOptimizer does.
//
// A step over several owners has two phases: all of them look whether they can, then all apply. An
// error in the first changes nothing anywhere. When an owner fails or dies in the second, the error
// lists what became of each. A step over one owner is one message.
//
// T is one of weft::optim (weft/dist_optim/optim.h), or a class of yours that is a
// torch::optim::Optimizer and registered by optimizer_() (weft/dist_optim/user_optimizer.h).
// Closures are not supported, and so is no optimizer that needs one (LBFGS).
//
// All workers list dist_optim_service() at join and have dist_optim_library() in their library;
// weft::join does both. Threads: all methods from anywhere; steps of several trainers, each with
// its own optimizer over the same parameters, are what Isolation speaks of.

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
#include "weft/dist_optim/optimizer_core.h"
#include "weft/dist_optim/step.h"
#include "weft/rref/rref.h"

namespace torch::optim {
class LBFGS;
}

namespace weft {

// What a parameter group of a user's optimizer can be given from here.
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

  // Makes its parts at all owners and waits for them. No parameters: no parts, and steps do
  // nothing. Throws weft::Error, with nothing left anywhere:
  //   invalid_argument  an option out of its range; a parameter that is no leaf, not of a real
  //                     floating type, or given twice
  //   state             a worker that does not list dist_optim_service()
  //   not_found         one without dist_optim_library(), or without the user's class
  //   of the constructor of a user's class: its own, and origin() is where
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

  // Applies what the context has of backwards that have ended. Throws weft::Error, the first owner's by cause, with the outcome
  // at each owner in its text; try_step() gives them as values.
  //   invalid_argument  a gradient that does not fit, is sparse where it cannot be, or is not
  //                     finite (if asked)
  //   state             the context was released; a step whose gradients are in one sum with those
  //                     of later backwards already; a versioned step that came too late
  //   peer_lost         an owner died
  StepReport step(const DistAutogradContext& context, const StepOptions& options = {}) {
    return core_.checked(core_.step(context, options));
  }
  StepReport try_step(const DistAutogradContext& context, const StepOptions& options = {}) {
    return core_.step(context, options);
  }
  // The context is to live until it is done; the next backward may begin before. It succeeds
  // always: see StepReport::status.
  Future<StepReport> step_async(const DistAutogradContext& context,
                                const StepOptions& options = {}) {
    return core_.step_async(context, options);
  }

  // context.backward(losses) and a step in one, with no message of its own: each parameter is
  // updated as soon as what this pass has for it is final, and that gradient is not kept. What
  // earlier passes have left in the context stays there, and is not applied.
  //
  // There is no first phase: when the pass fails, some parameters have been updated. Its error
  // lists what is known of each owner: applied, or unknown. A class of yours steps once per owner,
  // at the end of that owner's part. A backward that another alias of a parameter's memory takes
  // part in (x.detach()) may see its new value.
  //
  // Throws what backward() and step() throw; invalid_argument for retain_graph, versions, or
  // Isolation::kVersioned. Deadline: that of `backward`, else that of `options`, else the worker's rpc_timeout.
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

  // A further group, with options of its own. Errors as the constructor's; then nothing is added.
  void add_param_group(const Parameters& parameters, const Options& options = {}) {
    if constexpr (kOurs) {
      core_.add_group(parameters, internal::pack_options<T>(options));
    } else {
      core_.add_group(parameters, internal::user_options(options));
    }
  }
  size_t num_param_groups() const { return core_.num_groups(); }

  // The learning rate of a group, from the next step on; see lr_scheduler.h. Throws, kind
  // invalid_argument, for one that is negative or not finite, or a group that is not there.
  double lr(size_t group = 0) const { return core_.lr(group); }
  void set_lr(double lr, size_t group) { core_.set_lr(lr, group); }
  void set_lr(double lr) {  // of all groups
    for (size_t i = 0; i < num_param_groups(); ++i) core_.set_lr(lr, i);
  }

  // All options of a group, and others from the next step on; what is kept for its parameters stays.
  //   auto o = optimizer.options(1);
  //   o.weight_decay = 0;
  //   optimizer.set_options(o, 1);
  // Throws, kind invalid_argument, for an option out of its range, named, or a group that is not
  // there; then nothing is changed.
  Options options(size_t group = 0) const requires(kOurs) {
    return internal::unpack_options<T>(core_.options(group));
  }
  void set_options(const Options& options, size_t group) requires(kOurs) {
    core_.set_options(internal::pack_options<T>(options), group);
  }

  // How many steps each parameter has taken part in, of any optimizer of its owner; in the order in
  // which they were given. To be read before the forward that a versioned step will speak of.
  std::vector<int64_t> versions() const { return core_.versions(); }

  // The state of all owners as one, by "3.exp_avg": parameter, in the order in which they were
  // given, and buffer; with "group.0.lr" and so on. A copy, on the CPU. A step that is under way
  // may be in it for some parameters and not for others.
  std::map<std::string, at::Tensor> state_dict() const { return core_.state_dict(); }
  // Throws, kind invalid_argument, naming what is missing, unknown, or of another shape; then
  // nothing is changed.
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
