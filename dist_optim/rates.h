#ifndef WEFT_DIST_OPTIM_RATES_H_
#define WEFT_DIST_OPTIM_RATES_H_

// Rates: the learning rates of an optimizer's groups, and its other options, as schedules see them
// (lr_scheduler.h): those of a DistributedOptimizer, or of a pipeline's stages (Pipeline::rates()).
// Any thread. Errors: kind invalid_argument for a group that is not there, or a rate below 0.

#include <cstddef>
#include <optional>
#include <string_view>

#include "weft/common/api.h"

namespace weft {

class WEFT_API Rates {
 public:
  virtual ~Rates() = default;
  virtual size_t num_groups() const = 0;  // of parameters
  virtual double lr(size_t group) const = 0;
  virtual void set_lr(double lr, size_t group) = 0;  // from the next step on
  // The rate that a group had when this was asked first, or what was set: schedules start from it.
  virtual double initial_lr(size_t group) = 0;
  virtual void set_initial_lr(double lr, size_t group) = 0;
  // By name; nothing: it has none of this name.
  virtual std::optional<double> option(std::string_view name, size_t group) const = 0;
  // REQUIRES: it has one of this name.
  virtual void set_option(std::string_view name, double value, size_t group) = 0;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_RATES_H_
