#ifndef WEFT_RPC_CALL_OPTIONS_H_
#define WEFT_RPC_CALL_OPTIONS_H_

// CallOptions: per call. Only trivially destructible members, so that options may be written inside
// a co_await expression (g++ 12 destroys other aggregates twice there).

#include <type_traits>

#include "weft/common/time.h"

namespace weft {

// What happens to a call whose outcome is unknown because the connection broke.
enum class Retry : unsigned char {
  kNever,       // the call fails with kind maybe_executed (or not_delivered when that is proven)
  kAtMostOnce,  // it is sent again over the next connection; the callee executes it at most once
};

// Whether an argument tensor's memory is the caller's or a copy until it is on the wire.
enum class TensorArgs : unsigned char {
  kBorrow,  // no copy: the caller must not write to it before the future is complete (default)
  kCopy,    // copied before rpc_async returns
};

// What happens to a call whose arguments find no room in the send budget of its peer or worker,
// because too many bytes are on their way already.
enum class Backpressure : unsigned char {
  kFail,  // it fails at once, with kind resource (default)
  kWait,  // it waits for room, in order of issue per peer, until its deadline; of more than 4,096
          // that wait on one worker the next fails. When its receiver has no room, that one is
          // asked again
};

struct CallOptions {
  // From issuing to completion, retries included; unset: the worker's rpc_timeout (60 s). Nested
  // calls use the smaller of this and what is left of their caller's.
  Timeout deadline{};
  Retry retry = Retry::kNever;
  TensorArgs tensors = TensorArgs::kBorrow;
  Backpressure backpressure = Backpressure::kFail;
};
static_assert(std::is_trivially_destructible_v<CallOptions>);

}  // namespace weft

#endif  // WEFT_RPC_CALL_OPTIONS_H_
