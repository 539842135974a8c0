#ifndef WEFT_COLLECTIVES_DDP_DATA_PARALLEL_H_
#define WEFT_COLLECTIVES_DDP_DATA_PARALLEL_H_

// DataParallel<M>, BalancedDataParallel<M>: one process, several devices. Each batch is divided among
// replicas of a module, one per device, which run forward and backward at the same time; gradients
// are added up onto the module's own parameters.
//
//   Net net;
//   weft::DataParallel parallel(net, {.device_ids = {{at::kCUDA, 0}, {at::kCUDA, 1}}});
//   auto loss = at::cross_entropy_loss(parallel.forward(x), y);    // x is divided along dim 0
//   loss.backward();
//   optimizer.step();                                    // of net->parameters()
//
// On CPUs a device may be given several times: `{at::kCPU, at::kCPU}` makes two replicas, which share
// the parameters' memory. Replica 0 is the module itself, on the first device: running statistics
// are its own, and the other replicas begin each forward with its buffers. They are made by the
// module's clone().
//
// What a forward takes and returns: tensors, also in optional, vector, array, map, pair and tuple, are
// divided and joined along `dim`; a result without dimensions (a loss for each replica) becomes a
// vector of one value per replica; other arguments are copied to all. The gradient of a parameter is
// the sum over the replicas, in their order, so that equal runs give equal bits: a mean over the
// joined output gives that of one device, whatever the sizes of the chunks. A mean for each replica
// has to be weighted by its share of the batch, as step() does.
//
// No second derivative: backward(create_graph) is an error. Calls to other workers inside of a
// replica's forward are not followed by a distributed backward.
//
// Threads: one forward or backward at a time; each replica but the first has a thread of its own. Intra-op threads
// are not divided among them: set OMP_NUM_THREADS to the cores per replica.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "weft/collectives/ddp/tensors_in.h"
#include "weft/common/api.h"
#include "weft/common/runtime.h"

namespace torch::nn {
class Module;
}

namespace weft {

struct DataParallelOptions {  // how replicas are made
  // One replica on each; parameters and buffers of the module are on the first. Default: every CUDA
  // device; where there is none, the module alone.
  std::vector<at::Device> device_ids{};
  // Device of a forward's result; default: the first of device_ids.
  std::optional<at::Device> output_device{};
  int64_t dim = 0;
  std::shared_ptr<Runtime> runtime{};  // default: the system's
};

// The lengths of the chunks of a batch, as at::chunk makes them: ceil(batch / devices) each, as long
// as there are samples; one of 0 for an empty batch.
WEFT_API std::vector<int64_t> even_chunks(int64_t batch, int64_t devices);
// One length per device: `first` for the first one, which also holds outputs and loss, the others
// evenly; 0: no forward there. As even_chunks() where `first` is not below the others' share.
WEFT_API std::vector<int64_t> balanced_chunks(int64_t batch, int64_t first, int64_t devices);

namespace internal {

// The part of DataParallel that does not depend on the module's type.
class WEFT_API Replicas {
 public:
  struct Chunk {
    size_t replica = 0;
    int64_t begin = 0;
    int64_t length = 0;
  };
  using Tensors = std::vector<at::Tensor*>;

  Replicas(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options,
           std::optional<int64_t> first_chunk);
  Replicas(Replicas&&) noexcept;
  Replicas& operator=(Replicas&&) noexcept;
  ~Replicas();

  size_t devices() const;
  // How a batch with these tensors is divided.
  std::vector<Chunk> divide(const Tensors& inputs) const;
  // Gives chunk c its part of each tensor.
  void scatter(const std::vector<Chunk>& chunks, const Tensors& inputs,
               const std::vector<Tensors>& parts) const;
  // Calls `forward(c, replica)` for each chunk, at the same time; it adds its results to outputs[c].
  void apply(const std::vector<Chunk>& chunks, const std::vector<Tensors>& parts,
             std::vector<Tensors>* outputs,
             absl::FunctionRef<void(size_t c, torch::nn::Module& replica)> forward);
  // Joins the results of all chunks in those of the first one.
  void gather(const std::vector<Tensors>& outputs) const;
  // The mean of one loss per chunk, weighted by their lengths.
  at::Tensor weighted(const std::vector<Chunk>& chunks, const at::Tensor& losses) const;

 private:
  class Core;
  std::unique_ptr<Core> core_;
};

template <class T>
void find_tensors_if_any(T& value, std::vector<at::Tensor*>* out) {
  if constexpr (requires { find_tensors(value, out); }) find_tensors(value, out);
}

}  // namespace internal

template <class M>
class DataParallel {
 public:
  // A holder, or a shared_ptr to a module.
  using Held = typename internal::HeldModule<M>::Held;
  using Module = std::decay_t<decltype(*std::declval<Held&>())>;

  // Throws weft::Error, invalid_argument: a device twice that is no CPU, a parameter or buffer that
  // is not on the first device, by name.
  explicit DataParallel(Held module, const DataParallelOptions& options = {})
      : DataParallel(std::move(module), std::nullopt, options) {}

  // As the module's. Throws weft::Error: invalid_argument, tensors that differ in their length along
  // `dim`, or a module without clone(); user, what a replica's forward has thrown, with its number
  // and device.
  template <class... Args>
  auto forward(const Args&... args) {
    const auto call = [](Module& replica, auto&... own) { return replica.forward(own...); };
    if (replicas_.devices() == 1) return module_->forward(args...);
    return run(call, nullptr, args...);
  }
  template <class... Args>
  auto operator()(const Args&... args) {
    return forward(args...);
  }

  // Forward, loss and backward at each replica: `loss_of(replica, args...)` gives the mean loss of its
  // chunk, without dimensions. Adds to `.grad` what a backward of the loss over the whole batch
  // adds, and returns that loss.
  template <class F, class... Args>
  at::Tensor step(F&& loss_of, const Args&... args) {
    std::vector<internal::Replicas::Chunk> chunks;
    const at::Tensor losses = run(loss_of, &chunks, args...);
    const at::Tensor loss = replicas_.weighted(chunks, losses);
    loss.backward();
    return loss.detach();
  }

  const Held& module() const { return module_; }

 protected:
  DataParallel(Held module, std::optional<int64_t> first_chunk, const DataParallelOptions& options)
      : module_(std::move(module)), replicas_(shared(module_), options, first_chunk) {}

 private:
  template <class H>
  static std::shared_ptr<torch::nn::Module> shared(const H& held) {
    if constexpr (requires { held.ptr(); }) {
      return held.ptr();
    } else {
      return held;
    }
  }

  template <class F, class... Args>
  auto run(F& call, std::vector<internal::Replicas::Chunk>* divided, const Args&... args) {
    using Result = std::decay_t<std::invoke_result_t<F&, Module&, std::decay_t<const Args&>&...>>;
    using Tensors = internal::Replicas::Tensors;
    using Arguments = std::tuple<std::decay_t<const Args&>...>;
    const auto tensors_in = [](Arguments& values) {
      Tensors found;
      std::apply([&](auto&... one) { (internal::find_tensors_if_any(one, &found), ...); }, values);
      return found;
    };
    Arguments whole(args...);
    const Tensors inputs = tensors_in(whole);
    const std::vector<internal::Replicas::Chunk> chunks = replicas_.divide(inputs);
    std::vector<Arguments> own(chunks.size(), whole);
    std::vector<Tensors> parts;
    for (Arguments& one : own) parts.push_back(tensors_in(one));
    replicas_.scatter(chunks, inputs, parts);
    std::vector<std::optional<Result>> results(chunks.size());
    std::vector<Tensors> outputs(chunks.size());
    replicas_.apply(chunks, parts, &outputs, [&](size_t c, torch::nn::Module& replica) {
      results[c].emplace(std::apply(
          [&](auto&... one) { return call(dynamic_cast<Module&>(replica), one...); }, own[c]));
      internal::find_tensors(*results[c], &outputs[c]);
    });
    replicas_.gather(outputs);
    if (divided != nullptr) *divided = chunks;
    return *std::move(results[0]);
  }

  Held module_;
  internal::Replicas replicas_;
};

// The first device, which also holds outputs, loss and gradients, gets `first_chunk` samples of each
// batch (balanced_chunks()).
template <class M>
class BalancedDataParallel : public DataParallel<M> {
 public:
  using typename DataParallel<M>::Held;

  // Also throws weft::Error, invalid_argument: first_chunk below 0.
  BalancedDataParallel(Held module, int64_t first_chunk, const DataParallelOptions& options = {})
      : DataParallel<M>(std::move(module), std::optional<int64_t>(first_chunk), options) {}
};

template <class Impl>
DataParallel(std::shared_ptr<Impl>, DataParallelOptions) -> DataParallel<Impl>;
template <class Impl>
DataParallel(std::shared_ptr<Impl>) -> DataParallel<Impl>;
template <class Holder>
DataParallel(Holder, DataParallelOptions) -> DataParallel<Holder>;
template <class Holder>
DataParallel(Holder) -> DataParallel<Holder>;
template <class Impl>
BalancedDataParallel(std::shared_ptr<Impl>, int64_t, DataParallelOptions)
    -> BalancedDataParallel<Impl>;
template <class Holder>
BalancedDataParallel(Holder, int64_t, DataParallelOptions) -> BalancedDataParallel<Holder>;

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_DATA_PARALLEL_H_
