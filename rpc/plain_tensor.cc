#include "weft/rpc/plain_tensor.h"

#include "ATen/ops/clone.h"
#include "c10/core/DispatchKeySet.h"

namespace weft {

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

// clone() and not contiguous(), which gives back a lazy view that is contiguous.
at::Tensor plain(const at::Tensor& tensor) {
  const at::Tensor detached = tensor.requires_grad() ? tensor.detach() : tensor;
  return is_plain(tensor) ? detached : detached.detach().clone(at::MemoryFormat::Contiguous);
}

}  // namespace weft
