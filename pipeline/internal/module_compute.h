#ifndef WEFT_PIPELINE_INTERNAL_MODULE_COMPUTE_H_
#define WEFT_PIPELINE_INTERNAL_MODULE_COMPUTE_H_

// ModuleCompute: the actions of a stage that is a module of this worker. Its method "forward" is
// called through the worker's library, with tensors in this process: it may take any number of
// tensors, or a list of them, and give one, a tuple or a list.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "weft/dist_optim/local_optimizer.h"
#include "weft/pipeline/internal/data_parallel.h"
#include "weft/pipeline/internal/split.h"
#include "weft/pipeline/internal/weight_versions.h"
#include "weft/pipeline/reducer.h"
#include "weft/pipeline/stage_compute.h"
#include "weft/pipeline/stage_optimizer.h"
#include "weft/rpc/worker.h"
#include "weft/rref/remote_module.h"

namespace weft::pipeline::internal {

// What a stage's forward draws begins with this: LibTorch's default generators of the CPU and of the
// stage's devices.
WEFT_API void seed_generator(uint64_t seed, int64_t step, int stage, int micro_batch,
                             const std::vector<c10::Device>& devices = {});

struct ModuleComputeOptions {
  int stage = 0;
  std::string loss{};       // of the last stage: a registered function; "": its output is the loss
  std::string optimizer{};  // "": none
  std::vector<double> optimizer_options{};
  // Instead of these; null, or giving null: these.
  std::function<std::shared_ptr<StageOptimizer>(std::vector<at::Tensor> parameters)>
      make_optimizer{};
  std::optional<uint64_t> seed{};
  int micro_batches = 1;
  bool asynchronous = false;  // backwards use the weights of their forwards
  bool reduces = false;       // the plan has a reduction of this stage
  std::shared_ptr<GradReducer> reducer{};
  std::vector<std::string> tied{};  // parameters that other stages have, too
  bool tied_elsewhere = false;      // an earlier stage counts their gradients
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
  Status weight_grads(int64_t step, const std::vector<int>& micro_batches,
                      absl::FunctionRef<Status(int micro_batch)> at) override;
  Status reduce(int64_t step, absl::Duration time_left) override;
  Status step(int64_t step) override;
  Status set_options(const std::vector<double>& options) override;
  StatusOr<double> squared_norm() override;
  Status scale_gradients(double factor) override;
  void skip_step() override;
  StatusOr<Tensors> tied_gradients() override;
  Status set_tied_gradients(Tensors sums) override;
  int64_t weight_versions() const override { return versions_ == nullptr ? 1 : versions_->kept(); }
  void cancel(const Status& why) override;
  void drop(const Status& why) override;

  // By name, as in state_dict(); those that have none are left out.
  weft::internal::LocalModule module() const { return module_; }
  std::map<std::string, at::Tensor> gradients() const;
  void zero_grad();
  // What the calling thread has queued for the module until now comes before later handlers and steps
  // (publish_here()).
  void publish() const;
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
    Tensors generators{};  // their states before a forward that is run again
    std::unique_ptr<SplitBackward> split{};
  };

  ModuleCompute(std::shared_ptr<const Worker> worker, weft::internal::LocalModule module,
                ModuleComputeOptions options);
  Status run(Live* live);
  Status check_trains(const Live& live) const;
  StatusOr<Tensors> roots(const Live& live, Tensors gradients) const;
  bool reduces() const { return options_.reducer != nullptr || hooks_ != nullptr; }
  // For a parameter that has its gradient of the step.
  void ready(const at::Tensor& parameter);
  void ended_one(const Key& key);
  std::unique_ptr<WeightVersions::Use> weights_of(const Key& key) const;

  const std::shared_ptr<const Worker> worker_;
  const weft::internal::LocalModule module_;
  const ModuleComputeOptions options_;
  const std::shared_ptr<void> object_;
  const Method* forward_ = nullptr;
  const Method* loss_ = nullptr;
  std::vector<at::Tensor> parameters_;
  const std::vector<c10::Device> devices_;  // of the module, but the CPU
  std::shared_ptr<StageOptimizer> optimizer_;
  std::map<Key, Live> live_;
  std::unique_ptr<DataParallelHooks> hooks_;  // null: no DistributedDataParallel
  std::unique_ptr<WeightVersions> versions_;  // null: of a synchronous plan
  std::vector<at::Tensor> tied_;
  int ended_ = 0;  // micro-batches of the step whose gradients are in
  std::set<const void*> ready_;
  Status reduced_;
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_MODULE_COMPUTE_H_
