#include "weft/dist_optim/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft {
namespace {

void require(bool good, std::string_view what) {
  if (!good) throw_error(make_error(ErrorKind::kInvalidArgument, std::string(what)));
}

double power(double base, int64_t exponent) {
  return std::pow(base, static_cast<double>(exponent));
}

}  // namespace

LRScheduler::LRScheduler(internal::OptimizerCore& optimizer) : optimizer_(optimizer) {
  for (size_t g = 0; g < optimizer.num_groups(); ++g) base_.push_back(optimizer.lr(g));
}

void LRScheduler::step() {
  ++epoch_;
  for (size_t g = 0; g < base_.size(); ++g) {
    optimizer_.set_lr(next_lr(optimizer_.lr(g), base_[g], epoch_), g);
  }
}

void LRScheduler::set_epoch(int64_t epoch) {
  require(epoch >= 0, absl::StrCat("a schedule has no epoch ", epoch));
  epoch_ = epoch;
  for (size_t g = 0; g < base_.size(); ++g) optimizer_.set_lr(lr(base_[g], epoch), g);
}

std::vector<double> LRScheduler::last_lr() const {
  std::vector<double> out;
  for (size_t g = 0; g < base_.size(); ++g) out.push_back(optimizer_.lr(g));
  return out;
}

StepLR::StepLR(internal::OptimizerCore& optimizer, StepLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.step_size > 0, absl::StrCat("StepLR: step_size is ", options.step_size));
}
double StepLR::lr(double base, int64_t epoch) const {
  return base * power(options_.gamma, epoch / options_.step_size);
}
double StepLR::next_lr(double before, double, int64_t epoch) const {
  return epoch % options_.step_size == 0 ? before * options_.gamma : before;
}

MultiStepLR::MultiStepLR(internal::OptimizerCore& optimizer, MultiStepLROptions options)
    : LRScheduler(optimizer), options_(std::move(options)) {
  require(std::is_sorted(options_.milestones.begin(), options_.milestones.end()),
          "MultiStepLR: the milestones are not ascending");
}
double MultiStepLR::lr(double base, int64_t epoch) const {
  const auto& all = options_.milestones;
  return base *
         power(options_.gamma, std::upper_bound(all.begin(), all.end(), epoch) - all.begin());
}
double MultiStepLR::next_lr(double before, double, int64_t epoch) const {
  const auto& all = options_.milestones;
  return before * power(options_.gamma, std::count(all.begin(), all.end(), epoch));
}

ExponentialLR::ExponentialLR(internal::OptimizerCore& optimizer, double gamma)
    : LRScheduler(optimizer), gamma_(gamma) {}
double ExponentialLR::lr(double base, int64_t epoch) const { return base * power(gamma_, epoch); }
double ExponentialLR::next_lr(double before, double, int64_t) const { return before * gamma_; }

CosineAnnealingLR::CosineAnnealingLR(internal::OptimizerCore& optimizer,
                                     CosineAnnealingLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.t_max > 0, absl::StrCat("CosineAnnealingLR: t_max is ", options.t_max));
}
double CosineAnnealingLR::height(int64_t epoch) const {
  const double angle =
      std::numbers::pi * static_cast<double>(epoch) / static_cast<double>(options_.t_max);
  return 1 + std::cos(angle);
}
double CosineAnnealingLR::lr(double base, int64_t epoch) const {
  return options_.eta_min + (base - options_.eta_min) * height(epoch) / 2;
}
double CosineAnnealingLR::next_lr(double before, double base, int64_t epoch) const {
  // Where it has come down to the ground a ratio says nothing.
  if ((epoch - 1) % (2 * options_.t_max) == options_.t_max) {
    return before + (base - options_.eta_min) * height(options_.t_max + 1) / 2;
  }
  return options_.eta_min + (before - options_.eta_min) * height(epoch) / height(epoch - 1);
}

LambdaLR::LambdaLR(internal::OptimizerCore& optimizer, std::function<double(int64_t)> factor)
    : LRScheduler(optimizer), factor_(std::move(factor)) {
  set_epoch(0);
}
double LambdaLR::lr(double base, int64_t epoch) const { return base * factor_(epoch); }
double LambdaLR::next_lr(double, double base, int64_t epoch) const { return lr(base, epoch); }

ReduceLROnPlateau::ReduceLROnPlateau(internal::OptimizerCore& optimizer,
                                     ReduceLROnPlateauOptions options)
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
