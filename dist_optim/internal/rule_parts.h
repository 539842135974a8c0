#ifndef WEFT_DIST_OPTIM_INTERNAL_RULE_PARTS_H_
#define WEFT_DIST_OPTIM_INTERNAL_RULE_PARTS_H_

// What rules are made of. A rule is a struct derived from its tag in weft::optim, which names its buffers, says which of
// them it needs, and applies one step; the number of the step begins at 1. update_rule.cc makes an UpdateRule of it.
//
// Optional members: takes_sparse(options); kSparseOnly; by_row(buffer); first(options, buffer); plain_step(options);
// kCompensatesDelay, with an apply() that has the values with which the gradient was computed; check(options).

#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/Tensor.h"

namespace weft::internal {

inline at::Tensor signed_gradient(const at::Tensor& gradient, bool maximize) {
  return maximize ? gradient.neg() : gradient;
}
inline at::Tensor decayed(const at::Tensor& gradient, const at::Tensor& parameter,
                          double weight_decay) {
  return weight_decay == 0 ? gradient : gradient.add(parameter, weight_decay);
}
inline at::Tensor sparse_like(const at::Tensor& gradient, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(gradient._indices(), values, gradient.sizes());
}

// A number for each row, in the shape in which it goes beside the rows.
inline at::Tensor beside(const at::Tensor& by_row, const at::Tensor& rows) {
  std::vector<int64_t> shape(static_cast<size_t>(rows.dim()), 1);
  if (!shape.empty()) shape[0] = rows.size(0);
  return by_row.reshape(shape);
}

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_RULE_PARTS_H_
