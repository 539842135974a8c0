#ifndef WEFT_DIST_OPTIM_LR_SCHEDULER_H_
#define WEFT_DIST_OPTIM_LR_SCHEDULER_H_

// Learning-rate schedules for DistributedOptimizer, with torch.optim.lr_scheduler's names and
// values. They live at the trainer: the rates travel with each step, and cost no message.
//
//   weft::StepLR schedule(optimizer, {.step_size = 30});
//   for (int epoch = 0; epoch < 90; ++epoch) { train(optimizer); schedule.step(); }
//
// The rates that the groups have when a schedule is made are those it starts from. step() changes
// the rates that there are by what the new epoch is to the one before, so several schedules of one
// optimizer chain, and a rate set by hand is gone on from; LambdaLR alone sets them, as PyTorch's.
// A schedule must not outlive its optimizer. One thread at a time. To go on later: construct it with
// the same rates, then set_epoch().

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "weft/common/api.h"
#include "weft/dist_optim/optimizer.h"

namespace weft {

// Rates as a function of the epoch.
class WEFT_API LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  // The next epoch.
  void step();
  // The rates that this schedule alone gives for the epoch. REQUIRES: not negative.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }
  // By group.
  std::vector<double> last_lr() const;

 protected:
  explicit LRScheduler(internal::OptimizerCore& optimizer);
  virtual double lr(double base, int64_t epoch) const = 0;
  // From a group's rate in the epoch before.
  virtual double next_lr(double before, double base, int64_t epoch) const = 0;

 private:
  internal::OptimizerCore& optimizer_;
  std::vector<double> base_;
  int64_t epoch_ = 0;
};

struct StepLROptions {
  int64_t step_size = 1;  // epochs
  double gamma = 0.1;
};
// base * gamma^(epoch / step_size)
class WEFT_API StepLR final : public LRScheduler {
 public:
  template <class T>
  StepLR(DistributedOptimizer<T>& optimizer, StepLROptions options)
      : StepLR(optimizer.core(), options) {}

 private:
  StepLR(internal::OptimizerCore& optimizer, StepLROptions options);
  double lr(double base, int64_t epoch) const override;
  double next_lr(double before, double base, int64_t epoch) const override;
  const StepLROptions options_;
};

struct MultiStepLROptions {
  std::vector<int64_t> milestones{};  // ascending
  double gamma = 0.1;
};
// base * gamma^(number of milestones reached)
class WEFT_API MultiStepLR final : public LRScheduler {
 public:
  template <class T>
  MultiStepLR(DistributedOptimizer<T>& optimizer, MultiStepLROptions options)
      : MultiStepLR(optimizer.core(), std::move(options)) {}

 private:
  MultiStepLR(internal::OptimizerCore& optimizer, MultiStepLROptions options);
  double lr(double base, int64_t epoch) const override;
  double next_lr(double before, double base, int64_t epoch) const override;
  const MultiStepLROptions options_;
};

// base * gamma^epoch
class WEFT_API ExponentialLR final : public LRScheduler {
 public:
  template <class T>
  ExponentialLR(DistributedOptimizer<T>& optimizer, double gamma)
      : ExponentialLR(optimizer.core(), gamma) {}

 private:
  ExponentialLR(internal::OptimizerCore& optimizer, double gamma);
  double lr(double base, int64_t epoch) const override;
  double next_lr(double before, double base, int64_t epoch) const override;
  const double gamma_;
};

struct CosineAnnealingLROptions {
  int64_t t_max = 1;  // epochs of half a period
  double eta_min = 0;
};
// eta_min + (base - eta_min) (1 + cos(pi epoch / t_max)) / 2; Loshchilov and Hutter, "SGDR" (2016).
class WEFT_API CosineAnnealingLR final : public LRScheduler {
 public:
  template <class T>
  CosineAnnealingLR(DistributedOptimizer<T>& optimizer, CosineAnnealingLROptions options)
      : CosineAnnealingLR(optimizer.core(), options) {}

 private:
  CosineAnnealingLR(internal::OptimizerCore& optimizer, CosineAnnealingLROptions options);
  double height(int64_t epoch) const;  // from 2 down to 0 and back
  double lr(double base, int64_t epoch) const override;
  double next_lr(double before, double base, int64_t epoch) const override;
  const CosineAnnealingLROptions options_;
};

// base * factor(epoch)
class WEFT_API LambdaLR final : public LRScheduler {
 public:
  template <class T>
  LambdaLR(DistributedOptimizer<T>& optimizer, std::function<double(int64_t epoch)> factor)
      : LambdaLR(optimizer.core(), std::move(factor)) {}

 private:
  LambdaLR(internal::OptimizerCore& optimizer, std::function<double(int64_t epoch)> factor);
  double lr(double base, int64_t epoch) const override;
  double next_lr(double before, double base, int64_t epoch) const override;
  const std::function<double(int64_t)> factor_;
};

struct ReduceLROnPlateauOptions {
  bool maximize = false;  // of the metric
  double factor = 0.1;
  int64_t patience = 10;    // steps without an improvement that are borne
  double threshold = 1e-4;  // relative, of an improvement
  int64_t cooldown = 0;     // steps after a reduction that are not counted
  double min_lr = 0;        // no rate is lowered further; one that is below stays
};
// The rates go down when a metric has stopped to improve.
class WEFT_API ReduceLROnPlateau final {
 public:
  template <class T>
  ReduceLROnPlateau(DistributedOptimizer<T>& optimizer, ReduceLROnPlateauOptions options = {})
      : ReduceLROnPlateau(optimizer.core(), options) {}
  void step(double metric);

 private:
  ReduceLROnPlateau(internal::OptimizerCore& optimizer, ReduceLROnPlateauOptions options);

  internal::OptimizerCore& optimizer_;
  const ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_ = 0;
  int64_t cooling_ = 0;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_LR_SCHEDULER_H_
