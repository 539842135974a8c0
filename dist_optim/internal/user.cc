#include "weft/dist_optim/user_optimizer.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "absl/strings/str_cat.h"
#include "torch/serialize/input-archive.h"
#include "torch/serialize/output-archive.h"
#include "weft/dist_optim/internal/parameters.h"

namespace weft::internal {
namespace {

constexpr std::string_view kArchive = "archive";

// Locks all parameters, in one order for all optimizers; also in what their devices do.
template <class Slots>
Status lock_all(const Slots& slots, std::vector<std::unique_ptr<ParameterLock>>* locks) {
  std::vector<Parameter*> all;
  for (const auto& slot : slots) all.push_back(slot.shared.get());
  std::sort(all.begin(), all.end());
  for (Parameter* one : all) {
    locks->push_back(std::make_unique<ParameterLock>(one));
    WEFT_RETURN_IF_ERROR(locks->back()->status());
  }
  for (const auto& slot : slots) slot.shared->order_here(slot.parameter);
  return absl::OkStatus();
}

}  // namespace

UserOptimizer::UserOptimizer(Make make) : make_(std::move(make)) {}

void UserOptimizer::added(const std::vector<Slot>& slots, size_t first,
                          const PackedOptions& options) {
  std::vector<std::unique_ptr<ParameterLock>> locks;
  throw_if_error(lock_all(slots, &locks));
  std::vector<at::Tensor> fresh;
  for (size_t i = first; i < slots.size(); ++i) {
    fresh.push_back(slots[i].parameter.variable_data().set_requires_grad(true));
  }
  if (optimizer_ == nullptr) {
    optimizer_ = make_(fresh);
    if (optimizer_->param_groups().size() != 1) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             "an optimizer that does not begin with one parameter group"));
    }
  } else {
    optimizer_->add_param_group(torch::optim::OptimizerParamGroup(fresh));
  }
  if (!options.empty()) optimizer_->param_groups().back().options().set_lr(options[0]);
  aliases_.insert(aliases_.end(), fresh.begin(), fresh.end());
  groups_.push_back(slots[first].group);
  for (const Slot& slot : slots) slot.shared->queued_here(slot.parameter);
}

void UserOptimizer::removed(size_t first) {
  if (groups_.empty()) return;
  optimizer_->param_groups().pop_back();
  groups_.pop_back();
  aliases_.resize(first);
}

void UserOptimizer::check_options(const PackedOptions& options) const {
  if (options.size() <= 1 && (options.empty() || (std::isfinite(options[0]) && options[0] >= 0))) {
    return;
  }
  throw_error(make_error(ErrorKind::kInvalidArgument,
                         "an optimizer of a user's class is given nothing but a learning rate, "
                         "finite and not negative"));
}

Status UserOptimizer::check_gradient(const Slot&, const at::Tensor&, const PackedOptions&) const {
  return absl::OkStatus();
}

Status UserOptimizer::update(const std::vector<Slot>& slots, const std::vector<Update>& updates,
                             const Options& options, Isolation, int64_t* touched) {
  std::vector<std::unique_ptr<ParameterLock>> locks;
  WEFT_RETURN_IF_ERROR(lock_all(slots, &locks));
  for (size_t i = 0; i < slots.size(); ++i) {
    if (aliases_[i].is_alias_of(slots[i].parameter)) continue;
    return make_error(ErrorKind::kState,
                      absl::StrCat("parameter ", i, " of this owner has been given other memory ",
                                   "since the optimizer was made: make it again"));
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    const PackedOptions& now = options.at(static_cast<size_t>(groups_[g]));
    if (!now.empty()) optimizer_->param_groups()[g].options().set_lr(now[0]);
  }
  std::vector<uint32_t> before;
  for (const at::Tensor& alias : aliases_) before.push_back(alias._version());
  // Until it is known what the counters say: to be compared with, if the step fails.
  std::vector<at::Tensor> values;
  for (const Update& one : updates) {
    aliases_[one.slot].mutable_grad() = one.gradient;
    if (counted_ == Counted::kUnknown) values.push_back(aliases_[one.slot].detach().clone());
  }
  Status failed;
  try {
    optimizer_->step();
  } catch (...) {
    failed = status_from_current_exception();
  }
  // OPT-2: one with a gradient counts as updated once by a step that succeeds, whatever it does.
  std::vector<bool> changed(aliases_.size(), false);
  bool counts = false;
  for (size_t i = 0; i < aliases_.size(); ++i) {
    aliases_[i].mutable_grad() = at::Tensor();
    changed[i] = aliases_[i]._version() != before[i];
    counts = counts || changed[i];
  }
  for (size_t k = 0; k < updates.size(); ++k) {
    const size_t i = updates[k].slot;
    if (failed.ok() || (!changed[i] && counted_ == Counted::kNo)) {
      changed[i] = true;
    } else if (!changed[i] && counted_ == Counted::kUnknown) {
      changed[i] = !at::equal(aliases_[i].detach(), values[k]);
    }
  }
  if (failed.ok() && !updates.empty()) counted_ = counts ? Counted::kYes : Counted::kNo;
  for (size_t i = 0; i < aliases_.size(); ++i) {
    if (!changed[i]) {
      slots[i].shared->queued_here(slots[i].parameter);  // what the class keeps of its own
      continue;
    }
    ++*touched;
    slots[i].shared->updated(slots[i].parameter);
  }
  return failed;
}

OwnerStateDict UserOptimizer::save(const std::vector<Slot>& slots) {
  std::vector<std::unique_ptr<ParameterLock>> locks;
  throw_if_error(lock_all(slots, &locks));
  torch::serialize::OutputArchive archive;
  if (optimizer_ != nullptr) optimizer_->save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string bytes = stream.str();
  at::Tensor out = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), out.data_ptr<uint8_t>());
  return {{std::string(kArchive), out}};
}

void UserOptimizer::load(const std::vector<Slot>& slots, const OwnerStateDict& state, bool commit) {
  auto at = state.find(std::string(kArchive));
  if (at == state.end() || state.size() != 1 || at->second.scalar_type() != at::kByte) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           "load_state_dict: an owner's part of a user's class is one archive of "
                           "bytes"));
  }
  const at::Tensor bytes = at->second.contiguous();
  std::istringstream stream(std::string(reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()),
                                        static_cast<size_t>(bytes.numel())));
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  if (!commit) return;
  std::vector<std::unique_ptr<ParameterLock>> locks;
  throw_if_error(lock_all(slots, &locks));
  if (optimizer_ != nullptr) optimizer_->load(archive);
  for (const Slot& slot : slots) slot.shared->queued_here(slot.parameter);
}

}  // namespace weft::internal
