#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_REPLICAS_BACKWARD_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_REPLICAS_BACKWARD_H_

// ReplicasBackward: stands in the user's graph for the forwards of all replicas, each of which has a
// graph of its own. Its backward runs theirs at the same time and adds up what they give.
//
// Its inputs are the module's parameters that require grad, and behind them the parts of each chunk's
// tensors that do.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "ATen/core/Tensor.h"
#include "weft/collectives/internal/ddp/replica_threads.h"

namespace weft::internal {

// One replica's forward.
struct ReplicaGraph {
  std::vector<at::Tensor> outputs;     // in its own graph
  std::vector<size_t> output_numbers;  // of the node's, for each
  std::vector<at::Tensor> parameters;  // as many as the node's
  std::vector<at::Tensor> inputs;      // leaves that stand for the parts of the chunk's tensors
};

class ReplicasBackward : public torch::autograd::Node {
 public:
  // `on`: the replica of each graph.
  ReplicasBackward(std::shared_ptr<ReplicaThreads> threads, std::vector<size_t> on)
      : threads_(std::move(threads)), on_(std::move(on)) {}

  // Before the first backward.
  std::vector<ReplicaGraph>& graphs() { return graphs_; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override { graphs_.clear(); }
  std::string name() const override { return "ReplicasBackward"; }

 private:
  const std::shared_ptr<ReplicaThreads> threads_;
  const std::vector<size_t> on_;
  std::vector<ReplicaGraph> graphs_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_REPLICAS_BACKWARD_H_
