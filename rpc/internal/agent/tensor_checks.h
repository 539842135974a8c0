#ifndef WEFT_RPC_INTERNAL_AGENT_TENSOR_CHECKS_H_
#define WEFT_RPC_INTERNAL_AGENT_TENSOR_CHECKS_H_

// What the two halves of tensor_meta.h share: tensor_meta.cc, which knows descriptors, and
// tensor_parts.cc, which knows tensors. Any thread.

#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/rpc/internal/agent/tensor_meta.h"

namespace weft::internal {

// "[2, 3]"
WEFT_COLD std::string shape_text(c10::IntArrayRef sizes);
// Why a tensor cannot be sent, kind invalid_argument.
WEFT_COLD Status refuse_tensor(std::string_view why);
// Everything that can be said of a descriptor alone, kind protocol; also fills nbytes when `fill`
// is set.
Status check_meta(TensorMeta* meta, bool fill);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_TENSOR_CHECKS_H_
