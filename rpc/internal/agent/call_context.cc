#include "weft/rpc/call_context.h"

#include <algorithm>

#include "weft/rpc/spi/untyped_call.h"
#include "weft/rpc/worker.h"

namespace weft {

absl::Duration CallContext::remaining() const {
  if (remaining_at_start_ == absl::InfiniteDuration()) return absl::InfiniteDuration();
  return std::max(absl::ZeroDuration(), scope_->deadline - worker_.now());
}

void CallContext::on_cancel(absl::AnyInvocable<void()> fn) const {
  if (executor_ == nullptr) {
    scope_->cancel.on_cancel(std::move(fn));
    return;
  }
  scope_->cancel.on_cancel([executor = executor_, fn = std::move(fn)]() mutable {
    post_or_run(executor.get(), std::move(fn));
  });
}

}  // namespace weft
