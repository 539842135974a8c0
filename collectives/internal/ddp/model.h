#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_MODEL_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_MODEL_H_

// What data parallelism sees of a module: names and tensors.
//
// Threads: none; the module belongs to its user.

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/error.h"

namespace torch::nn {
class Module;
}

namespace weft::internal {

struct ModelTensor {
  std::string name{};
  at::Tensor tensor{};
  bool sparse = false;  // its gradient
};

// In LibTorch's order, each tensor once, under the first of its names.
struct Model {
  std::vector<ModelTensor> parameters{};  // that are to be reduced: they require grad
  std::vector<ModelTensor> frozen{};
  std::vector<ModelTensor> buffers{};
};

// Without those parameters and buffers whose names are in `ignored`. Throws, invalid_argument: a
// name of `ignored` that the module does not have, or no parameter that requires grad.
Model model_of(torch::nn::Module& module, const std::vector<std::string>& ignored);

// The names of the modules whose forward has operations of a group.
std::vector<std::string> names_of_synced_norms(const torch::nn::Module& module);

// One line for each tensor: what has to be the same on all ranks.
std::vector<std::string> describe_model(const Model& model);
// Compares what all ranks have described; the error names the first difference and both ranks, and
// is the same on all.
Status compare_models(const std::vector<std::vector<std::string>>& by_rank);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_MODEL_H_
