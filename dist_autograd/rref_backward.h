#ifndef WEFT_DIST_AUTOGRAD_RREF_BACKWARD_H_
#define WEFT_DIST_AUTOGRAD_RREF_BACKWARD_H_

// Backward from a loss that an RRef refers to.
//
//   auto loss = remote(worker, "ps0", &forward_and_loss, x, labels);
//   weft::backward(context, loss);
//   context.gradients();
//
// At its owner the RRef's own tensor is the root. Elsewhere it is fetched in the context first, as
// by to_here(): the copy has the same history, one message longer, so the gradients are the same.
// The root of the pass, whose context and deadline count, is the calling worker either way.
//
// Without a context, at the owner: `loss.local_value()->backward()`.
//
// Threads: any, also one that is not in the context.

#include "weft/common/api.h"
#include "weft/dist_autograd/context.h"
#include "weft/rref/rref.h"

namespace weft {

// Blocks until the pass has ended everywhere. Errors: those of DistAutogradContext::backward(),
// the loss being number 0; those of fetching the value; and
//   state  the RRef refers to nothing, or it and the context are of two workers of this process
// A deadline that is given covers the fetch, too.
WEFT_API void backward(DistAutogradContext& context, const RRef<at::Tensor>& loss,
                       const BackwardOptions& options = {});
WEFT_API Status try_backward(DistAutogradContext& context, const RRef<at::Tensor>& loss,
                             const BackwardOptions& options = {});
// Only a tensor has gradients.
template <class T>
void backward(DistAutogradContext& context, const RRef<T>& loss,
              const BackwardOptions& = {}) = delete;
template <class T>
Status try_backward(DistAutogradContext& context, const RRef<T>& loss,
                    const BackwardOptions& = {}) = delete;

}  // namespace weft

#endif  // WEFT_DIST_AUTOGRAD_RREF_BACKWARD_H_
