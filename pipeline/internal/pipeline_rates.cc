#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/pipeline/internal/pipeline_state.h"

namespace weft::pipeline::internal {

StageRates::StageRates(const OptimizerChoice& choice)
    : rule_(choice.name.empty() ? nullptr : make_update_rule(choice.name)),
      names_(rule_ == nullptr ? std::vector<std::string>() : rule_->option_names()),
      options_(choice.options) {}

size_t StageRates::place(std::string_view name, size_t group) const {
  if (group >= num_groups()) {
    throw_error(refused(absl::StrCat("rates of group ", group, " of ", num_groups(),
                                     num_groups() == 0 ? ": the pipeline has no optimizer" : "")));
  }
  return static_cast<size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
}

void StageRates::set(size_t at, double value) {
  MutexLock lock(&mutex_);
  std::vector<double> changed = options_;
  changed.at(at) = value;
  const Status status = rule_->check_options(changed);
  if (status.ok()) options_ = std::move(changed);
  lock.unlock();
  throw_if_error(status);
}

double StageRates::lr(size_t group) const { return option("lr", group).value_or(0); }
void StageRates::set_lr(double lr, size_t group) { set_option("lr", lr, group); }

double StageRates::initial_lr(size_t group) {
  const double now = lr(group);
  MutexLock lock(&mutex_);
  if (!initial_.has_value()) initial_ = now;
  return *initial_;
}
void StageRates::set_initial_lr(double lr, size_t group) {
  (void)place("lr", group);
  MutexLock lock(&mutex_);
  initial_ = lr;
}

std::optional<double> StageRates::option(std::string_view name, size_t group) const {
  const size_t at = place(name, group);
  MutexLock lock(&mutex_);
  if (at >= options_.size()) return std::nullopt;
  return options_[at];
}
void StageRates::set_option(std::string_view name, double value, size_t group) {
  set(place(name, group), value);
}

std::vector<double> StageRates::options() const {
  MutexLock lock(&mutex_);
  return options_;
}

}  // namespace weft::pipeline::internal
