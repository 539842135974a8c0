#ifndef WEFT_PS_INTERNAL_ADD_SCALED_H_
#define WEFT_PS_INTERNAL_ADD_SCALED_H_

// AddScaled: to[i] += by * from[i], with the bits of at::Tensor::add_(from, by): one rounding where LibTorch's kernels
// have fused multiply-add on this processor, and two elsewhere. Any thread.

#include <cstddef>

#include "weft/common/api.h"

namespace weft::ps::internal {

class WEFT_API AddScaled {
 public:
  AddScaled();
  void operator()(float* to, const float* from, float by, size_t count) const;
  void operator()(double* to, const double* from, double by, size_t count) const;

 private:
  const bool fused_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_ADD_SCALED_H_
