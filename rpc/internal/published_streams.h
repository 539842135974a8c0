#ifndef WEFT_RPC_INTERNAL_PUBLISHED_STREAMS_H_
#define WEFT_RPC_INTERNAL_PUBLISHED_STREAMS_H_

// PublishedStreams: what of a worker's work on devices comes before its handlers (STREAM-5). What
// is published later comes after what was published before, so one guard for each device is enough.
// Any thread; may throw as rpc/device_order.h says.

#include <atomic>
#include <map>

#include "c10/util/ArrayRef.h"
#include "weft/common/mutex.h"
#include "weft/rpc/device_code.h"
#include "weft/rpc/device_order.h"

namespace weft::internal {

class PublishedStreams {
 public:
  void publish(c10::ArrayRef<at::Tensor> tensors);
  // On the calling thread's current streams. Costs a look when nothing was ever published.
  void follow() {
    if (any_.load(std::memory_order_acquire)) follow_all();
  }

 private:
  void follow_all();

  std::atomic<bool> any_{false};
  Mutex mutex_;
  std::map<DeviceCode, GuardRef> by_device_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_PUBLISHED_STREAMS_H_
