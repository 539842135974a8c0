#ifndef WEFT_RPC_INTERNAL_DEVICE_PUBLISHED_STREAMS_H_
#define WEFT_RPC_INTERNAL_DEVICE_PUBLISHED_STREAMS_H_

// Which work of some handlers on devices comes before that of others. PublishedStreams: what of a
// worker's work on devices comes before its handlers (STREAM-5). What is published later comes
// after what was published before, so one guard for each device is enough. Any thread; may throw as
// rpc/spi/device_order.h says.

#include <atomic>
#include <functional>
#include <map>

#include "c10/util/ArrayRef.h"
#include "weft/common/mutex.h"
#include "weft/rpc/spi/device_code.h"
#include "weft/rpc/spi/device_order.h"

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

// ObjectStreams: what of the work on devices of calls on one object comes before the next
// (STREAM-6). Const calls come after the last that was not, and need not wait for each other.
class ObjectStreams {
 public:
  // A call begins, or has ended, on the calling thread's current streams; `mark` marks those.
  void follow(bool is_const);
  void ended(bool is_const, const std::function<GuardRef()>& mark);

 private:
  Mutex mutex_;
  GuardRef written_ ABSL_GUARDED_BY(mutex_);
  GuardRef read_ ABSL_GUARDED_BY(mutex_);  // since then
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_PUBLISHED_STREAMS_H_
