#ifndef WEFT_RPC_PAYLOAD_H_
#define WEFT_RPC_PAYLOAD_H_

// Payload: encoded arguments or an encoded result, as it travels: a value tree in bytes, in which
// tensors and references are numbers, and the tensors and references themselves, which travel
// beside it. A value type.

#include <cstdint>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/value_guard.h"

namespace weft {

// What devices have to do with a payload that came.
struct PayloadDevices {
  // For each tensor where it belongs, as a number (device_code.h). In a payload that arrived: while
  // all tensors are still on the CPU, which no handler sees. In a call's arguments: instead of the
  // device map.
  std::vector<uint32_t> targets{};
  // For the code that uses the tensors: their copies are queued.
  std::shared_ptr<ValueGuard> guard{};
};

// Stands in a value for something that only a service of the worker understands: an RRef. What
// travels of it is that service's metadata (rpc/spi/interceptor.h); the receiver's has put one of its
// own in its place before the value is decoded. Immutable; any thread.
class WEFT_API Reference {
 public:
  virtual ~Reference();
};

struct Payload {
  std::string body;  // values without their tensors
  std::vector<at::Tensor> tensors;
  std::shared_ptr<PayloadDevices> devices{};  // null: the CPU only
  std::vector<std::shared_ptr<const Reference>> references{};
  // For a message that came in chunks: its bytes of the receive budget, given back with the last
  // copy of this.
  std::shared_ptr<const void> charge{};
};

class Encoder;

// A result that stays where it was made.
struct KeptObject {
  std::shared_ptr<void> object;  // of the type below
  const std::type_info* type = nullptr;
  // Appends it as one value; null for a class that cannot be sent.
  void (*encode)(Encoder& out, const void* object) = nullptr;
  // The guard of what is queued on devices to make it; null: nothing.
  std::shared_ptr<ValueGuard> after{};
};
using KeepFn = absl::AnyInvocable<void(StatusOr<KeptObject>)>;

// Takes the result of a handler; must be called exactly once (dropping it answers with an error).
using ReplyFn = absl::AnyInvocable<void(StatusOr<Payload>)>;

}  // namespace weft

#endif  // WEFT_RPC_PAYLOAD_H_
