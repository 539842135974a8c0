#ifndef WEFT_TRANSPORT_INTERNAL_DESCRIPTORS_H_
#define WEFT_TRANSPORT_INTERNAL_DESCRIPTORS_H_

// The descriptors of this process: how many it may have, how many it has, and which sockets go
// without when there are few. A control lane and its bulk lanes must be; data connections are
// optional.
//
// Threads: any.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::internal {

struct DescriptorUse {
  uint64_t open = 0;
  uint64_t limit = 0;  // RLIMIT_NOFILE, the soft one
};
WEFT_API DescriptorUse descriptor_use();

// Raises the soft limit of the process to the hard one, to 65,536 at most: a program that closes all
// descriptors up to the limit would take seconds with more. Does nothing where that is not allowed.
WEFT_API void raise_descriptor_limit();

// OK when `count` more can be opened now. Error, kind resource: what the limit is and how it is
// raised. The descriptors are not reserved.
WEFT_API Status check_descriptors(size_t count);
// Returns that error, for a caller that a process at its limit refuses.
WEFT_API Status no_descriptors_left();

// Says who may open optional sockets: while at most a quarter of the limit is in use, so that the
// rest is for those that must be.
class WEFT_API OptionalSockets {
 public:
  explicit OptionalSockets(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  // For one connection, `count` of them. Error, kind resource, with the figures.
  Status admit(size_t count) ABSL_LOCKS_EXCLUDED(mutex_);
  // Sockets that were not admitted.
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<Runtime> runtime_;
  std::atomic<int64_t> refused_{0};
  Mutex mutex_;
  // Counting takes as long as there are descriptors: a figure serves for a moment.
  DescriptorUse counted_ ABSL_GUARDED_BY(mutex_);
  absl::Time counted_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DESCRIPTORS_H_
