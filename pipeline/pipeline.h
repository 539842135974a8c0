#ifndef WEFT_PIPELINE_PIPELINE_H_
#define WEFT_PIPELINE_PIPELINE_H_

// Pipeline: a model whose stages live at several workers, trained by a plan. Every worker runs its
// own list of actions; results and gradients go from worker to worker; the maker of the
// pipeline says when a step begins and hears how it ended.
//
//   weft::Library lib("app");                       // at every worker
//   weft::module_<Half>(lib, "Half").constructor<int64_t>().def("forward", &HalfImpl::forward);
//   lib.def("loss", &loss);                         // (output, target) -> scalar
//
//   weft::RemoteModule<Half> a(worker, "w0", 1), b(worker, "w1", 2);
//   weft::pipeline::Pipeline pipeline(worker, {a, b}, weft::pipeline::one_f_one_b(2, 8),
//       {.loss = "app.loss", .optimizer = weft::optimizer_choice<weft::optim::SGD>({.lr = 0.1})});
//   const auto result = pipeline.step({x}, y);      // result.loss
//
// A batch is cut along its first dimension into as many micro-batches as the plan has, the last
// ones smaller by one when it does not divide; each has its part of the loss (its share of the
// batch with Reduction::kMean). Gradients equal those of one process that sums the same
// micro-batches in the same order.
//
// An error anywhere ends the pipeline: every step that has begun ends with it, naming worker,
// stage, micro-batch and action, and so does every later one. While a step runs, nobody else calls
// the modules. Any thread; steps run in the order in which they were begun.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/common/time.h"
#include "weft/dist_optim/local_optimizer.h"
#include "weft/pipeline/plan.h"
#include "weft/pipeline/stage_compute.h"
#include "weft/rpc/worker.h"

namespace weft {
template <class M>
class RemoteModule;
}

namespace weft::pipeline {

// A module that is one stage.
class Stage {
 public:
  template <class M>
  Stage(const RemoteModule<M>& module)  // NOLINT(google-explicit-constructor)
      : owner_([module] { return module.owner(); }), hand_over_([module](int64_t key) {
          return module.rpc_async(&RemoteModule<M>::Served::remote_host, key);
        }) {}
  // What stands at a worker whose service makes its own computing (tests).
  explicit Stage(WorkerInfo owner) : owner_([owner] { return owner; }) {}

  WorkerInfo owner() const { return owner_(); }
  Future<void> hand_over(int64_t key) const {
    return hand_over_ == nullptr ? Future<void>::ready({}) : hand_over_(key);
  }

 private:
  std::function<WorkerInfo()> owner_;
  std::function<Future<void>(int64_t)> hand_over_;
};

enum class Reduction : uint8_t {
  kMean,  // of the batch: a micro-batch counts by its share of it
  kSum,   // of the micro-batches' losses
};

struct PipelineOptions {
  // A function (tensor output, tensor target) -> scalar that the last stage's worker has
  // registered; "": what the last stage gives is the loss.
  std::string loss{};
  Reduction reduction = Reduction::kMean;
  // Each stage steps its own parameters after its last gradient. Without a name none does, and
  // gradients are summed up until zero_grad().
  OptimizerChoice optimizer{};
  // Random numbers of a forward become a function of (seed, step, stage, micro-batch).
  std::optional<uint64_t> seed{};
  // Of each step, from its beginning at each worker.
  Timeout deadline = absl::Seconds(60);
  // Live activations that a worker may hold; 0: any number.
  int64_t memory_cap = 0;
  // Start and end of every action, in StepResult::times.
  bool record = false;
};

struct StepResult {
  double loss = 0;
  std::vector<double> losses{};             // by micro-batch
  std::vector<int64_t> peak_activations{};  // by worker of the plan
  // By worker of the plan: start and end of each of its actions, in ns of its clock.
  std::vector<std::vector<int64_t>> times{};
};

class WEFT_API Pipeline {
 public:
  // Proves the plan, hands the modules over, and connects the workers. Throws weft::Error: kind
  // invalid_argument for a plan that is refused, or stages that do not fit it; the errors of the
  // workers, with the stage or worker that they are of.
  Pipeline(const Worker& worker, std::vector<Stage> stages, Plan plan,
           PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // One step over a batch, whose inputs go to the first stage and whose target to the last one.
  // Throws weft::Error: kind invalid_argument for a batch that is smaller than the micro-batches
  // are many, or inputs and targets of different lengths; otherwise what ended the pipeline.
  StepResult step(const Tensors& inputs, const at::Tensor& target);
  Future<StepResult> step_async(const Tensors& inputs, const at::Tensor& target);
  // The same with micro-batches as they are: their shapes may differ. `weights`: what each one's
  // loss is multiplied by.
  Future<StepResult> step_async(std::vector<Tensors> inputs, std::vector<at::Tensor> targets,
                                std::vector<double> weights);

  // The gradients of a stage by name, as summed since its last step. Between steps.
  std::map<std::string, at::Tensor> gradients(int stage) const;
  void zero_grad() const;
  // A stage as it is between steps: its parameters and buffers by name, and under "optimizer/" what
  // its optimizer keeps. Loaded into the same stage of another pipeline, at whatever worker, training
  // goes on as if nothing had happened. Throws weft::Error, kind invalid_argument, naming what is
  // missing, unknown or of another shape; nothing of the stage is changed then.
  std::map<std::string, at::Tensor> state_dict(int stage) const;
  void load_state_dict(int stage, const std::map<std::string, at::Tensor>& state) const;

  const Plan& plan() const;
  // OK, or what ended the pipeline, as far as it is known here.
  Status status() const;
  // Ends it at all workers; idempotent. The destructor does so without waiting.
  void close();

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_PIPELINE_H_
