#include "weft/collectives/internal/ddp/gradient_copy.h"

#include <algorithm>
#include <array>

#include "ATen/ops/mul.h"
#include "ATen/ops/scalar_tensor.h"
#include "weft/collectives/internal/operation.h"
#include "weft/collectives/internal/reduce.h"
#include "weft/rpc/plain_tensor.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {
namespace {

bool are_bytes(const at::Tensor& from, const at::Tensor& to, size_t whole) {
  return whole >= kStreamAbove && from.is_cpu() && to.is_cpu() &&
         from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && is_plain(from) &&
         is_plain(to) && !to.is_inference();
}

}  // namespace

void copy_scaled(const at::Tensor& from, double factor, size_t whole, at::Tensor to) {
  if (from.scalar_type() != to.scalar_type() || from.device() != to.device()) {
    to.copy_(from).mul_(factor);
    return;
  }
  const bool narrow = from.scalar_type() != at::kFloat && from.scalar_type() != at::kDouble;
  if (narrow || !are_bytes(from, to, whole)) {  // mul() has roundings of its own for narrow types
    at::mul_out(to, from, at::scalar_tensor(factor, from.options()));
    return;
  }
  const ElementType type = value_or_throw(element_type_of(from.scalar_type()));
  alignas(64) std::array<char, 8192> block;
  char* out = static_cast<char*>(to.mutable_data_ptr());
  const char* in = static_cast<const char*>(from.const_data_ptr());
  for (size_t left = from.nbytes(); left > 0;) {
    const size_t bytes = std::min(left, block.size());
    multiply(type, block.data(), in, bytes / from.element_size(), factor);
    copy_part(out, block.data(), bytes, whole);
    in += bytes;
    out += bytes;
    left -= bytes;
  }
  to.unsafeGetTensorImpl()->bump_version();
}

void copy_gradient(const at::Tensor& from, size_t whole, at::Tensor to) {
  if (!are_bytes(from, to, whole)) {
    to.copy_(from);
    return;
  }
  copy_part(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes(), whole);
  to.unsafeGetTensorImpl()->bump_version();
}

}  // namespace weft::internal
