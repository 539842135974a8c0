#include "weft/rpc/arena.h"

#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/util/safe_numerics.h"
#include "weft/rpc/internal/agent/tensor_meta.h"
#include "weft/rpc/internal/launch/core.h"

namespace weft {

at::Tensor arena_tensor(const Worker& worker, at::IntArrayRef sizes, at::ScalarType dtype) {
  internal::BufferSpec spec;
  spec.dtype = dtype;
  spec.sizes.assign(sizes.begin(), sizes.end());
  uint64_t bytes = c10::elementSize(dtype);
  bool possible = true;
  for (const int64_t size : sizes) {
    possible =
        possible && size >= 0 && !c10::mul_overflows(bytes, static_cast<uint64_t>(size), &bytes);
  }
  if (possible && bytes > 0) {
    spec.nbytes = bytes;
    const std::shared_ptr<internal::Core> core = lock_core(worker);
    if (std::shared_ptr<char> memory = core == nullptr ? nullptr : core->allocate_shared(bytes)) {
      char* const data = memory.get();
      return internal::buffer_around(spec, data, std::move(memory));
    }
  }
  return at::empty(sizes, at::TensorOptions().dtype(dtype));
}

at::Tensor move_to_arena(const Worker& worker, const at::Tensor& tensor) {
  const Status sendable = internal::check_sendable_tensor(tensor);
  if (!sendable.ok()) throw_error(annotate(sendable, "move_to_arena"));
  if (tensor.layout() != at::kStrided) {
    throw_error(
        make_error(ErrorKind::kInvalidArgument,
                   absl::StrCat("move_to_arena: a tensor of layout ", c10::str(tensor.layout()),
                                "; only dense ones can lie in an arena")));
  }
  if (!tensor.device().is_cpu()) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("move_to_arena: the tensor is on ", tensor.device().str(),
                                        ", an arena is memory of the CPU")));
  }
  const c10::NoGradGuard no_grad;
  at::Tensor out = arena_tensor(worker, tensor.sizes(), tensor.scalar_type());
  out.copy_(tensor);
  return out;
}

}  // namespace weft
