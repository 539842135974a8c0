#ifndef WEFT_PIPELINE_PIPELINE_H_
#define WEFT_PIPELINE_PIPELINE_H_

// Pipeline: a model whose stages live at several workers, trained by a plan. Every worker runs its
// own list of actions; results and gradients go from worker to worker; the worker that made the
// pipeline (its maker) begins each step and receives its result.
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
// stage, micro-batch and action, and so does every later one. While a step runs, no other code
// calls the modules. Any thread; steps run in the order in which they were begun.

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
#include "weft/dist_optim/rates.h"
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
  // For tests: a stage at a worker whose service brings its own computation.
  explicit Stage(WorkerInfo owner) : owner_([owner] { return owner; }) {}

  WorkerInfo owner() const { return owner_(); }  // where it lives
  // For Pipeline: makes the module known to the pipeline's service at its worker, under `key`.
  Future<void> hand_over(int64_t key) const {
    return hand_over_ == nullptr ? Future<void>::ready({}) : hand_over_(key);
  }

 private:
  std::function<WorkerInfo()> owner_;
  std::function<Future<void>(int64_t)> hand_over_;
};

enum class Reduction : uint8_t {  // how a batch's loss is made of those of its micro-batches
  kMean,                          // their mean, each weighted by its share of the batch
  kSum,                           // their sum
};

struct PipelineOptions {  // how a pipeline runs
  // A function (tensor output, tensor target) -> scalar that the last stage's worker has
  // registered; "": the output of the last stage is the loss.
  std::string loss{};
  Reduction reduction = Reduction::kMean;
  // For each stage, the names of the parameters that it shares with the other stages of its group
  // in Plan::tied, in the same order. They begin with the values of the group's first stage, and
  // step with the sum of all their gradients. with_tied() makes such plans.
  std::map<int, std::vector<std::string>> tied{};
  // The optimizer with which each stage steps its own parameters after its last gradient. Without a
  // name no stage steps, and gradients are summed up until zero_grad().
  OptimizerChoice optimizer{};
  // Gradients are scaled down so that their norm over all stages is at most this; 0: they are not.
  double clip_norm = 0;
  // Skips a step in which that norm is not finite: parameters stay, gradients are dropped
  // (StepResult::skipped). This option and clip_norm put a barrier before the steps of all stages:
  // none steps before the last gradient of the last stage exists. They require an optimizer and a
  // synchronous plan.
  bool skip_not_finite = false;
  // Makes the random numbers of a forward a function of (seed, step, stage, micro-batch).
  std::optional<uint64_t> seed{};
  // Deadline of each step, from its beginning at each worker.
  Timeout deadline = absl::Seconds(60);
  // Live activations that a worker may hold; 0: any number.
  int64_t memory_cap = 0;
  // Records start and end of every action, in StepResult::times.
  bool record = false;
  // After each step every worker keeps its stages' state, and a neighbour keeps a copy of it (of
  // the last two steps), from which rebuild() continues. A step ends when its copies exist. Costs
  // three more times the memory of parameters and optimizer, and a message of their size per step.
  bool keep_copies = false;
  // Number of the first step, for a pipeline that continues an earlier one: random numbers depend
  // on step numbers.
  int64_t first_step = 0;
};

struct CheckpointOptions {  // names of tensors in checkpoints
  // Returns the name of a stage's tensor in the checkpoint, from the stage and the name in its
  // state_dict(); the result must not depend on which stage has the layer. Null: the name in
  // state_dict(), for modules that give a layer the same name in every partition. layer_names()
  // makes such a function for stages that number their layers from 0.
  std::function<std::string(int stage, const std::string& name)> layer_name{};
};

struct RebuildOptions {  // from where a pipeline continues
  // Another plan over the same stages and edges: with fewer workers, for example.
  std::optional<Plan> plan{};
  // The state of each stage as state_dict() returned it after `steps` steps; without it the copies
  // of keep_copies are used.
  std::function<std::map<std::string, at::Tensor>(int stage)> state{};
  int64_t steps = 0;
  // A checkpoint to go back to when the copies are lost, or none are kept; "": none.
  std::string checkpoint{};
  CheckpointOptions checkpoint_options{};
};

struct StepResult {  // of one step
  double loss = 0;
  std::vector<double> losses{};             // by micro-batch
  std::vector<int64_t> peak_activations{};  // by worker of the plan
  std::vector<int64_t> weight_versions{};   // the same: most at a time; 1 in synchronous plans
  // By worker of the plan: start and end of each of its actions, in ns of its clock.
  std::vector<std::vector<int64_t>> times{};
  std::vector<Tensors> outputs{};  // of forward_async(), by micro-batch
  double grad_norm = 0;            // before it was clipped; with clip_norm or skip_not_finite
  bool skipped = false;            // because of skip_not_finite
};

class WEFT_API Pipeline {
 public:
  // Verifies the plan, hands the modules over, and connects the workers. Throws weft::Error: kind
  // invalid_argument for a plan that is refused, or stages that do not fit it; errors of workers,
  // with the stage or worker where they occurred.
  Pipeline(const Worker& worker, std::vector<Stage> stages, Plan plan,
           PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Runs one step over a batch, whose inputs go to the first stage and whose target to the last
  // one. Throws weft::Error: kind invalid_argument for a batch with fewer rows than there are
  // micro-batches, or for inputs and targets of different lengths; otherwise the error that ended
  // the pipeline.
  StepResult step(const Tensors& inputs, const at::Tensor& target);
  Future<StepResult> step_async(const Tensors& inputs, const at::Tensor& target);
  // The same with given micro-batches, whose shapes may differ. `weights`: factors of their losses.
  Future<StepResult> step_async(std::vector<Tensors> inputs, std::vector<at::Tensor> targets,
                                std::vector<double> weights);

  // Runs forwards only, and returns the last stage's outputs, merged in the order of the batch.
  // Nothing is kept for a backward, no loss is computed, and micro-batches stream: with many of
  // them, or many calls of forward_async(), the slowest stage never waits. Uses up a step's number.
  // Throws as step() does.
  Tensors forward(const Tensors& inputs);
  // The same with given micro-batches; returns the outputs by micro-batch.
  Future<std::vector<Tensors>> forward_async(std::vector<Tensors> inputs);

  // Returns the gradients of a stage by name, summed since its last step. Call it between steps.
  std::map<std::string, at::Tensor> gradients(int stage) const;
  // Clears the gradients of all stages. Call it between steps.
  void zero_grad() const;
  // Return and replace the state of a stage between steps: its parameters and buffers by name, and
  // under "optimizer/NAME/" the optimizer's state of parameter NAME. Loaded into the same stage of
  // another pipeline, at whatever worker, training continues as if nothing had happened. Throws
  // weft::Error, kind invalid_argument, naming what is missing, unknown or of another shape; then
  // nothing of the stage is changed.
  std::map<std::string, at::Tensor> state_dict(int stage) const;
  void load_state_dict(int stage, const std::map<std::string, at::Tensor>& state) const;

  // Writes the state of all stages between two steps, by layer, to files of the calling process:
  // one in the safetensors format per stage, "PATH-step120-0-stage3.safetensors", and last `path`
  // itself, which is replaced atomically. Then the files of the previous checkpoint are removed.
  // Throws weft::Error: kind state while a step is under way; invalid_argument for two layers of
  // one name; otherwise the error of the file system or of a worker.
  void save_checkpoint(std::string_view path, const CheckpointOptions& options = {}) const;
  // Loads a checkpoint of any pipeline over the same layers, however they are divided into stages.
  // Returns the number of the next step, which continues that of the checkpoint. Throws
  // weft::Error, kind invalid_argument, for a checkpoint that is truncated, or naming a layer that
  // is missing, that no stage takes, or that has another shape; then nothing is loaded.
  int64_t load_checkpoint(std::string_view path, const CheckpointOptions& options = {});

  // Continues after the loss of workers, without a restart of the others. `replace` returns a new
  // stage for one whose worker is gone: a module made anew at another worker, at one that was
  // restarted, or at one that has a stage already. Every stage gets the state of the last step
  // whose result was returned (or of a later one, if several were under way and that state is no
  // longer kept). Returns the number of the step after it, which comes next: begin steps from this
  // number on again. May also be called without a loss; it then ends the steps that run. Throws
  // weft::Error: kind state when the state of a stage is lost with all of its copies, or none was
  // kept, and no checkpoint is given; deadline for a worker that neither answers nor is known to be
  // gone; what the constructor throws. After an error the pipeline is still ended, and may be
  // rebuilt again.
  int64_t rebuild(const std::function<Stage(int stage)>& replace,
                  const RebuildOptions& options = {});
  // Returns the learning rate and the other options of PipelineOptions::optimizer, one group for
  // all stages, for schedules: a change holds for all steps that are begun later. Its setters throw
  // weft::Error, kind invalid_argument, for a value that the optimizer refuses. The object lives as
  // long as the pipeline, also through rebuild(); without an optimizer it has no group.
  Rates& rates();
  // Returns the number of the next step.
  int64_t next_step() const;

  const Plan& plan() const;
  // Returns OK, or the error that ended the pipeline, as far as it is known here.
  Status status() const;
  // Ends the pipeline at all workers; idempotent. The destructor does the same without waiting.
  void close();

 private:
  class State;
  std::shared_ptr<State> state_;
};

// Makes a CheckpointOptions::layer_name for stages whose modules number their layers from 0
// ("0.weight", as torch::nn::Sequential does). Stage s begins with layer begins[s] of the whole
// model (Partition::begins): with begins[s] = 3, its "1.weight" is called "layer4.weight".
WEFT_API CheckpointOptions layer_names(std::vector<int> begins, std::string prefix = "layer");

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_PIPELINE_H_
