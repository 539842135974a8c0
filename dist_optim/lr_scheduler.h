#ifndef WEFT_DIST_OPTIM_LR_SCHEDULER_H_
#define WEFT_DIST_OPTIM_LR_SCHEDULER_H_

// Learning-rate schedules for DistributedOptimizer, with torch.optim.lr_scheduler's names and
// values. They live at the trainer: the rates travel with each step, and cost no message.
//
//   weft::StepLR schedule(optimizer, {.step_size = 30});
//   for (int epoch = 0; epoch < 90; ++epoch) { train(optimizer); schedule.step(); }
//
// The rates that the groups have when the first schedule of an optimizer is made are those that all
// its schedules start from (PyTorch's initial_lr). step() changes the rates that there are by what the
// new epoch is to the one before, so several schedules of one optimizer chain, and a rate set by hand
// is gone on from; LambdaLR and those of lr_cycles.h set them, as PyTorch's. Making one gives the rates
// of its epoch 0. A schedule must not outlive its optimizer. One thread at a time. To go on later:
// construct it with the same rates, then set_epoch().

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "weft/common/api.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/rates.h"

namespace weft {

// Rates as a function of the epoch.
class WEFT_API LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  // The next epoch. Throws, kind invalid_argument, where OneCycleLR has no more; nothing is changed.
  virtual void step();
  // The rates that this schedule alone gives for the epoch. Throws, kind invalid_argument, for a
  // negative one, or as step().
  virtual void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }
  // By group.
  std::vector<double> last_lr() const;
  bool is_of(const Rates& optimizer) const { return &optimizer == &optimizer_; }

 protected:
  explicit LRScheduler(Rates& optimizer);
  Rates& optimizer() const { return optimizer_; }
  size_t num_groups() const { return base_.size(); }  // of the optimizer
  // The rate that a schedule starts from.
  double base(size_t group) const { return base_[group]; }
  void set_base(double lr, size_t group);
  void set_epoch_alone(int64_t epoch) { epoch_ = epoch; }
  // Multiplies the rates that there are: of an epoch 0 that is not the rate to start from.
  void begin_at(double factor);

  virtual double lr(size_t group, int64_t epoch) const = 0;  // the schedule
  // From the group's rate in the epoch before. Default: lr() alone.
  virtual double next_lr(size_t group, double before, int64_t epoch) const;
  // What else an epoch brings, after the rates. Default: nothing.
  virtual void on_epoch(int64_t) {}

 private:
  void set_rates(const std::vector<double>& rates, int64_t epoch);

  Rates& optimizer_;
  std::vector<double> base_;
  int64_t epoch_ = 0;
};

struct StepLROptions {    // as PyTorch's
  int64_t step_size = 1;  // epochs
  double gamma = 0.1;
};
// base * gamma^(epoch / step_size)
class WEFT_API StepLR final : public LRScheduler {
 public:
  template <class T>
  StepLR(DistributedOptimizer<T>& optimizer, StepLROptions options)
      : StepLR(optimizer.core(), options) {}

  // The same of a pipeline's stages: Pipeline::rates().
  StepLR(Rates& optimizer, StepLROptions options);

 private:
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const StepLROptions options_;
};

struct MultiStepLROptions {           // as PyTorch's
  std::vector<int64_t> milestones{};  // ascending
  double gamma = 0.1;
};
// base * gamma^(number of milestones reached)
class WEFT_API MultiStepLR final : public LRScheduler {
 public:
  template <class T>
  MultiStepLR(DistributedOptimizer<T>& optimizer, MultiStepLROptions options)
      : MultiStepLR(optimizer.core(), std::move(options)) {}

  // The same of a pipeline's stages: Pipeline::rates().
  MultiStepLR(Rates& optimizer, MultiStepLROptions options);

 private:
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const MultiStepLROptions options_;
};

// base * gamma^epoch
class WEFT_API ExponentialLR final : public LRScheduler {
 public:
  template <class T>
  ExponentialLR(DistributedOptimizer<T>& optimizer, double gamma)
      : ExponentialLR(optimizer.core(), gamma) {}

  // The same of a pipeline's stages: Pipeline::rates().
  ExponentialLR(Rates& optimizer, double gamma);

 private:
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const double gamma_;
};

struct CosineAnnealingLROptions {  // as PyTorch's
  int64_t t_max = 1;               // epochs of half a period
  double eta_min = 0;
};
// eta_min + (base - eta_min) (1 + cos(pi epoch / t_max)) / 2; Loshchilov and Hutter, "SGDR" (2016).
class WEFT_API CosineAnnealingLR final : public LRScheduler {
 public:
  template <class T>
  CosineAnnealingLR(DistributedOptimizer<T>& optimizer, CosineAnnealingLROptions options)
      : CosineAnnealingLR(optimizer.core(), options) {}

  // The same of a pipeline's stages: Pipeline::rates().
  CosineAnnealingLR(Rates& optimizer, CosineAnnealingLROptions options);

 private:
  double height(int64_t epoch) const;  // from 2 down to 0 and back
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const CosineAnnealingLROptions options_;
};

// base * factor(epoch)
class WEFT_API LambdaLR final : public LRScheduler {
 public:
  template <class T>
  LambdaLR(DistributedOptimizer<T>& optimizer, std::function<double(int64_t epoch)> factor)
      : LambdaLR(optimizer.core(), std::move(factor)) {}

  // The same of a pipeline's stages: Pipeline::rates().
  LambdaLR(Rates& optimizer, std::function<double(int64_t epoch)> factor);

 private:
  double lr(size_t group, int64_t epoch) const override;
  const std::function<double(int64_t)> factor_;
};

struct ConstantLROptions {  // as PyTorch's
  double factor = 1.0 / 3;  // in [0, 1]
  int64_t total_iters = 5;  // epochs with it
};
// base * factor, and from epoch total_iters on base
class WEFT_API ConstantLR final : public LRScheduler {
 public:
  template <class T>
  explicit ConstantLR(DistributedOptimizer<T>& optimizer, ConstantLROptions options = {})
      : ConstantLR(optimizer.core(), options) {}

  // The same of a pipeline's stages: Pipeline::rates().
  ConstantLR(Rates& optimizer, ConstantLROptions options);

 private:
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const ConstantLROptions options_;
};

struct LinearLROptions {          // as PyTorch's
  double start_factor = 1.0 / 3;  // in (0, 1]
  double end_factor = 1;          // in [0, 1]
  int64_t total_iters = 5;        // epochs until end_factor
};
// base * (start_factor + (end_factor - start_factor) min(epoch, total_iters) / total_iters)
class WEFT_API LinearLR final : public LRScheduler {
 public:
  template <class T>
  explicit LinearLR(DistributedOptimizer<T>& optimizer, LinearLROptions options = {})
      : LinearLR(optimizer.core(), options) {}

  // The same of a pipeline's stages: Pipeline::rates().
  LinearLR(Rates& optimizer, LinearLROptions options);

 private:
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const LinearLROptions options_;
};

struct PolynomialLROptions {  // as PyTorch's
  int64_t total_iters = 5;    // epochs until 0
  double power = 1;
};
// base * (1 - min(epoch, total_iters) / total_iters)^power
class WEFT_API PolynomialLR final : public LRScheduler {
 public:
  template <class T>
  explicit PolynomialLR(DistributedOptimizer<T>& optimizer, PolynomialLROptions options = {})
      : PolynomialLR(optimizer.core(), options) {}

  // The same of a pipeline's stages: Pipeline::rates().
  PolynomialLR(Rates& optimizer, PolynomialLROptions options);

 private:
  double lr(size_t group, int64_t epoch) const override;
  double next_lr(size_t group, double before, int64_t epoch) const override;
  const PolynomialLROptions options_;
};

struct ReduceLROnPlateauOptions {  // as PyTorch's
  bool maximize = false;           // of the metric
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

  // The same of a pipeline's stages: Pipeline::rates().
  ReduceLROnPlateau(Rates& optimizer, ReduceLROnPlateauOptions options);

 private:
  Rates& optimizer_;
  const ReduceLROnPlateauOptions options_;
  double best_;
  int64_t bad_ = 0;
  int64_t cooling_ = 0;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_LR_SCHEDULER_H_
