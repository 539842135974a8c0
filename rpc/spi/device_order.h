#ifndef WEFT_RPC_SPI_DEVICE_ORDER_H_
#define WEFT_RPC_SPI_DEVICE_ORDER_H_

// What work on devices comes before what other work: guards of what is queued on streams, and what
// a worker has published for handlers that start later. Everything queues and records; nothing here
// waits for a device. For tensors of the CPU all of it is nothing.
//
// Everything may throw what LibTorch throws when a device fails. Any thread, unless said otherwise.

#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Stream.h"
#include "c10/util/ArrayRef.h"
#include "weft/common/api.h"
#include "weft/common/value_guard.h"

namespace weft {

class Worker;

// For memory that handlers of a worker read and others change, as parameters: what the calling
// thread has queued until now on its current streams of these tensors' devices comes before
// whatever a handler queues that starts later (STREAM-5). DistributedOptimizer does it after each
// step. A worker that has left: nothing.
WEFT_API void publish_here(const Worker& worker, c10::ArrayRef<at::Tensor> tensors);
// For a thread that is none of a handler: what it queues from now on comes after what was
// published.
WEFT_API void follow_published(const Worker& worker);

namespace internal {

// Null: it is there.
using GuardRef = std::shared_ptr<ValueGuard>;

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.device().is_cpu();
}
WEFT_API bool any_on_device(c10::ArrayRef<at::Tensor> tensors);

// The calling thread's current stream of the device; nothing for the CPU.
WEFT_API std::optional<c10::Stream> stream_here(c10::Device device);
inline std::optional<c10::Stream> stream_here(const at::Tensor& tensor) {
  return tensor.defined() ? stream_here(tensor.device()) : std::nullopt;
}

// What the calling thread queues from now on comes after `guard`, and the tensors' memory is not
// given away before that is done.
WEFT_API void use_here(const GuardRef& guard, c10::ArrayRef<at::Tensor> tensors);
// The guard of what is queued now on the calling thread's current stream of the tensor's device.
WEFT_API GuardRef mark_here(const at::Tensor& tensor);

// The same for all devices that the worker uses.
WEFT_API GuardRef mark_all_here(const Worker& worker);

// Streams that something was queued on. Not thread-safe.
class WEFT_API StreamsUsed {
 public:
  void add(const std::optional<c10::Stream>& stream);
  // The guard of what is queued on them now; null when there are none.
  GuardRef mark() const;

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace internal
}  // namespace weft

#endif  // WEFT_RPC_SPI_DEVICE_ORDER_H_
