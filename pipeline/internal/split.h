#ifndef WEFT_PIPELINE_INTERNAL_SPLIT_H_
#define WEFT_PIPELINE_INTERNAL_SPLIT_H_

// SplitBackward: the backward of one graph in two parts that equal the whole bit for bit: the
// gradients of the inputs now, those of the weights later.
//
//   SplitBackward split(outputs, inputs);
//   std::vector<at::Tensor> dx = split.input_grads(dy);   // send them
//   split.weight_grads();                                 // into .grad() of the parameters
//
// Note [Intermediates]: nodes on a path to an input are marked. A marked node with an edge into a
// part of the graph that ends in parameters is an intermediate; while the first part runs, a hook
// keeps the gradients that reach it. The second part runs from each intermediate into its own
// parameters only, in the order in which the first part met them: one call for all of them would
// run along the marked paths again. A parameter of two intermediates belongs to the first part,
// since it can be reached from one through the other; there LibTorch sums its gradients itself.
// A stage none of whose inputs has a gradient has no first part: all of it is the weights'.
//
// One thread. The graph is used up after weight_grads().

#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "torch/csrc/autograd/edge.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::pipeline::internal {

// Adds what a backward has found to the parameter's gradient.
void add_to_grad(const at::Tensor& parameter, const at::Tensor& gradient);

// A backward in one part that runs no accumulator's hook. One gradient per input.
std::vector<at::Tensor> whole_backward(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       const std::vector<at::Tensor>& gradients,
                                       const std::vector<at::Tensor>& parameters);

class WEFT_API SplitBackward {
 public:
  // Inputs are leaves of the graph, or without a gradient.
  SplitBackward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  ~SplitBackward();

  // One per input. `gradients`: one per output; undefined ones count as nothing.
  std::vector<at::Tensor> input_grads(const std::vector<at::Tensor>& gradients);
  // `on_ready`: with each parameter, when it has its gradient.
  using OnReady = std::function<void(const at::Tensor& parameter)>;
  // On the calling thread, and while the rest is computed; of a stage without a first part they come at
  // the end when they are on another device, or when an accumulator has a hook, which is not to run.
  void weight_grads(const OnReady& on_ready = nullptr);
  // Those of several graphs over the same parameters: part after part, and within a part graph after graph,
  // so that the first parameters have all of their gradient long before the last. Each sum has its terms in
  // the order of the graphs, as if these came one after the other; they do where their parts differ, or where
  // there is no first part. `at`: before anything of graph number k is computed; its error ends it.
  static Status weight_grads(const std::vector<SplitBackward*>& graphs, const OnReady& on_ready,
                             absl::FunctionRef<Status(size_t graph)> at);

 private:
  struct Intermediate;
  struct Hook;
  struct Phase;
  void find_intermediates();
  void weight_grads_of(Intermediate* one);
  void all_weight_grads(const OnReady& on_ready);
  bool has_parts_of(const SplitBackward& other) const;

  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> inputs_;
  std::vector<torch::autograd::Edge> input_edges_;
  std::vector<size_t> input_of_edge_;
  std::vector<std::unique_ptr<Intermediate>> intermediates_;
  std::vector<torch::autograd::Edge> shared_;    // parameters of the first part
  std::vector<torch::autograd::Edge> unmarked_;  // all parameters, of a stage without a first part
  std::shared_ptr<Phase> phase_;
  std::vector<at::Tensor> gradients_;  // kept for such a stage
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_SPLIT_H_
