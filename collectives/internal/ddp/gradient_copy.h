#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_GRADIENT_COPY_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_GRADIENT_COPY_H_

// Gradients into buckets and back. What is too large for the caches goes around them (transport/stream_copy.h): it
// would push out there what the backward works with, and is gone from them before it is read. Any thread.

#include <cstddef>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"

namespace weft::internal {

// to = from * factor. `whole`: bytes of all that is copied before it is read. The tensors have the same
// sizes; what LibTorch's mul() and copy_() promise holds, versions included.
WEFT_API void copy_scaled(const at::Tensor& from, double factor, size_t whole, at::Tensor to);

// to = from, likewise.
WEFT_API void copy_gradient(const at::Tensor& from, size_t whole, at::Tensor to);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_GRADIENT_COPY_H_
