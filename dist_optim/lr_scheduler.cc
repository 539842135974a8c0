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

ExponentialLR::ExponentialLR(internal::OptimizerCore& optimizer, double gamma)
    : LRScheduler(optimizer), gamma_(gamma) {}
double ExponentialLR::lr(double base, int64_t epoch) const { return base * power(gamma_, epoch); }

CosineAnnealingLR::CosineAnnealingLR(internal::OptimizerCore& optimizer,
                                     CosineAnnealingLROptions options)
    : LRScheduler(optimizer), options_(options) {
  require(options.t_max > 0, absl::StrCat("CosineAnnealingLR: t_max is ", options.t_max));
}
double CosineAnnealingLR::lr(double base, int64_t epoch) const {
  const double angle =
      std::numbers::pi * static_cast<double>(epoch) / static_cast<double>(options_.t_max);
  return options_.eta_min + (base - options_.eta_min) * (1 + std::cos(angle)) / 2;
}

LambdaLR::LambdaLR(internal::OptimizerCore& optimizer, std::function<double(int64_t)> factor)
    : LRScheduler(optimizer), factor_(std::move(factor)) {
  set_epoch(0);
}
double LambdaLR::lr(double base, int64_t epoch) const { return base * factor_(epoch); }

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
    optimizer_.set_lr(std::max(optimizer_.lr(g) * options_.factor, options_.min_lr), g);
  }
  cooling_ = options_.cooldown;
  bad_ = 0;
}

}  // namespace weft
