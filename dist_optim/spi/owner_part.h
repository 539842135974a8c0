#ifndef WEFT_DIST_OPTIM_SPI_OWNER_PART_H_
#define WEFT_DIST_OPTIM_SPI_OWNER_PART_H_

// OwnerOptimizer: the part of a DistributedOptimizer that lives with the parameters of one owner,
// behind an RRef. What it can refuse it refuses in prepare(); apply() then has nothing left to ask.
//
//   OPT-4  prepare() changes no parameter and no state; after an error it holds nothing, and when
//          the step's time is over it holds nothing either.
//   OPT-5  apply() of a step is done once, with the gradients that prepare() found; a repeated
//          question is told what became of it (OPT-8, OPT-9: weft/dist_optim/spi/step_log.h).
//   OPT-6  `.grad` of a parameter is neither read nor written, and an update is none that autograd
//          counts: a backward which another trainer has under way goes on with the new values, as
//          asynchronous training wants it.
//
// Threads: all methods from anywhere. Updates run without the mutex.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/dist_optim/isolation.h"
#include "weft/dist_optim/spi/messages.h"
#include "weft/dist_optim/spi/step_log.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/library.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::internal {

class DistOptimService;
class LeafEffect;
class Parameter;

class WEFT_API OwnerOptimizer : public std::enable_shared_from_this<OwnerOptimizer> {
 public:
  OwnerOptimizer();
  virtual ~OwnerOptimizer();
  OwnerOptimizer(const OwnerOptimizer&) = delete;
  OwnerOptimizer& operator=(const OwnerOptimizer&) = delete;

  // ---- called by the optimizer, over the RRef ----
  void add_parameters(CallContext& call, const ParameterPlan& plan);
  // The last group, which could not be added everywhere.
  void remove_group(CallContext& call, int64_t group);
  // Holds until the call's deadline.
  StepAnswer prepare(CallContext& call, const StepPlan& plan);
  // Throws, kind state, when the step is not prepared, or its time is over. Whatever apply() and
  // step() throw has the payload kNothingApplied or kPartlyApplied.
  StepAnswer apply(CallContext& call, uint64_t step);
  // It is not to be applied any more; says what became of it. `applied`: it was. Throws what
  // apply() threw when it was in part.
  StepAnswer cancel(CallContext& call, uint64_t step);
  // Both phases, for an optimizer that has one owner.
  StepAnswer step(CallContext& call, const StepPlan& plan);
  std::vector<int64_t> versions(CallContext& call);
  OwnerStateDict state_dict(CallContext& call);
  // `commit` false: only looks whether it could be loaded.
  void load_state_dict(CallContext& call, const OwnerStateDict& state, bool commit);

  // Lets go of what is held for steps whose time is over; when the next one's is.
  absl::Time drop_expired();

  // What does this step within a backward.
  std::unique_ptr<LeafEffect> fuse(const StepPlan& plan);

  static constexpr std::string_view kNothingApplied = "nothing applied";
  static constexpr std::string_view kPartlyApplied = "partly applied";

 protected:
  struct Slot {
    std::shared_ptr<at::Tensor> holder{};  // what the RRef refers to
    at::Tensor parameter{};
    std::shared_ptr<Parameter> shared{};
    int64_t group = 0;
  };
  struct Update {
    size_t slot = 0;
    at::Tensor gradient{};
    GuardRef after{};  // of the gradient, for another thread than the one that has read it
  };
  using Options = std::vector<PackedOptions>;

  // The parameters from `first` on are new, and of one group. Throws what is wrong with them.
  virtual void added(const std::vector<Slot>& slots, size_t first,
                     const PackedOptions& options) = 0;
  // Those from `first` on, the newest group, are gone.
  virtual void removed(size_t first) = 0;
  virtual void check_options(const PackedOptions& options) const = 0;
  virtual Status check_gradient(const Slot& slot, const at::Tensor& gradient,
                                const PackedOptions& options) const = 0;
  // Updates; `touched` counts the parameters that are not as before. Grad mode is off.
  virtual Status update(const std::vector<Slot>& slots, const std::vector<Update>& updates,
                        const Options& options, Isolation isolation, int64_t* touched) = 0;
  // Whether update() may be given the parameters of one step one by one.
  virtual bool one_by_one() const = 0;
  virtual OwnerStateDict save(const std::vector<Slot>& slots) = 0;
  virtual void load(const std::vector<Slot>& slots, const OwnerStateDict& state, bool commit) = 0;

 private:
  struct Reservation {
    std::vector<Update> updates{};
    Options options{};
    absl::Time until = absl::InfiniteFuture();
    int64_t stale = 0;
  };
  using ReservationRef = std::shared_ptr<Reservation>;
  // How applying has ended.
  struct Applied {
    Status failed{};
    int64_t touched = 0;
  };
  class FusedStep;

  // Throws what is wrong with a gradient.
  void check(size_t at, const Slot& slot, const at::Tensor& gradient, const StepPlan& plan) const;

  ReservationRef reserve(CallContext& call, const StepPlan& plan);
  // Whether it still has its parameters for itself; if so until it is given back.
  Status keep(const Reservation& reservation);
  Applied apply_reserved(const ReservationRef& reservation);
  // apply_reserved(), and what that is to the log and to who asked.
  StepAnswer apply_and_decide(uint64_t step, const ReservationRef& reservation);
  StepAnswer tell(const StepLog::Step& step) const;
  void decide(uint64_t step, StepLog::State state, const Status& error, int64_t updated,
              int64_t stale);
  // Waits while another call applies the step.
  StepLog::Answer ask(CallContext& call, uint64_t step, StepLog::Event event);
  // update(); handlers that start later meet its parameters as it leaves them.
  Status update_and_publish(const std::vector<Slot>& slots, const std::vector<Update>& updates,
                            const Options& options, int64_t* touched);
  void give_back(const Reservation& reservation);
  Isolation isolation() const;
  std::vector<Slot> slots() const;
  std::shared_ptr<DistOptimService> service() const;
  std::vector<int64_t> versions_of(const std::vector<Slot>& slots) const;
  void check_versions(const StepPlan& plan, const std::vector<Slot>& slots,
                      Reservation* reservation) const;

  mutable Mutex mutex_;
  std::shared_ptr<DistOptimService> service_ ABSL_GUARDED_BY(mutex_);
  Isolation isolation_ ABSL_GUARDED_BY(mutex_) = Isolation::kPerParameterLock;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  StepLog log_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Condition> decided_ ABSL_GUARDED_BY(mutex_);  // as long as service_
};

template <class T>
void def_owner_methods(ClassDef<T>& def) {
  def.def("add_parameters", &OwnerOptimizer::add_parameters)
      .def("remove_group", &OwnerOptimizer::remove_group)
      .def("prepare", &OwnerOptimizer::prepare)
      .def("apply", &OwnerOptimizer::apply)
      .def("cancel", &OwnerOptimizer::cancel)
      .def("step", &OwnerOptimizer::step)
      .def("versions", &OwnerOptimizer::versions)
      .def("state_dict", &OwnerOptimizer::state_dict)
      .def("load_state_dict", &OwnerOptimizer::load_state_dict);
}

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_SPI_OWNER_PART_H_
