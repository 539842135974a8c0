#include "weft/examples/async_ps/layer.h"

#include "ATen/ops/linear.h"
#include "ATen/ops/relu.h"

namespace async_ps {

Layer::Layer(const at::Tensor& weight, const at::Tensor& bias, bool rectified)
    : weight_(weight.clone().requires_grad_()),
      bias_(bias.clone().requires_grad_()),
      rectified_(rectified) {}

at::Tensor Layer::forward(const at::Tensor& x) const {
  const at::Tensor y = at::linear(x, weight_, bias_);
  return rectified_ ? at::relu(y) : y;
}

std::vector<weft::RRef<at::Tensor>> Layer::parameters(weft::CallContext& context) const {
  return {weft::RRef<at::Tensor>::local(context.worker(), weight_),
          weft::RRef<at::Tensor>::local(context.worker(), bias_)};
}

std::vector<at::Tensor> Layer::values() const {
  return {weight_.detach().clone(), bias_.detach().clone()};
}

}  // namespace async_ps
