// A step that is part of a backward: at each owner, as its gradients become final.

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/dist_autograd/leaf_effect.h"
#include "weft/dist_optim/internal/service.h"
#include "weft/dist_optim/spi/optimizer_core.h"
#include "weft/dist_optim/spi/owner_part.h"
#include "weft/rpc/value.h"

namespace weft::internal {
namespace {

template <class T>
std::string to_bytes(const T& value) {
  Payload payload;
  Encoder(&payload).put(value);
  return std::move(payload.body);
}
template <class T>
StatusOr<T> from_bytes(std::string_view bytes) {
  Decoder in(Payload{.body = std::string(bytes), .tensors = {}});
  return in.take<T>();
}

}  // namespace

class OwnerOptimizer::FusedStep final : public LeafEffect {
 public:
  FusedStep(std::shared_ptr<OwnerOptimizer> part, StepPlan plan)
      : part_(std::move(part)), slots_(part_->slots()), plan_(std::move(plan)) {
    for (const PackedOptions& options : plan_.options) part_->check_options(options);
    for (size_t i = 0; i < slots_.size(); ++i) {
      by_tensor_[slots_[i].parameter.unsafeGetTensorImpl()] = i;
    }
  }

  bool on_final(const at::Tensor& leaf, const at::Tensor& gradient) override {
    const auto at = by_tensor_.find(leaf.unsafeGetTensorImpl());
    if (at == by_tensor_.end()) return false;
    part_->check(at->second, slots_[at->second], gradient, plan_);
    updates_.push_back(Update{at->second, gradient, nullptr});  // read where it is used
    if (part_->one_by_one()) apply();
    return true;
  }

  std::string finish() override {
    apply();
    ++part_->service()->steps;
    return to_bytes(StepAnswer{updated_, 0, part_->versions_of(slots_)});
  }

 private:
  void apply() {
    if (updates_.empty()) return;
    const std::vector<Update> now = std::exchange(updates_, {});
    int64_t touched = 0;
    throw_if_error(part_->update_and_publish(slots_, now, plan_.options, &touched));
    updated_ += static_cast<int64_t>(now.size());
  }

  const std::shared_ptr<OwnerOptimizer> part_;
  const std::vector<Slot> slots_;
  const StepPlan plan_;
  absl::flat_hash_map<const void*, size_t> by_tensor_;
  std::vector<Update> updates_;
  int64_t updated_ = 0;
};

std::unique_ptr<LeafEffect> OwnerOptimizer::fuse(const StepPlan& plan) {
  return std::make_unique<FusedStep>(shared_from_this(), plan);
}

StatusOr<std::unique_ptr<LeafEffect>> DistOptimService::make_fused(std::string_view data) {
  WEFT_ASSIGN_OR_RETURN(const auto plan, from_bytes<FusedPlan>(data));
  const std::shared_ptr<OwnerOptimizer> part =
      find_part({WorkerKey{WorkerId(plan.creator), Incarnation(plan.incarnation)}, plan.optimizer});
  if (part == nullptr) return std::unique_ptr<LeafEffect>();
  try {
    return part->fuse(plan.step);
  } catch (...) {
    return status_from_current_exception();
  }
}

void DistOptimService::add_part(const OptimizerKey& key,
                                const std::shared_ptr<OwnerOptimizer>& part) {
  {
    MutexLock lock(&mutex_);
    std::erase_if(parts_, [](const auto& one) { return one.second.expired(); });
    parts_[key] = part;
  }
  set_leaf_effects(worker(), [weak = weak_from_this()](std::string_view data) {
    const auto self = weak.lock();
    return self == nullptr ? StatusOr<std::unique_ptr<LeafEffect>>(nullptr)
                           : self->make_fused(data);
  });
}

std::shared_ptr<OwnerOptimizer> DistOptimService::find_part(const OptimizerKey& key) const {
  MutexLock lock(&mutex_);
  const auto at = parts_.find(key);
  return at == parts_.end() ? nullptr : at->second.lock();
}

// ---- the trainer -------------------------------------------------------------------------------

Status OptimizerCore::may_fuse(const BackwardOptions& backward, const StepOptions& options) const {
  const auto refused = [this](std::string_view why) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("backward_and_step of ", text(), ": ", std::string(why)));
  };
  if (backward.retain_graph) {
    return refused(
        "with retain_graph: what nodes have saved changes with the parameters, so that they could "
        "not run again");
  }
  if (options_.isolation == Isolation::kVersioned || !options.versions.empty()) {
    return refused(
        "with versions: a parameter is updated before it is known whether all others can be. Use "
        "backward() and step()");
  }
  return absl::OkStatus();
}

StepReport OptimizerCore::backward_and_step(const DistAutogradContext& context,
                                            const std::vector<at::Tensor>& losses,
                                            const BackwardOptions& backward,
                                            const StepOptions& options) {
  if (Status refused = may_fuse(backward, options); !refused.ok()) {
    return StepReport{.status = refused};
  }
  StatusOr<StepPlan> plan = plan_of(context, options);
  if (!plan.ok()) return StepReport{.status = plan.status()};
  const WorkerKey trainer = key_of(worker().info());
  const uint64_t step = plan->step;
  const FusedPlan fused{trainer.id.value(), trainer.incarnation.value(), number_, *std::move(plan)};
  BackwardOptions how = backward;
  // Otherwise the default of a backward.
  if (!how.deadline.is_set()) how.deadline = options.deadline;
  StepReport report;
  LeafOutcomes outcomes;
  report.status = backward_with_effect(context, losses, how, to_bytes(fused), &outcomes);
  std::vector<std::string> texts;
  for (const OwnerRef& owner : owners()) {
    OwnerReport one{owner->info, StepOutcome::kApplied, {}, 0, {}};
    const auto heard = outcomes.find(key_of(owner->info));
    const StatusOr<StepAnswer> answer = heard == outcomes.end() || heard->second.empty()
                                            ? StatusOr<StepAnswer>(StepAnswer{})
                                            : from_bytes<StepAnswer>(heard->second);
    if (answer.ok()) {
      one.updated = answer->updated;
      one.versions = answer->versions;
    } else {
      one.error = answer.status();
    }
    // When a pass has failed, a worker that has not reported may have updated some parameters.
    if (!report.status.ok() && (!answer.ok() || answer->versions.empty())) {
      one.outcome = StepOutcome::kUnknown;
    }
    report.updated += one.updated;
    texts.push_back(absl::StrCat("'", one.owner.name, "' ", to_string(one.outcome)));
    report.owners.push_back(std::move(one));
  }
  if (!report.status.ok()) {
    report.status = with_details(
        Status(report.status.code(),
               absl::StrCat("step ", step, " of ", text(),
                            ", in its backward: ", std::string(report.status.message()), " [",
                            absl::StrJoin(texts, ", "), "]")),
        error_details(report.status));
  }
  return report;
}

}  // namespace weft::internal
