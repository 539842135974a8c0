#include "weft/dist_optim/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/dist_optim/internal/lr_check.h"

namespace weft {
namespace {

using internal::require;

double power(double base, int64_t exponent) {
  return std::pow(base, static_cast<double>(exponent));
}

}  // namespace

LRScheduler::LRScheduler(Rates& optimizer) : optimizer_(optimizer) {
  for (size_t g = 0; g < optimizer.num_groups(); ++g) base_.push_back(optimizer.initial_lr(g));
}

void LRScheduler::set_base(double lr, size_t group) {
  optimizer_.set_initial_lr(lr, group);
  base_[group] = lr;
}

void LRScheduler::begin_at(double factor) {
  for (size_t g = 0; g < base_.size(); ++g) optimizer_.set_lr(optimizer_.lr(g) * factor, g);
}

double LRScheduler::next_lr(size_t group, double, int64_t epoch) const { return lr(group, epoch); }

void LRScheduler::set_rates(const std::vector<double>& rates, int64_t epoch) {
  epoch_ = epoch;
  for (size_t g = 0; g < rates.size(); ++g) optimizer_.set_lr(rates[g], g);
  on_epoch(epoch);
}

void LRScheduler::step() {
  std::vector<double> rates;
  for (size_t g = 0; g < base_.size(); ++g) {
    rates.push_back(next_lr(g, optimizer_.lr(g), epoch_ + 1));
  }
  set_rates(rates, epoch_ + 1);
}

void LRScheduler::set_epoch(int64_t epoch) {
  require(epoch >= 0, absl::StrCat("a schedule has no epoch ", epoch));
  std::vector<double> rates;
  for (size_t g = 0; g < base_.size(); ++g) rates.push_back(lr(g, epoch));
  set_rates(rates, epoch);
}

std::vector<double> LRScheduler::last_lr() const {
  std::vector<double> out;
  for (size_t g = 0; g < base_.size(); ++g) out.push_back(optimizer_.lr(g));
  return out;
}

StepLR::StepLR(Rates& optimizer, StepLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.step_size > 0, absl::StrCat("StepLR: step_size is ", options.step_size));
}
double StepLR::lr(size_t group, int64_t epoch) const {
  return base(group) * power(options_.gamma, epoch / options_.step_size);
}
double StepLR::next_lr(size_t, double before, int64_t epoch) const {
  return epoch % options_.step_size == 0 ? before * options_.gamma : before;
}

MultiStepLR::MultiStepLR(Rates& optimizer, MultiStepLROptions options)
    : LRScheduler(optimizer), options_(std::move(options)) {
  require(std::is_sorted(options_.milestones.begin(), options_.milestones.end()),
          "MultiStepLR: the milestones are not ascending");
}
double MultiStepLR::lr(size_t group, int64_t epoch) const {
  const auto& all = options_.milestones;
  return base(group) *
         power(options_.gamma, std::upper_bound(all.begin(), all.end(), epoch) - all.begin());
}
double MultiStepLR::next_lr(size_t, double before, int64_t epoch) const {
  const auto& all = options_.milestones;
  return before * power(options_.gamma, std::count(all.begin(), all.end(), epoch));
}

ExponentialLR::ExponentialLR(Rates& optimizer, double gamma)
    : LRScheduler(optimizer), gamma_(gamma) {}
double ExponentialLR::lr(size_t group, int64_t epoch) const {
  return base(group) * power(gamma_, epoch);
}
double ExponentialLR::next_lr(size_t, double before, int64_t) const { return before * gamma_; }

CosineAnnealingLR::CosineAnnealingLR(Rates& optimizer, CosineAnnealingLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.t_max > 0, absl::StrCat("CosineAnnealingLR: t_max is ", options.t_max));
}
double CosineAnnealingLR::height(int64_t epoch) const {
  const double angle =
      std::numbers::pi * static_cast<double>(epoch) / static_cast<double>(options_.t_max);
  return 1 + std::cos(angle);
}
double CosineAnnealingLR::lr(size_t group, int64_t epoch) const {
  return options_.eta_min + (base(group) - options_.eta_min) * height(epoch) / 2;
}
double CosineAnnealingLR::next_lr(size_t group, double before, int64_t epoch) const {
  // Where it has come down to the ground a ratio says nothing.
  if ((epoch - 1) % (2 * options_.t_max) == options_.t_max) {
    return before + (base(group) - options_.eta_min) * height(options_.t_max + 1) / 2;
  }
  return options_.eta_min + (before - options_.eta_min) * height(epoch) / height(epoch - 1);
}

LambdaLR::LambdaLR(Rates& optimizer, std::function<double(int64_t)> factor)
    : LRScheduler(optimizer), factor_(std::move(factor)) {
  set_epoch(0);
}
double LambdaLR::lr(size_t group, int64_t epoch) const { return base(group) * factor_(epoch); }

ConstantLR::ConstantLR(Rates& optimizer, ConstantLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.factor >= 0 && options.factor <= 1,
          absl::StrCat("ConstantLR: factor is ", options.factor, ", it must be in [0, 1]"));
  require(options.total_iters > 0, absl::StrCat("ConstantLR: total_iters is ", options.total_iters,
                                                ", it must be positive"));
  begin_at(options.factor);
}
double ConstantLR::lr(size_t group, int64_t epoch) const {
  return base(group) * (epoch >= options_.total_iters ? 1 : options_.factor);
}
double ConstantLR::next_lr(size_t group, double before, int64_t epoch) const {
  if (epoch != options_.total_iters) return before;
  return options_.factor == 0 ? base(group) : before * (1 / options_.factor);
}

LinearLR::LinearLR(Rates& optimizer, LinearLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(
      options.start_factor > 0 && options.start_factor <= 1,
      absl::StrCat("LinearLR: start_factor is ", options.start_factor, ", it must be in (0, 1]"));
  require(options.end_factor >= 0 && options.end_factor <= 1,
          absl::StrCat("LinearLR: end_factor is ", options.end_factor, ", it must be in [0, 1]"));
  require(options.total_iters > 0,
          absl::StrCat("LinearLR: total_iters is ", options.total_iters, ", it must be positive"));
  begin_at(options.start_factor);
}
double LinearLR::lr(size_t group, int64_t epoch) const {
  const double part = static_cast<double>(std::min(options_.total_iters, epoch)) /
                      static_cast<double>(options_.total_iters);
  return base(group) *
         (options_.start_factor + (options_.end_factor - options_.start_factor) * part);
}
double LinearLR::next_lr(size_t, double before, int64_t epoch) const {
  if (epoch > options_.total_iters) return before;
  const double change = options_.end_factor - options_.start_factor;
  return before * (1 + change / (static_cast<double>(options_.total_iters) * options_.start_factor +
                                 static_cast<double>(epoch - 1) * change));
}

PolynomialLR::PolynomialLR(Rates& optimizer, PolynomialLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.total_iters > 0, absl::StrCat("PolynomialLR: total_iters is ",
                                                options.total_iters, ", it must be positive"));
  require(options.power > 0,
          absl::StrCat("PolynomialLR: power is ", options.power, ", it must be positive"));
}
double PolynomialLR::lr(size_t group, int64_t epoch) const {
  const double part = static_cast<double>(std::min(options_.total_iters, epoch)) /
                      static_cast<double>(options_.total_iters);
  return base(group) * std::pow(1 - part, options_.power);
}
double PolynomialLR::next_lr(size_t, double before, int64_t epoch) const {
  if (epoch > options_.total_iters) return before;
  const auto total = static_cast<double>(options_.total_iters);
  const double left = 1 - static_cast<double>(epoch) / total;
  const double left_before = 1 - static_cast<double>(epoch - 1) / total;
  return before * std::pow(left / left_before, options_.power);
}

ReduceLROnPlateau::ReduceLROnPlateau(Rates& optimizer, ReduceLROnPlateauOptions options)
    : optimizer_(optimizer),
      options_(options),
      best_(options.maximize ? -std::numeric_limits<double>::infinity()
                             : std::numeric_limits<double>::infinity()) {
  require(options.factor > 0 && options.factor < 1,
          absl::StrCat("ReduceLROnPlateau: factor is ", options.factor, ", it must be in (0, 1)"));
}

void ReduceLROnPlateau::step(double metric) {
  const bool better = options_.maximize ? metric > best_ * (1 + options_.threshold)
                                        : metric < best_ * (1 - options_.threshold);
  if (better) {
    best_ = metric;
    bad_ = 0;
  } else {
    ++bad_;
  }
  if (cooling_ > 0) {
    --cooling_;
    bad_ = 0;
  }
  if (bad_ <= options_.patience) return;
  for (size_t g = 0; g < optimizer_.num_groups(); ++g) {
    const double before = optimizer_.lr(g);
    const double next = std::max(before * options_.factor, options_.min_lr);
    if (next < before) optimizer_.set_lr(next, g);
  }
  cooling_ = options_.cooldown;
  bad_ = 0;
}

}  // namespace weft
