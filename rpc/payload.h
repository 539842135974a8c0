#ifndef WEFT_RPC_PAYLOAD_H_
#define WEFT_RPC_PAYLOAD_H_

// Payload: encoded arguments or an encoded result, as it travels: a value tree in bytes, in which
// tensors are numbers, and the tensors themselves, which travel beside it. A value type.

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "weft/common/error.h"

namespace weft {

struct Payload {
  std::string body;
  std::vector<at::Tensor> tensors;
};

// Takes the result of a handler; must be called exactly once (dropping it answers with an error).
using ReplyFn = absl::AnyInvocable<void(StatusOr<Payload>)>;

}  // namespace weft

#endif  // WEFT_RPC_PAYLOAD_H_
