#ifndef WEFT_RPC_PAYLOAD_H_
#define WEFT_RPC_PAYLOAD_H_

// Payload: encoded arguments or an encoded result, as it travels: a value tree in bytes, in which
// tensors are numbers, and the tensors themselves, which travel beside it. A value type.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "weft/common/error.h"
#include "weft/common/value_guard.h"

namespace weft {

// What devices have to do with a payload that came.
struct PayloadDevices {
  // Of each tensor, where it belongs, as a number (internal/devices.h): while all are still on the
  // CPU, which no handler sees.
  std::vector<uint32_t> targets{};
  // For whoever uses the tensors: their copies are queued.
  std::shared_ptr<ValueGuard> guard{};
};

struct Payload {
  std::string body;
  std::vector<at::Tensor> tensors;
  std::shared_ptr<PayloadDevices> devices{};  // null: the CPU only
};

// Takes the result of a handler; must be called exactly once (dropping it answers with an error).
using ReplyFn = absl::AnyInvocable<void(StatusOr<Payload>)>;

}  // namespace weft

#endif  // WEFT_RPC_PAYLOAD_H_
