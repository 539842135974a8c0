#ifndef WEFT_PIPELINE_PROFILE_H_
#define WEFT_PIPELINE_PROFILE_H_

// profile_layers(): what each layer of a chain costs, measured here, for partition().
//
//   const auto layers = value_or_throw(profile_layers(
//       {{"embed", [&](const at::Tensor& x) { return embed->forward(x); }, embed->parameters()}, ...},
//       one_micro_batch));
//
// Each layer runs a few times on what the layer before it gave; the shortest times count. The first
// layer's inputs have no gradient, as in a pipeline. Gradients of the parameters are afterwards what
// they were.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/pipeline/partition.h"

namespace weft::pipeline {

struct ProfiledLayer {  // a layer to be measured
  std::string name{};   // for errors
  std::function<at::Tensor(const at::Tensor&)> forward{};
  std::vector<at::Tensor> parameters{};
};

struct ProfileOptions {  // how it is measured
  int repeats = 5;       // the fastest counts
  // Bytes that a stage holds per byte of weights: the weights, their gradients, and what the
  // optimizer keeps.
  int64_t bytes_per_byte = 3;
  std::shared_ptr<Runtime> runtime{};  // whose clock; null: the system's
};

// LayerCost::activation is the bytes of a layer's input and output: what it keeps of its own beside
// them is not seen. Errors: what a layer throws, kind user, with its number and name; kind
// invalid_argument for one that gives no tensor of floating point.
WEFT_API StatusOr<std::vector<LayerCost>> profile_layers(const std::vector<ProfiledLayer>& layers,
                                                         at::Tensor sample,
                                                         const ProfileOptions& options = {});

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_PROFILE_H_
