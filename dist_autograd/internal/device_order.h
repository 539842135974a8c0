#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_DEVICE_ORDER_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_DEVICE_ORDER_H_

// What a pass over tensors on devices has to do with streams. A node runs on the stream on which
// its forward ran, as in LibTorch's engine (torch/csrc/autograd/engine.cpp, evaluate_function), and
// whatever leaves a pass, to another worker or to whoever reads gradients, has a guard beside it.
// Nothing here waits for a device. For tensors of the CPU all of it is nothing.
//
// Everything may throw what LibTorch throws when a device fails. Any thread, unless said otherwise.

#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Stream.h"
#include "c10/util/ArrayRef.h"
#include "weft/common/value_guard.h"
#include "weft/dist_autograd/internal/torch_compat.h"

namespace weft::internal {

// Null: it is there.
using GuardRef = std::shared_ptr<ValueGuard>;

bool on_device(const at::Tensor& tensor);
bool any_on_device(c10::ArrayRef<at::Tensor> tensors);

// Where a node's forward ran; nothing for one of the CPU.
std::optional<c10::Stream> stream_of(const Node& node);
// The calling thread's current stream of the tensor's device; nothing for the CPU.
std::optional<c10::Stream> stream_here(const at::Tensor& tensor);

// What the calling thread queues from now on comes after `guard`, and the tensors' memory is not
// given away before that is done.
void use_here(const GuardRef& guard, c10::ArrayRef<at::Tensor> tensors);
// Of what is queued now on the calling thread's current stream of the tensor's device.
GuardRef mark_here(const at::Tensor& tensor);

// The streams that a pass has used at one worker. Not thread-safe.
class StreamsUsed {
 public:
  void add(const std::optional<c10::Stream>& stream);
  // Of what is queued on them now; null when there are none.
  GuardRef mark() const;

 private:
  std::vector<c10::Stream> streams_;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_DEVICE_ORDER_H_
