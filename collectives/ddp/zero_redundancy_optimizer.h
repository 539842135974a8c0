#ifndef WEFT_COLLECTIVES_DDP_ZERO_REDUNDANCY_OPTIMIZER_H_
#define WEFT_COLLECTIVES_DDP_ZERO_REDUNDANCY_OPTIMIZER_H_

// ZeroRedundancyOptimizer<Optimizer>: replicas share the work and the state of an optimizer (stage 1
// of ZeRO): each rank steps a part of the parameters, then all get each other's.
//
//   weft::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
//       net->parameters(), group, torch::optim::AdamOptions(1e-3));
//   ...
//   loss.backward();                       // of a DistributedDataParallel
//   optimizer.step();                      // all ranks together
//
// Parameters stay whole: the largest first, each to the rank that has least so far. The state of
// Adam is then about one in size() of it at each rank. A rank's own optimizer, with its state, is
// local().
//
// Threads: one at a time.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace weft {

namespace internal {
// By rank: positions of its parameters. A function of the sizes alone. Throws, invalid_argument: a
// parameter that is undefined, no leaf, or given twice; none at all.
WEFT_API std::vector<std::vector<size_t>> zero_partition(const std::vector<at::Tensor>& parameters,
                                                         int ranks);
// Each rank's parameters, from it to all.
WEFT_API void zero_exchange(ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                            const std::vector<std::vector<size_t>>& shards);
WEFT_API void zero_clear(const std::vector<at::Tensor>& parameters, bool set_to_none);

class Joinable;
// What takes part in a Join (join.h): `step` is done by every rank.
WEFT_API std::shared_ptr<Joinable> make_zero_joinable(const ProcessGroup& group,
                                                      std::vector<at::Tensor> parameters,
                                                      std::function<void()> step);
// Under a Join: says to the ranks without batches that a step comes.
WEFT_API void zero_announce(Joinable* joinable);
WEFT_API bool zero_is_joined(const Joinable* joinable);
}  // namespace internal

template <class Optimizer>
class ZeroRedundancyOptimizer {
 public:
  // The same parameters, in the same order, on all ranks. Throws weft::Error, invalid_argument:
  // none, or one that is undefined, no leaf, or given twice.
  template <class Options>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, const ProcessGroup& group,
                          const Options& options)
      : parameters_(std::move(parameters)),
        group_(group),
        shards_(internal::zero_partition(parameters_, group_.size())) {
    std::vector<at::Tensor> own;
    for (const size_t i : shards_[static_cast<size_t>(group_.rank())]) {
      own.push_back(parameters_[i]);
    }
    if (!own.empty()) local_.emplace(own, options);
  }

  // Steps this rank's part with its gradients, and takes over what the others have stepped. Throws
  // what operations of the group throw, and what the optimizer does, which ends the group: the
  // others would wait.
  void step() {
    internal::zero_announce(joinable_.get());
    step_and_exchange();
  }
  // Clears the gradients of all parameters. Where gradients lie in buckets, use zero_grad() of
  // DistributedDataParallel.
  void zero_grad(bool set_to_none = true) { internal::zero_clear(parameters_, set_to_none); }

  // None: there are more ranks than parameters.
  std::optional<Optimizer>& local() { return local_; }
  // By rank, positions of parameters.
  const std::vector<std::vector<size_t>>& shards() const { return shards_; }
  // For Join (join.h); this must not be moved while one is around it.
  internal::Joinable& joinable() {
    if (!internal::zero_is_joined(joinable_.get())) {
      joinable_ =
          internal::make_zero_joinable(group_, parameters_, [this] { step_and_exchange(); });
    }
    return *joinable_;
  }

 private:
  void step_and_exchange() {
    try {
      if (local_.has_value()) local_->step();
    } catch (const std::exception& e) {
      group_.abort(e.what());
      throw;
    }
    internal::zero_exchange(group_, parameters_, shards_);
  }

  std::vector<at::Tensor> parameters_;
  ProcessGroup group_;
  std::vector<std::vector<size_t>> shards_;
  std::optional<Optimizer> local_;
  std::shared_ptr<internal::Joinable> joinable_;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_ZERO_REDUNDANCY_OPTIMIZER_H_
