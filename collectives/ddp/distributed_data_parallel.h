#ifndef WEFT_COLLECTIVES_DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define WEFT_COLLECTIVES_DDP_DISTRIBUTED_DATA_PARALLEL_H_

// DistributedDataParallel<M>: each rank of a group has a replica of a module and a part of every
// batch; gradients are averaged over the ranks while the backward runs.
//
//   torch::nn::Sequential net(torch::nn::Linear(64, 32), torch::nn::ReLU(),
//                             torch::nn::Linear(32, 10));
//   weft::DistributedDataParallel ddp(net, group);       // all ranks get rank 0's parameters
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   auto loss = torch::nn::functional::cross_entropy(ddp.forward(x), y);
//   loss.backward();                                     // .grad is the mean over the ranks
//   optimizer.step();                                    // replicas stay equal, bit for bit
//
// In a DistAutogradContext the same forward is followed by context.backward({loss}): what is
// reduced is then the context's, and `.grad` is not touched.
//
// M is the class that a program writes: a holder (one made by TORCH_MODULE), or a Module itself,
// then held by a shared_ptr. Every forward with grad mode on, outside of no_sync(), belongs to a
// reduction in which all ranks take part; errors are those of the backward, on every rank, and name
// ranks and parameters. A forward whose backward never runs is allowed. docs/ddp.md has the rest.
//
// Threads: one forward at a time. Forwards of several DistAutogradContexts may run one after
// another before their backwards, which may run at once: they are reduced in the order in which
// they begin, or in that of the numbers given to iteration().
//
// A program that uses this header has LibTorch's own for its modules; they are large, so neither
// this header nor weft.h includes them.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/ddp/comm_hooks.h"
#include "weft/collectives/ddp/tensors_in.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/common/time.h"

namespace torch::nn {
class Module;
}

namespace weft {

struct DistributedDataParallelOptions {  // as PyTorch's
  // A bucket is reduced when it has so many MiB; the first one, which is to leave early, with less.
  double bucket_cap_mb = 25;
  double first_bucket_mb = 1;
  // Parameters may have no part in a loss. Those that no rank uses keep their gradients as they
  // are.
  bool find_unused_parameters = false;
  // Every backward that is reduced uses the same parameters equally often. The first one shows which,
  // and its buckets leave at its end; find_unused_parameters is not needed then, and a local
  // backward inside of a node (a checkpoint) may add to gradients. A change is an error.
  bool static_graph = false;
  // `.grad` lies in the buckets: no copy, and no memory of its own. Not in contexts.
  bool gradient_as_bucket_view = false;
  // Before each forward that is reduced, buffers become those of rank 0.
  bool broadcast_buffers = true;
  // Compare the modules of all ranks, and give them rank 0's parameters and buffers.
  bool init_sync = true;
  // Names of parameters and buffers that are left alone.
  std::vector<std::string> ignored_parameters{};
  // Timeout of each operation of the group; default: the group's. When it expires the group ends.
  Timeout timeout{};
};

// What became of the last reductions.
struct DdpSight {
  std::vector<std::vector<std::string>> buckets{};  // the names of the parameters in each
  int64_t reductions = 0;                           // that have succeeded
  int64_t launched_early = 0;                       // buckets that left before the last was full
  int64_t written_early = 0;                        // gradients, while the last bucket was reduced
  bool rebuilt = false;                             // buckets are in the order of arrival
};

// Numbers and texts by the names that PyTorch's _get_ddp_logging_data() gives them: sizes in bytes,
// times in nanoseconds, of the last reduction, or ("avg_...") on average. docs/ddp.md has the list.
using DdpLoggingData = std::map<std::string, std::variant<int64_t, std::string>>;

namespace internal {

class DdpCore;
class Joinable;

// The part of DistributedDataParallel that does not depend on the module's type.
class WEFT_API DdpHandle {
 public:
  DdpHandle(torch::nn::Module& module, const ProcessGroup& group,
            const DistributedDataParallelOptions& options);
  DdpHandle(DdpHandle&&) noexcept;
  DdpHandle& operator=(DdpHandle&&) noexcept;
  ~DdpHandle();

  // True: the forward that follows is to be reduced, and its outputs are to be watched.
  bool before_forward();
  void after_forward(const std::vector<at::Tensor*>& outputs);

  DdpCore& core() const { return *core_; }

 private:
  std::unique_ptr<DdpCore> core_;
};

WEFT_API void ddp_no_sync(DdpCore& core, int change);
WEFT_API void ddp_next_iteration(DdpCore& core, int64_t number);
WEFT_API void ddp_comm_hook(DdpCore& core, CommHook hook);
WEFT_API void ddp_zero_grad(DdpCore& core, bool set_to_none);
WEFT_API void ddp_sync_buffers(DdpCore& core);
WEFT_API Joinable& ddp_joinable(DdpCore& core);
WEFT_API DdpSight ddp_sight(const DdpCore& core);
WEFT_API DdpLoggingData ddp_logging_data(const DdpCore& core);

}  // namespace internal

template <class M>
class DistributedDataParallel {
 public:
  // A holder, or a shared_ptr to a module.
  using Held = typename internal::HeldModule<M>::Held;

  // All ranks of the group make one, of equal modules, at the same time. Throws weft::Error:
  //   invalid_argument  modules or options differ, with names and ranks; no parameter that requires
  //                     grad; a name that the module does not have
  //   state             a parameter is in another DistributedDataParallel that lives
  //   and what operations of the group throw
  DistributedDataParallel(Held module, const ProcessGroup& group,
                          const DistributedDataParallelOptions& options = {})
      : module_(std::move(module)), handle_(*module_, group, options) {}

  // As the module's. Tensors among the results may be in optional, vector, array, map, pair, tuple.
  template <class... Args>
  auto forward(Args&&... args) {
    const bool reduced = handle_.before_forward();
    auto out = module_->forward(std::forward<Args>(args)...);
    if (reduced) {
      std::vector<at::Tensor*> tensors;
      internal::find_tensors(out, &tensors);
      handle_.after_forward(tensors);
    }
    return out;
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The module itself, for its state, and to evaluate it.
  const Held& module() const { return module_; }

  // While it lives, forwards are not reduced: their gradients stay here and add up.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(internal::DdpCore& core) : core_(core) { internal::ddp_no_sync(core_, 1); }
    ~NoSync() { internal::ddp_no_sync(core_, -1); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    internal::DdpCore& core_;
  };
  NoSync no_sync() { return NoSync(handle_.core()); }

  // The number of the next forward: 1, 2, 3, ..., each once, the same at all ranks for the same
  // step. Where several contexts are under way, the driver of the ranks gives them: they are
  // reduced in this order on every rank. Without numbers, forwards are counted here, and ranks
  // whose backwards begin in different orders get an error that says so.
  void iteration(int64_t number) { internal::ddp_next_iteration(handle_.core(), number); }

  // How buckets are reduced from now on (comm_hooks.h): the same on all ranks, once, before the
  // first backward. Throws weft::Error, state, later.
  void register_comm_hook(CommHook hook) {
    internal::ddp_comm_hook(handle_.core(), std::move(hook));
  }

  // To be used instead of the optimizer's with gradient_as_bucket_view: LibTorch's cannot detach a
  // gradient that lies in a bucket.
  void zero_grad(bool set_to_none = true) { internal::ddp_zero_grad(handle_.core(), set_to_none); }
  // Gives all ranks the buffers of rank 0, at once: before each evaluates its own part.
  void sync_buffers() { internal::ddp_sync_buffers(handle_.core()); }

  // For Join (join.h).
  internal::Joinable& joinable() { return internal::ddp_joinable(handle_.core()); }

  DdpSight sight() const { return internal::ddp_sight(handle_.core()); }  // counters
  // What the last reductions took, and what they were of. From any thread.
  DdpLoggingData logging_data() const { return internal::ddp_logging_data(handle_.core()); }

 private:
  Held module_;
  internal::DdpHandle handle_;
};

template <class Impl>
DistributedDataParallel(std::shared_ptr<Impl>, ProcessGroup, DistributedDataParallelOptions)
    -> DistributedDataParallel<Impl>;
template <class Impl>
DistributedDataParallel(std::shared_ptr<Impl>, ProcessGroup) -> DistributedDataParallel<Impl>;
template <class Holder>
DistributedDataParallel(Holder, ProcessGroup, DistributedDataParallelOptions)
    -> DistributedDataParallel<Holder>;
template <class Holder>
DistributedDataParallel(Holder, ProcessGroup) -> DistributedDataParallel<Holder>;

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_DISTRIBUTED_DATA_PARALLEL_H_
