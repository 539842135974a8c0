#ifndef WEFT_PIPELINE_INTERNAL_MODULE_COMPUTE_H_
#define WEFT_PIPELINE_INTERNAL_MODULE_COMPUTE_H_

// ModuleCompute: the actions of a stage that is a module of this worker. Its method "forward" is
// called through the worker's library, with tensors in this process: it may take any number of
// tensors, or a list of them, and give one, a tuple or a list.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/dist_optim/local_optimizer.h"
#include "weft/pipeline/internal/split.h"
#include "weft/pipeline/stage_compute.h"
#include "weft/rpc/worker.h"
#include "weft/rref/remote_module.h"

namespace weft::pipeline::internal {

// What a stage's forward draws begins with this: LibTorch's default generator of the CPU.
WEFT_API void seed_generator(uint64_t seed, int64_t step, int stage, int micro_batch);

struct ModuleComputeOptions {
  int stage = 0;
  std::string loss{};       // of the last stage: a registered function; "": its output is the loss
  std::string optimizer{};  // "": none
  std::vector<double> optimizer_options{};
  std::optional<uint64_t> seed{};
};

class ModuleCompute final : public StageCompute {
 public:
  // Kind invalid_argument when the module has no forward of tensors, or the loss is not registered.
  static StatusOr<std::shared_ptr<ModuleCompute>> make(std::shared_ptr<const Worker> worker,
                                                       weft::internal::LocalModule module,
                                                       ModuleComputeOptions options);

  StatusOr<Tensors> forward(ForwardCall call) override;
  Status recompute(int64_t step, int micro_batch) override;
  StatusOr<Tensors> backward(int64_t step, int micro_batch, Tensors gradients) override;
  StatusOr<Tensors> input_grad(int64_t step, int micro_batch, Tensors gradients) override;
  Status weight_grad(int64_t step, int micro_batch) override;
  Status step(int64_t step) override;
  void drop() override { live_.clear(); }

  // By name, as in state_dict(); those that have none are left out.
  weft::internal::LocalModule module() const { return module_; }
  std::map<std::string, at::Tensor> gradients() const;
  void zero_grad();
  // Copies of parameters and buffers by name, and under "optimizer/NAME/" what the optimizer keeps
  // of parameter NAME.
  std::map<std::string, at::Tensor> state() const;
  // The shape of each parameter and buffer, as a tensor of sizes.
  std::map<std::string, at::Tensor> shapes() const;
  // Nothing is changed when an error is returned.
  Status load_state(const std::map<std::string, at::Tensor>& state);

 private:
  using Key = std::pair<int64_t, int>;
  struct Live {  // of a micro-batch, from its forward to its backward
    ForwardCall call{};
    Tensors inputs{};   // leaves
    Tensors outputs{};  // with their graph; of the last stage the scaled loss
    at::Tensor loss{};
    std::unique_ptr<SplitBackward> split{};
  };

  ModuleCompute(std::shared_ptr<const Worker> worker, weft::internal::LocalModule module,
                ModuleComputeOptions options);
  StatusOr<Tensors> invoke(const Method& method, const std::shared_ptr<void>& object,
                           const Tensors& arguments) const;
  Status run(Live* live);
  StatusOr<Tensors> roots(const Live& live, Tensors gradients) const;

  const std::shared_ptr<const Worker> worker_;
  const weft::internal::LocalModule module_;
  const ModuleComputeOptions options_;
  const std::shared_ptr<void> object_;
  const Method* forward_ = nullptr;
  const Method* loss_ = nullptr;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<LocalOptimizer> optimizer_;
  std::map<Key, Live> live_;
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_MODULE_COMPUTE_H_
