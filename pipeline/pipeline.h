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
  // What stands at a worker whose service makes its own computing (tests).
  explicit Stage(WorkerInfo owner) : owner_([owner] { return owner; }) {}

  WorkerInfo owner() const { return owner_(); }  // where it lives
  Future<void> hand_over(int64_t key) const {    // for Pipeline
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

struct PipelineOptions {  // how a pipeline runs
  // A function (tensor output, tensor target) -> scalar that the last stage's worker has
  // registered; "": what the last stage gives is the loss.
  std::string loss{};
  Reduction reduction = Reduction::kMean;
  // By stage: the parameters that are one weight with those of the other stages of its group in
  // Plan::tied, in the same order. They begin with the values of the group's first stage, and step with
  // the sum of all their gradients. with_tied() makes such plans.
  std::map<int, std::vector<std::string>> tied{};
  // Each stage steps its own parameters after its last gradient. Without a name none does, and
  // gradients are summed up until zero_grad().
  OptimizerChoice optimizer{};
  // Gradients are scaled down so that their norm over all stages is at most this; 0: they are not.
  double clip_norm = 0;
  // A step in which that norm is no finite number is left out: parameters stay, gradients are dropped
  // (StepResult::skipped). This and clip_norm put a barrier before the steps of all stages: none steps
  // before the last gradient of the last stage is there. They need an optimizer and a synchronous plan.
  bool skip_not_finite = false;
  // Random numbers of a forward become a function of (seed, step, stage, micro-batch).
  std::optional<uint64_t> seed{};
  // Deadline of each step, from its beginning at each worker.
  Timeout deadline = absl::Seconds(60);
  // Live activations that a worker may hold; 0: any number.
  int64_t memory_cap = 0;
  // Start and end of every action, in StepResult::times.
  bool record = false;
  // After each step every worker keeps its stages' state, and a neighbour a copy of it (of the last
  // two steps): what rebuild() goes on from. A step has ended when its copies are there. Costs three
  // more times the memory of parameters and optimizer, and a message of their size per step.
  bool keep_copies = false;
  // Number of the first step, of which random numbers are a function: of a pipeline that goes on.
  int64_t first_step = 0;
};

struct CheckpointOptions {  // names of tensors in checkpoints
  // What a tensor of a stage is called in the checkpoint, whichever stage has its layer: a function
  // of the stage and the name in its state_dict(). Null: that name, for modules that give a layer
  // the same name in every partition. layer_names() makes one for stages that number their layers
  // from 0.
  std::function<std::string(int stage, const std::string& name)> layer_name{};
};

struct RebuildOptions {  // from where a pipeline goes on
  // Another plan over the same stages and edges: with fewer workers, for example.
  std::optional<Plan> plan{};
  // The state of each stage as state_dict() gave it after `steps` steps; without it the copies of
  // keep_copies are taken.
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
  std::vector<int64_t> weight_versions{};   // the same: most at a time, 1 of synchronous plans
  // By worker of the plan: start and end of each of its actions, in ns of its clock.
  std::vector<std::vector<int64_t>> times{};
  std::vector<Tensors> outputs{};  // of forward_async(), by micro-batch
  double grad_norm = 0;            // before it was clipped; with clip_norm or skip_not_finite
  bool skipped = false;            // by skip_not_finite
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

  // Forwards alone: the last stage's outputs, merged in the order of the batch. Nothing is kept for a
  // backward, no loss is computed, and micro-batches stream: with many of them, or many calls of
  // forward_async(), the slowest stage never waits. Takes a step's number. Throws as step() does.
  Tensors forward(const Tensors& inputs);
  // By micro-batch, with micro-batches as they are.
  Future<std::vector<Tensors>> forward_async(std::vector<Tensors> inputs);

  // The gradients of a stage by name, as summed since its last step. Between steps.
  std::map<std::string, at::Tensor> gradients(int stage) const;
  void zero_grad() const;
  // A stage as it is between steps: its parameters and buffers by name, and under "optimizer/NAME/"
  // what its optimizer keeps of parameter NAME. Loaded into the same stage of another pipeline, at whatever worker, training
  // goes on as if nothing had happened. Throws weft::Error, kind invalid_argument, naming what is
  // missing, unknown or of another shape; nothing of the stage is changed then.
  std::map<std::string, at::Tensor> state_dict(int stage) const;
  void load_state_dict(int stage, const std::map<std::string, at::Tensor>& state) const;

  // All stages between two steps, by layer, as files that the maker's process writes: `path` itself,
  // replaced in one step and last, and a file in the safetensors format per stage beside it,
  // "PATH-step120-0-stage3.safetensors". Those of the checkpoint before are removed then. Throws weft::Error: kind
  // state while a step is under way; invalid_argument for two layers of one name; otherwise what
  // the file system or a worker says.
  void save_checkpoint(std::string_view path, const CheckpointOptions& options = {}) const;
  // From a checkpoint of any pipeline over the same layers, divided in whatever way: the next step
  // then has the number that it had there. Returns it. Throws weft::Error, kind invalid_argument,
  // for a checkpoint that is cut, that misses a layer or has one that no stage takes, or with a layer
  // of another shape, named; nothing is loaded then.
  int64_t load_checkpoint(std::string_view path, const CheckpointOptions& options = {});

  // After the loss of workers: goes on without a restart of the others. `replace` gives what takes
  // the place of a stage whose worker is gone: a module made anew at another worker, at one that was
  // restarted, or at one that has a stage already. Every stage gets the state of the last step whose result was
  // given (or of a later one, if several were under way and that state is no longer kept), and the
  // step after it comes next, as if nothing had happened. Returns its number: what was begun from
  // it on is to be begun again. Also without a loss: it ends what runs then.
  // Throws weft::Error: kind state when the state of a stage is lost with all of its copies, or none
  // was kept, and no checkpoint is given; deadline for a worker that neither answers nor is known to be gone; what making a
  // pipeline throws. The pipeline stays as it was then, ended, and may be rebuilt again.
  int64_t rebuild(const std::function<Stage(int stage)>& replace,
                  const RebuildOptions& options = {});
  // The rate and the other options of PipelineOptions::optimizer, one group for all stages, for
  // schedules: what is set is for all steps that are begun later. Throws weft::Error, kind
  // invalid_argument, for a value that the optimizer refuses. Lives as long as the pipeline, also
  // through rebuild(); without an optimizer it has no group.
  Rates& rates();
  // Number of the step that comes next.
  int64_t next_step() const;

  const Plan& plan() const;
  // OK, or what ended the pipeline, as far as it is known here.
  Status status() const;
  // Ends it at all workers; idempotent. The destructor does so without waiting.
  void close();

 private:
  class State;
  std::shared_ptr<State> state_;
};

// For stages whose modules number their layers from 0 ("0.weight", as torch::nn::Sequential does):
// stage s begins with layer begins[s] of the whole model (Partition::begins), and "1.weight" of it is
// called "layer4.weight" if that is 3.
WEFT_API CheckpointOptions layer_names(std::vector<int> begins, std::string prefix = "layer");

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_PIPELINE_H_
