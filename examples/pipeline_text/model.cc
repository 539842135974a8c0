#include "weft/examples/pipeline_text/model.h"

#include <cmath>
#include <string>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/embedding.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/layer_norm.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/scaled_dot_product_attention.h"

namespace pipeline_text {

StageImpl::StageImpl(int64_t first, int64_t last, int64_t symbols, int64_t context, int64_t width,
                     int64_t heads, int64_t layers, int64_t seed)
    : sizes_{symbols, context, width, heads, layers},
      is_first_(first == 0),
      is_last_(last == layers) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(width));
  if (is_first_) {
    embedding_ = parameter("embedding", {symbols, width}, 0.5, seed);
    places_ = parameter("places", {context, width}, 0.1, seed);
  }
  for (int64_t i = first; i < last; ++i) {
    drawn_ = 0;
    const int64_t own = seed * 1000 + i + 1;
    const std::string name = "layer" + std::to_string(i) + "_";
    Layer layer;
    layer.norm1 = register_parameter(name + "norm1", at::ones({width}));
    layer.qkv = parameter(name + "qkv", {3 * width, width}, scale, own);
    layer.out = parameter(name + "out", {width, width}, scale, own);
    layer.norm2 = register_parameter(name + "norm2", at::ones({width}));
    layer.up = parameter(name + "up", {4 * width, width}, scale, own);
    layer.down = parameter(name + "down", {width, 4 * width}, scale / 2, own);
    layers_.push_back(layer);
  }
  if (is_last_) {
    drawn_ = 0;
    head_norm_ = register_parameter("head_norm", at::ones({width}));
    head_ = parameter("head", {symbols, width}, scale, seed * 1000 + layers + 1);
  }
}

at::Tensor StageImpl::parameter(const std::string& name, at::IntArrayRef sizes, double scale,
                                int64_t seed) {
  const at::Generator generator =
      at::detail::createCPUGenerator(static_cast<uint64_t>(seed * 100 + drawn_++));
  return register_parameter(name, at::empty(sizes).normal_(0, scale, generator));
}

at::Tensor StageImpl::run(const Layer& layer, const at::Tensor& x) const {
  const int64_t n = x.size(0);
  const int64_t t = x.size(1);
  const auto parts = at::linear(at::layer_norm(x, {sizes_.width}, layer.norm1), layer.qkv)
                         .reshape({n, t, 3, sizes_.heads, sizes_.width / sizes_.heads})
                         .permute({2, 0, 3, 1, 4});
  const at::Tensor attended = at::scaled_dot_product_attention(
      parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
  const at::Tensor h =
      x + at::linear(attended.transpose(1, 2).reshape({n, t, sizes_.width}), layer.out);
  return h +
         at::linear(at::gelu(at::linear(at::layer_norm(h, {sizes_.width}, layer.norm2), layer.up)),
                    layer.down);
}

std::vector<at::Tensor> StageImpl::forward(std::vector<at::Tensor> inputs) {
  at::Tensor x = inputs.at(0);
  at::Tensor embedded = inputs.size() > 1 ? inputs[1] : at::Tensor();
  if (is_first_) {
    embedded = at::embedding(embedding_, x) + places_.narrow(0, 0, x.size(1));
    x = embedded;
  }
  for (const Layer& layer : layers_) x = run(layer, x);
  if (is_last_) {
    return {at::linear(at::layer_norm(x + embedded, {sizes_.width}, head_norm_), head_)};
  }
  if (is_first_) return {x, embedded};
  return {x};
}

at::Tensor loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace pipeline_text
