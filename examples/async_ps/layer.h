#ifndef WEFT_EXAMPLES_ASYNC_PS_LAYER_H_
#define WEFT_EXAMPLES_ASYNC_PS_LAYER_H_

// Layer: one linear layer of the model, wherever it lives. With --mode autograd the hidden one is
// at the server and the output one at a trainer; all trainers compute through both. Methods from
// any thread.

#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/rpc/call_context.h"
#include "weft/rref/rref.h"

namespace async_ps {

class Layer {
 public:
  // x -> weight x + bias; `rectified`: relu of that.
  Layer(const at::Tensor& weight, const at::Tensor& bias, bool rectified);
  at::Tensor forward(const at::Tensor& x) const;
  // For an optimizer.
  std::vector<weft::RRef<at::Tensor>> parameters(weft::CallContext& context) const;
  // Weight and bias as they are now.
  std::vector<at::Tensor> values() const;

 private:
  const at::Tensor weight_;
  const at::Tensor bias_;
  const bool rectified_;
};

}  // namespace async_ps

#endif  // WEFT_EXAMPLES_ASYNC_PS_LAYER_H_
