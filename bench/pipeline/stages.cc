#include "weft/bench/pipeline/stages.h"

#include <stdexcept>

#include <torch/csrc/autograd/autograd.h>

#include "ATen/ops/layer_norm.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/relu.h"
#include "ATen/ops/tanh.h"
#include "ATen/ops/zeros.h"
#include "weft/bench/line_protocol.h"
#include "weft/pipeline/internal/split.h"

namespace weft::bench {
namespace {

constexpr int64_t kWidth = 512;
constexpr int64_t kBatch = 256;

struct Layers {
  at::Tensor w[3], b[3], scale, shift;
};

Layers make_layers() {
  Layers l;
  const auto weight = [](at::IntArrayRef sizes) {
    return ((at::rand(sizes) - 0.5) * 0.1).set_requires_grad(true);
  };
  for (int i = 0; i < 3; ++i) {
    l.w[i] = weight({kWidth, kWidth});
    l.b[i] = weight({kWidth});
  }
  l.scale = weight({kWidth});
  l.shift = weight({kWidth});
  return l;
}

at::Tensor forward(const std::string& stage, const Layers& l, const at::Tensor& x) {
  const bool shared = stage == "b";
  const bool residual = stage == "c";
  const auto linear = [&](int i, const at::Tensor& in) {
    const int k = shared ? 0 : i;
    return at::linear(in, l.w[k], l.b[k]);
  };
  at::Tensor h = at::relu(linear(0, x));
  if (residual) h = h + x;
  h = at::layer_norm(h, {kWidth}, l.scale, l.shift);
  at::Tensor g = at::tanh(linear(1, h));
  if (residual) g = g + h;
  const at::Tensor y = linear(2, g);
  return residual ? y + g : y;
}

}  // namespace

std::pair<std::vector<double>, std::vector<double>> time_split(const std::string& stage,
                                                               int count) {
  if (stage != "a" && stage != "b" && stage != "c") throw std::invalid_argument("stage a, b or c");
  const Layers layers = make_layers();
  const at::Tensor x = at::rand({kBatch, kWidth});
  std::vector<double> whole;
  std::vector<double> split;
  for (int k = -2; k < 2 * count; ++k) {
    const at::Tensor input = x.detach().set_requires_grad(true);
    const at::Tensor y = forward(stage, layers, input);
    const at::Tensor gradient = at::ones_like(y);
    // Both begin with the stage's output, and end with its gradients; the graph goes in between two.
    if (k % 2 == 0) {
      const double us = timed([&] { torch::autograd::backward({y}, {gradient}); }) * 1e6;
      if (k >= 0) whole.push_back(us);
    } else {
      const double us = timed([&] {
                          pipeline::internal::SplitBackward parts({y}, {input});
                          parts.input_grads({gradient});
                          parts.weight_grads();
                        }) *
                        1e6;
      if (k >= 0) split.push_back(us);
    }
  }
  return {whole, split};
}

}  // namespace weft::bench
