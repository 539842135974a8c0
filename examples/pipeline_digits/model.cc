#include "weft/examples/pipeline_digits/model.h"

#include <cmath>
#include <string>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/tanh.h"
#include "ATen/ops/zeros.h"

namespace digits {
namespace {

constexpr int64_t kPixels = 64;
constexpr int64_t kWidth = 48;
constexpr int64_t kClasses = 10;

}  // namespace

PartImpl::PartImpl(int64_t first, int64_t last, int64_t seed) : first_(first) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t in = i == 0 ? kPixels : kWidth;
    const int64_t out = i == kLayers - 1 ? kClasses : kWidth;
    const at::Generator generator =
        at::detail::createCPUGenerator(static_cast<uint64_t>(seed * kLayers + i));
    const double bound = std::sqrt(6.0 / static_cast<double>(in + out));
    at::Tensor weight = at::empty({out, in}).uniform_(-bound, bound, generator);
    const std::string name = "layer" + std::to_string(i);
    weights_.push_back(register_parameter(name + "_weight", weight));
    biases_.push_back(register_parameter(name + "_bias", at::zeros({out})));
  }
}

at::Tensor PartImpl::forward(at::Tensor x) {
  for (size_t k = 0; k < weights_.size(); ++k) {
    const int64_t layer = first_ + static_cast<int64_t>(k);
    const at::Tensor y = at::linear(x, weights_[k], biases_[k]);
    if (layer == kLayers - 1) return y;
    // A step past a layer keeps eight of them trainable.
    x = layer == 0 ? at::tanh(y) : x + at::tanh(y);
  }
  return x;
}

at::Tensor loss(const at::Tensor& logits, const at::Tensor& labels) {
  return at::cross_entropy_loss(logits, labels);
}

}  // namespace digits
