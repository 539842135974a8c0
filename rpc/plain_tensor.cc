#include "weft/rpc/plain_tensor.h"

#include "ATen/ops/clone.h"

namespace weft {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

// clone() and not contiguous(), which gives back a lazy view that is contiguous.
at::Tensor plain(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return tensor.detach().clone(at::MemoryFormat::Contiguous);
  return tensor.requires_grad() ? tensor.detach() : tensor;
}

}  // namespace weft
