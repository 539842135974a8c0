#include "weft/collectives/internal/ddp/replicas_backward.h"

#include <optional>
#include <utility>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "ATen/core/grad_mode.h"
#include "weft/common/error.h"

namespace weft::internal {

using torch::autograd::variable_list;

namespace {

// While it lives, hooks of these leaves do not run: what a replica finds is a part of a gradient, and
// hooks are to see the sum, when it reaches the leaf.
class WithoutHooks {
 public:
  explicit WithoutHooks(variable_list leaves) : leaves_(std::move(leaves)) {
    kept_.resize(leaves_.size());
    swap();
  }
  ~WithoutHooks() { swap(); }
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  void swap() {
    for (size_t i = 0; i < leaves_.size(); ++i) {
      torch::autograd::impl::hooks(leaves_[i]).swap(kept_[i]);
    }
  }
  const variable_list leaves_;
  std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> kept_;
};

}  // namespace

variable_list ReplicasBackward::apply(variable_list&& grads) {
  if (c10::GradMode::is_enabled()) {
    throw_error(make_error(ErrorKind::kUnimplemented,
                           "DataParallel has no second derivative: backward(create_graph)"));
  }
  if (graphs_.empty()) {
    throw_error(make_error(ErrorKind::kState,
                           "a second backward through a forward of DataParallel, whose graph has "
                           "been freed: give the first one retain_graph"));
  }
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  std::vector<variable_list> found(graphs_.size());
  // Replica 0 is the module itself.
  std::optional<WithoutHooks> quiet;
  if (on_.front() == 0) quiet.emplace(graphs_.front().parameters);
  const auto backward = [&](size_t c) {
    const ReplicaGraph& graph = graphs_[c];
    variable_list outputs;
    variable_list given;
    for (size_t i = 0; i < graph.outputs.size(); ++i) {
      const at::Tensor& grad = grads[graph.output_numbers[i]];
      if (!grad.defined()) continue;
      outputs.push_back(graph.outputs[i]);
      given.push_back(grad);
    }
    variable_list inputs = graph.parameters;
    inputs.insert(inputs.end(), graph.inputs.begin(), graph.inputs.end());
    if (outputs.empty() || inputs.empty()) {
      found[c].resize(inputs.size());
      return;
    }
    found[c] = torch::autograd::grad(outputs, inputs, given, keep, /*create_graph=*/false,
                                     /*allow_unused=*/true);
  };
  // LibTorch has one thread for each device. This runs on that of the first device that is none of the
  // CPU's, if there is one, and what waits here keeps it from the replica there: so that one runs here.
  size_t mine = 0;
  while (mine < on_.size() && threads_->device(on_[mine]).is_cpu()) ++mine;
  threads_->run(on_, backward, mine < on_.size() ? mine : 0);
  quiet.reset();
  // In the order of the replicas; one that has not used a parameter gives nothing for it.
  const size_t parameters = graphs_.front().parameters.size();
  variable_list out(parameters);
  for (variable_list& one : found) {
    for (size_t i = 0; i < parameters; ++i) {
      if (!one[i].defined()) continue;
      const at::Tensor here = one[i].to(threads_->device(0));
      out[i] = out[i].defined() ? out[i].add(here) : here;
    }
    for (size_t i = parameters; i < one.size(); ++i) out.push_back(std::move(one[i]));
  }
  return out;
}

}  // namespace weft::internal
