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
#include "torch/csrc/autograd/edge.h"
#include "weft/common/api.h"

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
  void weight_grads(const OnReady& on_ready = nullptr);

 private:
  struct Intermediate;
  struct Hook;
  struct Phase;
  void find_intermediates();

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
