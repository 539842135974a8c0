#ifndef WEFT_TESTS_CUDA_FAKE_BACKWARD_H_
#define WEFT_TESTS_CUDA_FAKE_BACKWARD_H_

// Leaves on the GPUs of fake_runtime.h, and functions whose gradients the place-holders of kernels
// make.

#include <functional>
#include <memory>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"
#include "torch/csrc/autograd/variable.h"
#include "weft/tests/cuda/fake_gpus.h"

namespace weft::testing {

using Backward = std::function<at::Tensor(const at::Tensor&)>;

class BackwardNode : public torch::autograd::Node {
 public:
  explicit BackwardNode(Backward fn) : fn_(std::move(fn)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& in) override {
    return {fn_(in[0])};
  }

 private:
  const Backward fn_;
};

// What x holds, with this for its backward.
inline at::Tensor with_backward(const at::Tensor& x, Backward fn) {
  auto node =
      std::shared_ptr<BackwardNode>(new BackwardNode(std::move(fn)), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  at::Tensor y = x.detach();
  torch::autograd::set_history(y, node);
  return y;
}

inline at::Tensor gpu_leaf(int64_t n, int device) {
  return with_bytes(at::arange(n).to(at::kFloat), gpu(device)).set_requires_grad(true);
}
inline at::Tensor gpu_full(int64_t n, float value, int device) {
  return with_bytes(at::full({n}, value), gpu(device));
}

}  // namespace weft::testing

#endif  // WEFT_TESTS_CUDA_FAKE_BACKWARD_H_
