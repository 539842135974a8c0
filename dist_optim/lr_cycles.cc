#include "weft/dist_optim/lr_cycles.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/dist_optim/internal/lr_check.h"

namespace weft {
namespace {

using internal::require;

// One for each group.
std::vector<double> by_group(std::vector<double> given, size_t groups, const char* what) {
  require(given.size() == 1 || given.size() == groups,
          absl::StrCat(what, " has ", given.size(), " values; give one, or one for each of ",
                       groups, " parameter groups"));
  if (given.size() == 1) given.resize(groups, given[0]);
  for (const double one : given) {
    require(std::isfinite(one) && one >= 0,
            absl::StrCat(what, " is ", one, ", it must be finite and not negative"));
  }
  return given;
}

}  // namespace

// ---- warm restarts -----------------------------------------------------------------------------

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(Rates& optimizer,
                                                         CosineAnnealingWarmRestartsOptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.t_0 > 0, absl::StrCat("CosineAnnealingWarmRestarts: t_0 is ", options.t_0,
                                        ", it must be positive"));
  require(options.t_mult >= 1, absl::StrCat("CosineAnnealingWarmRestarts: t_mult is ",
                                            options.t_mult, ", it must be at least 1"));
  set_epoch(0);
}

double CosineAnnealingWarmRestarts::lr(size_t group, int64_t epoch) const {
  int64_t period = options_.t_0;
  if (options_.t_mult == 1) epoch %= period;
  while (epoch >= period) {
    epoch -= period;
    period *= options_.t_mult;
  }
  const double part = static_cast<double>(epoch) / static_cast<double>(period);
  return options_.eta_min +
         (base(group) - options_.eta_min) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

// ---- momentum ----------------------------------------------------------------------------------

namespace internal {

CycledMomentum::CycledMomentum(Rates& optimizer, const char* scheduler, bool wanted)
    : optimizer_(optimizer) {
  if (!wanted || optimizer.num_groups() == 0) return;
  for (const char* name : {"momentum", "beta1"}) {
    if (optimizer.option(name, 0).has_value()) name_ = name;
  }
  require(name_ != nullptr,
          absl::StrCat(scheduler,
                       ": cycle_momentum is true, but the optimizer has neither momentum "
                       "nor beta1; set cycle_momentum to false"));
}

void CycledMomentum::set(double value, size_t group) const {
  optimizer_.set_option(name_, value, group);
}

}  // namespace internal

// ---- CyclicLR ----------------------------------------------------------------------------------

CyclicLR::CyclicLR(Rates& optimizer, CyclicLROptions options)
    : LRScheduler(optimizer),
      options_(std::move(options)),
      momentum_(optimizer, "CyclicLR", options_.cycle_momentum) {
  options_.base_lr = by_group(std::move(options_.base_lr), num_groups(), "CyclicLR: base_lr");
  options_.max_lr = by_group(std::move(options_.max_lr), num_groups(), "CyclicLR: max_lr");
  const int64_t down = options_.step_size_down.value_or(options_.step_size_up);
  require(options_.step_size_up > 0 && down > 0,
          absl::StrCat("CyclicLR: step_size_up is ", options_.step_size_up, " and step_size_down ",
                       down, ", both must be positive"));
  set_epoch(0);
}

double CyclicLR::height(int64_t epoch) const {
  const auto up = static_cast<double>(options_.step_size_up);
  const double total =
      up + static_cast<double>(options_.step_size_down.value_or(options_.step_size_up));
  const double cycle = std::floor(1 + static_cast<double>(epoch) / total);
  const double x = 1 + static_cast<double>(epoch) / total - cycle;
  const double turn = up / total;
  const double plain = x <= turn ? x / turn : (x - 1) / (turn - 1);
  if (options_.scale_fn) {
    const bool by_cycle = options_.scale_mode == CyclicScaleMode::kCycle;
    return plain * options_.scale_fn(by_cycle ? cycle : static_cast<double>(epoch));
  }
  switch (options_.mode) {
    case CyclicMode::kTriangular: return plain;
    case CyclicMode::kTriangular2: return plain / std::pow(2.0, cycle - 1);
    case CyclicMode::kExpRange: return plain * std::pow(options_.gamma, static_cast<double>(epoch));
  }
  return plain;
}

double CyclicLR::lr(size_t group, int64_t epoch) const {
  const double low = options_.base_lr[group];
  return low + (options_.max_lr[group] - low) * height(epoch);
}

void CyclicLR::on_epoch(int64_t epoch) {
  if (!momentum_.wanted()) return;
  const double range = options_.max_momentum - options_.base_momentum;
  for (size_t g = 0; g < num_groups(); ++g) {
    momentum_.set(options_.max_momentum - range * height(epoch), g);
  }
}

// ---- OneCycleLR --------------------------------------------------------------------------------

OneCycleLR::OneCycleLR(Rates& optimizer, OneCycleLROptions options)
    : LRScheduler(optimizer),
      options_(std::move(options)),
      momentum_(optimizer, "OneCycleLR", options_.cycle_momentum) {
  OneCycleLROptions& o = options_;
  if (o.total_steps == 0) o.total_steps = o.epochs * o.steps_per_epoch;
  require(o.total_steps > 0,
          absl::StrCat("OneCycleLR: total_steps is ", o.total_steps,
                       "; give it, or epochs and steps_per_epoch, as positive numbers"));
  require(o.pct_start >= 0 && o.pct_start <= 1,
          absl::StrCat("OneCycleLR: pct_start is ", o.pct_start, ", it must be in [0, 1]"));
  require(o.div_factor > 0 && o.final_div_factor > 0,
          absl::StrCat("OneCycleLR: div_factor is ", o.div_factor, " and final_div_factor ",
                       o.final_div_factor, ", both must be positive"));
  o.max_lr = by_group(std::move(o.max_lr), num_groups(), "OneCycleLR: max_lr");
  for (size_t g = 0; g < num_groups(); ++g) set_base(o.max_lr[g] / o.div_factor, g);
  const double up = o.pct_start * static_cast<double>(o.total_steps);
  phases_.push_back(Phase{up - 1, 0, 1});
  if (o.three_phase) phases_.push_back(Phase{2 * up - 2, 1, 0});
  phases_.push_back(Phase{static_cast<double>(o.total_steps) - 1, o.three_phase ? 0 : 1, 2});
  set_epoch(0);
}

std::pair<OneCycleLR::Phase, double> OneCycleLR::phase_at(int64_t step) const {
  const auto now = static_cast<double>(step);
  double begin = 0;
  size_t i = 0;
  for (; i + 1 < phases_.size() && now > phases_[i].end; ++i) begin = phases_[i].end;
  return {phases_[i], (now - begin) / (phases_[i].end - begin)};
}

double OneCycleLR::anneal(double from, double to, double part) const {
  if (options_.anneal_strategy == AnnealStrategy::kLinear) return (to - from) * part + from;
  return to + (from - to) / 2 * (std::cos(std::numbers::pi * part) + 1);
}

double OneCycleLR::lr(size_t group, int64_t epoch) const {
  require(epoch <= options_.total_steps,
          absl::StrCat("OneCycleLR: step ", epoch, " of ", options_.total_steps,
                       " is asked for; give a larger total_steps"));
  const double rates[] = {base(group), options_.max_lr[group],
                          base(group) / options_.final_div_factor};
  const auto [phase, part] = phase_at(epoch);
  // After the last step a line goes on below 0.
  return std::max(0.0, anneal(rates[phase.from], rates[phase.to], part));
}

// The momentum is lowest where the rate is highest.
void OneCycleLR::on_epoch(int64_t epoch) {
  if (!momentum_.wanted()) return;
  const double momenta[] = {options_.max_momentum, options_.base_momentum, options_.max_momentum};
  const auto [phase, part] = phase_at(epoch);
  for (size_t g = 0; g < num_groups(); ++g) {
    momentum_.set(anneal(momenta[phase.from], momenta[phase.to], part), g);
  }
}

// ---- SequentialLR ------------------------------------------------------------------------------

SequentialLR::SequentialLR(Rates& optimizer, std::vector<LRScheduler*> schedulers,
                           std::vector<int64_t> milestones)
    : LRScheduler(optimizer),
      schedulers_(std::move(schedulers)),
      milestones_(std::move(milestones)) {
  require(!schedulers_.empty() && milestones_.size() + 1 == schedulers_.size(),
          absl::StrCat("SequentialLR: ", schedulers_.size(), " schedules and ", milestones_.size(),
                       " milestones; there must be one schedule more than milestones"));
  require(std::is_sorted(milestones_.begin(), milestones_.end()) &&
              (milestones_.empty() || milestones_.front() > 0),
          absl::StrCat("SequentialLR: the milestones are ", absl::StrJoin(milestones_, ", "),
                       "; they must be positive and ascending"));
  for (const LRScheduler* one : schedulers_) {
    require(one != nullptr && one->is_of(optimizer),
            "SequentialLR: a schedule is null, or of another optimizer");
  }
  for (size_t g = 0; g < num_groups(); ++g) optimizer.set_lr(base(g), g);
  set_epoch(0);
}

size_t SequentialLR::at(int64_t epoch) const {
  return static_cast<size_t>(std::upper_bound(milestones_.begin(), milestones_.end(), epoch) -
                             milestones_.begin());
}

double SequentialLR::lr(size_t group, int64_t) const { return last_lr()[group]; }

void SequentialLR::step() {
  const int64_t next = epoch() + 1;
  const size_t i = at(next);
  if (i > 0 && milestones_[i - 1] == next) {
    schedulers_[i]->set_epoch(0);
  } else {
    schedulers_[i]->step();
  }
  set_epoch_alone(next);
}

void SequentialLR::set_epoch(int64_t epoch) {
  require(epoch >= 0, absl::StrCat("a schedule has no epoch ", epoch));
  const size_t i = at(epoch);
  schedulers_[i]->set_epoch(i == 0 ? epoch : epoch - milestones_[i - 1]);
  set_epoch_alone(epoch);
}

}  // namespace weft
