#ifndef WEFT_COLLECTIVES_DDP_SYNC_BATCH_NORM_H_
#define WEFT_COLLECTIVES_DDP_SYNC_BATCH_NORM_H_

// SyncBatchNorm: BatchNorm over the batches of all ranks together. On any device; in LibTorch's C++
// there is none.
//
//   norm = register_module("norm", weft::SyncBatchNorm(group, 32));
//
// Ranks may have batches of different sizes, also empty ones: every rank takes part in each forward
// in training mode, and in each backward, with two small operations in all. It works with parameters
// and statistics of the same names as BatchNorm1d, 2d and 3d, so that their checkpoints load. Its
// statistics are equal on all ranks.
//
// Its operations must have the same order on all ranks as the others of their group. Give it a group
// of its own beside DistributedDataParallel in contexts, where gradients come in any order.
//
// Made without a group it is an ordinary BatchNorm, until convert_sync_batchnorm() gives it one: a
// model can be written, and run alone, before there is a group.
//
// Threads: as a module. Includes LibTorch's header for modules.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace weft {
namespace internal {
class NormConversion;
}

struct SyncBatchNormOptions {  // as PyTorch's
  double eps = 1e-5;           // added to the variance
  // Momentum of the running statistics; none: their mean over all batches.
  std::optional<double> momentum = 0.1;
  bool affine = true;
  bool track_running_stats = true;
};

class WEFT_API SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {  // see above
 public:
  SyncBatchNormImpl(const ProcessGroup& group, int64_t features,
                    const SyncBatchNormOptions& options = {});
  // From this rank's batches alone; see synchronize().
  explicit SyncBatchNormImpl(int64_t features, const SyncBatchNormOptions& options = {});
  // From now on over the batches of this group.
  void synchronize(const ProcessGroup& group);
  bool is_synchronized() const { return group_.valid(); }
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  // (batch, features, ...). Throws weft::Error, invalid_argument: another shape, or one value per
  // feature over all ranks, which has no variance.
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight;               // of length `features`, or undefined
  at::Tensor bias;                 // like weight
  at::Tensor running_mean;         // a buffer
  at::Tensor running_var;          // a buffer
  at::Tensor num_batches_tracked;  // a buffer

 private:
  friend class internal::NormConversion;
  at::Tensor forward_alone(const at::Tensor& input);
  // Counts a batch; the part of it in the running statistics.
  double next_rate();

  ProcessGroup group_;
  int64_t features_;
  SyncBatchNormOptions options_;
};
TORCH_MODULE(SyncBatchNorm);

// Makes each BatchNorm in `module` one over the batches of all ranks of `group`, with the same
// parameters, statistics, names, devices and mode, and returns their names. Before the module is
// wrapped; an optimizer that has the parameters already keeps them. In C++ the members of a module
// cannot be exchanged from outside, so it reaches
//   - a SyncBatchNorm that was made without a group, wherever it is;
//   - a BatchNorm1d, 2d or 3d in a torch::nn::Sequential, also a nested one;
//   - one in an AnyModule, by the second form.
// Throws weft::Error, invalid_argument, before anything is changed: no group; a BatchNorm anywhere
// else, with its name. Make that a SyncBatchNorm without a group.
WEFT_API std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module,
                                                         const ProcessGroup& group);
WEFT_API std::vector<std::string> convert_sync_batchnorm(torch::nn::AnyModule& module,
                                                         const ProcessGroup& group);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_SYNC_BATCH_NORM_H_
