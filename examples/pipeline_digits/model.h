#ifndef WEFT_EXAMPLES_PIPELINE_DIGITS_MODEL_H_
#define WEFT_EXAMPLES_PIPELINE_DIGITS_MODEL_H_

// A network of eight layers for the digits, and any part of it as a stage. The first values of a
// layer are a function of the seed and its number alone, so that they do not depend on how the
// layers are divided.

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include "ATen/core/Tensor.h"

namespace digits {

inline constexpr int64_t kLayers = 8;

// Layers `first` to `last - 1`.
class PartImpl : public torch::nn::Module {
 public:
  PartImpl(int64_t first, int64_t last, int64_t seed);
  at::Tensor forward(at::Tensor x);

 private:
  int64_t first_;
  std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> biases_;
};

// The mean cross entropy.
at::Tensor loss(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace digits

#endif  // WEFT_EXAMPLES_PIPELINE_DIGITS_MODEL_H_
