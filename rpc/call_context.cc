#include "weft/rpc/call_context.h"

#include <algorithm>

#include "weft/rpc/untyped_call.h"
#include "weft/rpc/worker.h"

namespace weft {

absl::Duration CallContext::remaining() const {
  if (remaining_at_start_ == absl::InfiniteDuration()) return absl::InfiniteDuration();
  return std::max(absl::ZeroDuration(), scope_->deadline - worker_.now());
}

}  // namespace weft
