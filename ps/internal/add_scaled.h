#ifndef WEFT_PS_INTERNAL_ADD_SCALED_H_
#define WEFT_PS_INTERNAL_ADD_SCALED_H_

// to[i] += by * from[i], with the bits of at::Tensor::add_(from, by): one rounding where the processor has fused
// multiply-add, as LibTorch's kernels have it there, and two elsewhere.

#include <cstddef>

#include "weft/common/api.h"

namespace weft::ps::internal {

WEFT_API void add_scaled(float* to, const float* from, float by, size_t count);
WEFT_API void add_scaled(double* to, const double* from, double by, size_t count);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_ADD_SCALED_H_
