#ifndef WEFT_COLLECTIVES_DDP_MIXED_PRECISION_H_
#define WEFT_COLLECTIVES_DDP_MIXED_PRECISION_H_

// Mixed precision: a forward whose operators compute in bf16 or fp16, and GradScaler, which keeps
// fp16 gradients from becoming zero. LibTorch's C++ frontend has neither.
//
//   weft::GradScaler scaler(group);
//   ...
//   {
//     const weft::Autocast autocast(at::kCUDA, at::kHalf);
//     loss = loss_of(ddp.forward(x), y);
//   }
//   scaler.scale(loss).backward();
//   scaler.unscale(optimizer);                              // only to clip
//   torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
//   scaler.step(optimizer);                                 // on all ranks, or on none
//   scaler.update();
//
// The formulas are those of torch.amp.GradScaler. Whether a gradient is infinite or no number is
// agreed by all ranks of the group, so that all have the same scale and step alike, also where each
// rank has gradients of its own (ZeroRedundancyOptimizer, contexts). With bf16 no GradScaler is
// needed: it has the range of fp32.
//
// Threads: one at a time. All ranks make the same calls in the same order.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace weft {

// While it lives, operators of this thread compute in `dtype` on devices of this type where LibTorch
// deems it safe. Also for DataParallel's replicas. May be nested; ends in the reverse order.
class WEFT_API Autocast {
 public:
  // On a CPU: kBFloat16 or kHalf.
  Autocast(at::DeviceType device, at::ScalarType dtype, bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  const at::DeviceType device_;
  const at::ScalarType dtype_before_;
  const bool enabled_before_;
};

// Those of torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;    // of the first step
  double growth_factor = 2;     // by which the scale grows, and...
  double backoff_factor = 0.5;  // ...by which it shrinks after an infinite gradient
  // Steps without an infinite gradient after which the scale grows.
  int64_t growth_interval = 2000;
  // Off: scale() and step() do what they would do without a scaler.
  bool enabled = true;
};

class WEFT_API GradScaler {
 public:
  // Throws weft::Error, invalid_argument: a factor that does not grow or shrink, a scale that is not
  // positive and finite.
  explicit GradScaler(const ProcessGroup& group, const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the optimizer's gradients by the scale, once in each step. True: all of them are finite,
  // on all ranks. Throws weft::Error, state: it was done for this optimizer since the last update().
  template <class Optimizer>
  bool unscale(Optimizer& optimizer) {
    return unscale_as(&optimizer, gradients_of(optimizer));
  }
  // The same of these gradients, in place: those that this worker has in a DistAutogradContext.
  bool unscale_gradients(const std::vector<at::Tensor>& gradients) {
    return unscale_as(nullptr, gradients);
  }

  // Unscales if that was not done, and steps if all gradients are finite. True: it has stepped. Throws
  // weft::Error, state: it was called for this optimizer since the last update().
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    return step_as(
        &optimizer, [&optimizer] { return gradients_of(optimizer); },
        [&optimizer] { optimizer.step(); });
  }

  // The next scale: smaller when a gradient was not finite since the last update(), larger after
  // growth_interval steps in which all were. Throws weft::Error, state: nothing was unscaled.
  void update();

  // The factor of the next loss; 1 when it is off.
  double get_scale() const { return options_.enabled ? static_cast<double>(scale_) : 1.0; }
  // Steps since the scale has changed.
  int64_t growth_tracker() const { return growth_tracker_; }
  // For a checkpoint: TrainingState::notes.
  std::string state() const;
  // Throws weft::Error, invalid_argument: not what state() has given.
  void load_state(const std::string& text);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct Entry {
    Stage stage = Stage::kReady;
    bool finite = true;
  };

  template <class Optimizer>
  static std::vector<at::Tensor> gradients_of(Optimizer& optimizer) {
    std::vector<at::Tensor> out;
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& one : group.params()) {
        if (one.grad().defined()) out.push_back(one.grad());
      }
    }
    return out;
  }
  bool unscale_as(const void* key, const std::vector<at::Tensor>& gradients);
  bool step_as(const void* key, const std::function<std::vector<at::Tensor>()>& gradients,
               const std::function<void()>& step);

  ProcessGroup group_;
  GradScalerOptions options_;
  float scale_;
  int64_t growth_tracker_ = 0;
  std::map<const void*, Entry> entries_{};  // since the last update(), by optimizer
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_MIXED_PRECISION_H_
