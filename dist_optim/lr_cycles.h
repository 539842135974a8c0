#ifndef WEFT_DIST_OPTIM_LR_CYCLES_H_
#define WEFT_DIST_OPTIM_LR_CYCLES_H_

// Further schedules of torch.optim.lr_scheduler: those that set a rate whatever it was before, and
// one that runs others one after the other. See lr_scheduler.h for what holds of all of them.
//
//   weft::LinearLR warmup(optimizer, {.total_iters = 5});
//   weft::CosineAnnealingLR decay(optimizer, {.t_max = 95});
//   weft::SequentialLR schedule(optimizer, {&warmup, &decay}, {5});
//
// CyclicLR and OneCycleLR also move the groups' momentum, against the rate: the option "momentum", or
// "beta1" where there is one, as PyTorch's do, unless cycle_momentum is false.

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "weft/common/api.h"
#include "weft/dist_optim/lr_scheduler.h"

namespace weft {

struct CosineAnnealingWarmRestartsOptions {  // as PyTorch's
  int64_t t_0 = 1;                           // epochs of the first period
  int64_t t_mult = 1;                        // how many times as long each next one is
  double eta_min = 0;
};
// eta_min + (base - eta_min) (1 + cos(pi t / T)) / 2, at epoch t of a period of T; "SGDR" (2016).
class WEFT_API CosineAnnealingWarmRestarts final : public LRScheduler {
 public:
  template <class T>
  CosineAnnealingWarmRestarts(DistributedOptimizer<T>& optimizer,
                              CosineAnnealingWarmRestartsOptions options)
      : CosineAnnealingWarmRestarts(optimizer.core(), options) {}

  // The same of a pipeline's stages: Pipeline::rates().
  CosineAnnealingWarmRestarts(Rates& optimizer, CosineAnnealingWarmRestartsOptions options);

 private:
  double lr(size_t group, int64_t epoch) const override;
  const CosineAnnealingWarmRestartsOptions options_;
};

namespace internal {

// The option of an optimizer that goes down when its rate goes up.
class WEFT_API CycledMomentum {
 public:
  // Throws, kind invalid_argument: `scheduler` asks for it, and the optimizer has none.
  CycledMomentum(Rates& optimizer, const char* scheduler, bool wanted);
  bool wanted() const { return name_ != nullptr; }
  void set(double value, size_t group) const;

 private:
  Rates& optimizer_;
  const char* name_ = nullptr;  // null: not wanted
};

}  // namespace internal

enum class CyclicMode : uint8_t {
  kTriangular,   // every cycle is as high
  kTriangular2,  // each is half as high as the one before
  kExpRange,     // gamma^epoch times as high
};
// By what scale_fn scales.
enum class CyclicScaleMode : uint8_t { kCycle, kIterations };

struct CyclicLROptions {                    // as PyTorch's
  std::vector<double> base_lr{};            // one for all groups, or one for each
  std::vector<double> max_lr{};             // likewise
  int64_t step_size_up = 2000;              // epochs from base_lr to max_lr
  std::optional<int64_t> step_size_down{};  // and back; default: as many
  CyclicMode mode = CyclicMode::kTriangular;
  double gamma = 1;
  // In place of `mode`: the height by the number of the cycle, from 1, or by the epoch.
  std::function<double(double)> scale_fn{};
  CyclicScaleMode scale_mode = CyclicScaleMode::kCycle;
  bool cycle_momentum = true;
  double base_momentum = 0.8;
  double max_momentum = 0.9;
};
// Smith, "Cyclical learning rates for training neural networks" (2017).
class WEFT_API CyclicLR final : public LRScheduler {
 public:
  template <class T>
  CyclicLR(DistributedOptimizer<T>& optimizer, CyclicLROptions options)
      : CyclicLR(optimizer.core(), std::move(options)) {}

  // The same of a pipeline's stages: Pipeline::rates().
  CyclicLR(Rates& optimizer, CyclicLROptions options);

 private:
  double height(int64_t epoch) const;  // from 0 to 1 and back, scaled
  double lr(size_t group, int64_t epoch) const override;
  void on_epoch(int64_t epoch) override;
  CyclicLROptions options_;
  const internal::CycledMomentum momentum_;
};

enum class AnnealStrategy : uint8_t { kCos, kLinear };  // shape of a phase

struct OneCycleLROptions {       // as PyTorch's
  std::vector<double> max_lr{};  // one for all groups, or one for each
  int64_t total_steps = 0;       // 0: epochs * steps_per_epoch
  int64_t epochs = 0;
  int64_t steps_per_epoch = 0;
  double pct_start = 0.3;  // part of the steps in which the rate goes up
  AnnealStrategy anneal_strategy = AnnealStrategy::kCos;
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;         // max_lr over the first rate
  double final_div_factor = 1e4;  // the first rate over the last one
  bool three_phase = false;
};
// Smith and Topin, "Super-convergence" (2017). One step() after each batch, at most total_steps.
class WEFT_API OneCycleLR final : public LRScheduler {
 public:
  template <class T>
  OneCycleLR(DistributedOptimizer<T>& optimizer, OneCycleLROptions options)
      : OneCycleLR(optimizer.core(), std::move(options)) {}
  // The same of a pipeline's stages: Pipeline::rates().
  OneCycleLR(Rates& optimizer, OneCycleLROptions options);

 private:
  // What the rate and the momentum go between, and how far they are: the first value, the second.
  struct Phase {
    double end = 0;  // step
    int from = 0;    // of the rate: 0 the first, 1 the largest, 2 the last
    int to = 0;
  };
  std::pair<Phase, double> phase_at(int64_t step) const;
  double anneal(double from, double to, double part) const;
  double lr(size_t group, int64_t epoch) const override;
  void on_epoch(int64_t epoch) override;
  OneCycleLROptions options_;
  const internal::CycledMomentum momentum_;
  std::vector<Phase> phases_;
};

// Schedules one after the other: each from its epoch 0 on, at its milestone. Takes the rates back to
// those that schedules start from. The schedules outlive it, and nothing else calls their step().
class WEFT_API SequentialLR final : public LRScheduler {
 public:
  // `milestones`: epochs, ascending, one less than schedules. Throws, kind invalid_argument.
  template <class T>
  SequentialLR(DistributedOptimizer<T>& optimizer, std::vector<LRScheduler*> schedulers,
               std::vector<int64_t> milestones)
      : SequentialLR(optimizer.core(), std::move(schedulers), std::move(milestones)) {}
  void step() override;
  void set_epoch(int64_t epoch) override;

  // The same of a pipeline's stages: Pipeline::rates().
  SequentialLR(Rates& optimizer, std::vector<LRScheduler*> schedulers,
               std::vector<int64_t> milestones);

 private:
  size_t at(int64_t epoch) const;  // which one
  double lr(size_t group, int64_t epoch) const override;
  const std::vector<LRScheduler*> schedulers_;
  const std::vector<int64_t> milestones_;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_LR_CYCLES_H_
