#ifndef WEFT_DIST_OPTIM_SPI_OPTIMIZER_CORE_H_
#define WEFT_DIST_OPTIM_SPI_OPTIMIZER_CORE_H_

// OptimizerCore: what a DistributedOptimizer does whatever its class: which owner has which
// parameters, the two phases of a step, and one state from those of all owners.
//
//   OPT-7  no owner is told to apply before all others have prepared; after an error every owner
//          that may have prepared is told to cancel.
//   OPT-10 an outcome that is reported is the one that has happened: of an owner whose answer did
//          not come it is asked for again, until the deadline; without an answer it is unknown.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_optim/rates.h"
#include "weft/dist_optim/spi/messages.h"
#include "weft/dist_optim/spi/owner_part.h"
#include "weft/dist_optim/step.h"
#include "weft/rpc/worker.h"
#include "weft/rref/rref.h"

namespace weft {
class UpdateRule;
}

namespace weft::internal {

// An owner's part, whatever its class.
class OwnerLink {
 public:
  virtual ~OwnerLink() = default;
  // The part itself, if it is at this worker; after add_parameters().
  virtual std::shared_ptr<OwnerOptimizer> here() const = 0;
  virtual Future<void> add_parameters(const CallOptions& o, const ParameterPlan& plan) const = 0;
  virtual Future<void> remove_group(const CallOptions& o, int64_t group) const = 0;
  virtual Future<StepAnswer> prepare(const CallOptions& o, const StepPlan& plan) const = 0;
  virtual Future<StepAnswer> apply(const CallOptions& o, uint64_t step) const = 0;
  virtual Future<StepAnswer> cancel(const CallOptions& o, uint64_t step) const = 0;
  virtual Future<StepAnswer> step(const CallOptions& o, const StepPlan& plan) const = 0;
  virtual Future<std::vector<int64_t>> versions(const CallOptions& o) const = 0;
  virtual Future<OwnerStateDict> state_dict(const CallOptions& o) const = 0;
  virtual Future<void> load_state_dict(const CallOptions& o, const OwnerStateDict& state,
                                       bool commit) const = 0;
};

template <class Object>
class OwnerLinkOf final : public OwnerLink {
 public:
  explicit OwnerLinkOf(RRef<Object> object) : object_(std::move(object)) {}
  std::shared_ptr<OwnerOptimizer> here() const override {
    return object_.is_owner() ? object_.local_value() : nullptr;
  }
  Future<void> add_parameters(const CallOptions& o, const ParameterPlan& plan) const override {
    return call(o, &OwnerOptimizer::add_parameters, plan);
  }
  Future<void> remove_group(const CallOptions& o, int64_t group) const override {
    return call(o, &OwnerOptimizer::remove_group, group);
  }
  Future<StepAnswer> prepare(const CallOptions& o, const StepPlan& plan) const override {
    return call(o, &OwnerOptimizer::prepare, plan);
  }
  Future<StepAnswer> apply(const CallOptions& o, uint64_t step) const override {
    return call(o, &OwnerOptimizer::apply, step);
  }
  Future<StepAnswer> cancel(const CallOptions& o, uint64_t step) const override {
    return call(o, &OwnerOptimizer::cancel, step);
  }
  Future<StepAnswer> step(const CallOptions& o, const StepPlan& plan) const override {
    return call(o, &OwnerOptimizer::step, plan);
  }
  Future<std::vector<int64_t>> versions(const CallOptions& o) const override {
    return call(o, &OwnerOptimizer::versions);
  }
  Future<OwnerStateDict> state_dict(const CallOptions& o) const override {
    return call(o, &OwnerOptimizer::state_dict);
  }
  Future<void> load_state_dict(const CallOptions& o, const OwnerStateDict& state,
                               bool commit) const override {
    return call(o, &OwnerOptimizer::load_state_dict, state, commit);
  }

 private:
  // What cannot even be sent is an error as any other.
  template <class F, class... Args>
  auto call(const CallOptions& o, F method, const Args&... args) const {
    auto future = object_.try_rpc_async(o, method, args...);
    using Called = typename decltype(future)::value_type;
    return future.ok() ? *std::move(future) : Called::ready(future.status());
  }

  const RRef<Object> object_;
};

using MakeLink =
    std::function<std::shared_ptr<OwnerLink>(const Worker& worker, const WorkerInfo& owner)>;

template <class Object, class... Args>
MakeLink make_link_factory(const Args&... args) {
  return [... args = args](const Worker& worker, const WorkerInfo& owner) {
    return std::make_shared<OwnerLinkOf<Object>>(remote<Object>(worker, owner, args...));
  };
}

// The factory for a rule of weft::optim.
WEFT_API MakeLink functional_link_factory(std::string_view rule);

class DistOptimService;

class WEFT_API OptimizerCore : public Rates {
 public:
  // `name`: of weft::optim, or empty.
  OptimizerCore(const Worker& worker, std::string_view name, OptimizerOptions options,
                MakeLink make);

  void add_group(const std::vector<RRef<at::Tensor>>& parameters, PackedOptions options);
  size_t num_groups() const override;
  double lr(size_t group) const override;
  void set_lr(double lr, size_t group) override;
  double initial_lr(size_t group) override;
  void set_initial_lr(double lr, size_t group) override;
  PackedOptions options(size_t group) const;
  void set_options(PackedOptions options, size_t group);
  std::optional<double> option(std::string_view name, size_t group) const override;
  void set_option(std::string_view name, double value, size_t group) override;

  StepReport step(const DistAutogradContext& context, const StepOptions& options);
  StepReport backward_and_step(const DistAutogradContext& context,
                               const std::vector<at::Tensor>& losses,
                               const BackwardOptions& backward, const StepOptions& options);
  Future<StepReport> step_async(const DistAutogradContext& context, const StepOptions& options);
  // Throws its error.
  static StepReport checked(StepReport report);

  std::vector<int64_t> versions() const;
  std::map<std::string, at::Tensor> state_dict() const;
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

 private:
  struct Owner {
    WorkerInfo info;
    std::shared_ptr<OwnerLink> link;
    std::vector<size_t> parameters;  // indices over all, in the owner's order
  };
  using OwnerRef = std::shared_ptr<const Owner>;
  class Step;

  const Worker& worker() const;
  void add_at_owners(const std::vector<RRef<at::Tensor>>& parameters, const PackedOptions& options,
                     int64_t group, std::vector<OwnerRef>* owners);
  std::vector<OwnerRef> owners() const;
  CallOptions call_options() const;
  Status may_fuse(const BackwardOptions& backward, const StepOptions& options) const;
  StatusOr<StepPlan> plan_of(const DistAutogradContext& context, const StepOptions& options);
  StatusOr<std::shared_ptr<Step>> begin(const DistAutogradContext& context,
                                        const StepOptions& options);
  std::string text() const;  // "optimizer Adam"
  // Throws, kind invalid_argument, when there is no such group.
  void check_group(std::string_view what, size_t group) const;

  const std::string name_;
  const OptimizerOptions options_;
  const MakeLink make_;
  const std::shared_ptr<DistOptimService> service_;
  const uint64_t number_;                         // of this worker's
  const std::shared_ptr<const UpdateRule> rule_;  // null: of a user's class

  mutable Mutex mutex_;
  std::vector<OwnerRef> owners_ ABSL_GUARDED_BY(mutex_);
  std::vector<PackedOptions> groups_ ABSL_GUARDED_BY(mutex_);
  std::map<size_t, double> initial_lr_ ABSL_GUARDED_BY(mutex_);  // by group
  size_t parameters_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_SPI_OPTIMIZER_CORE_H_
