#ifndef WEFT_PIPELINE_INTERNAL_MODULE_CALL_H_
#define WEFT_PIPELINE_INTERNAL_MODULE_CALL_H_

// Registered methods of tensors, called in this process.

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "weft/pipeline/stage_compute.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/worker.h"

namespace weft::pipeline::internal {

inline Status cannot(std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument, what);
}

// "[2, 3]", or "undefined".
std::string shape_text(const at::Tensor& t);

// "(tensor,tensor)->...": how many tensors; -1: a list of them; nothing: something else.
std::optional<int> tensors_taken(std::string_view signature);

// What it gives: one tensor, a tuple of 2 to 4, or a list. Kind invalid_argument for another count
// of arguments, another result, or a future; what it throws.
StatusOr<Tensors> invoke(const Worker& worker, const Method& method,
                         const std::shared_ptr<void>& object, const Tensors& arguments);

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_MODULE_CALL_H_
