#ifndef WEFT_RPC_INTERNAL_DEVICE_DEVICE_BACKEND_H_
#define WEFT_RPC_INTERNAL_DEVICE_DEVICE_BACKEND_H_

// DeviceBackend: devices whose tensors a worker can send and receive. The core knows this interface
// and no device; weft::cuda is the one that is opened when devices are used, tests bring their own.
//
//   STREAM-1  no thread of the core waits for a device: everything here returns at once, and what
//             takes time ends in a callback.
//   STREAM-2  bytes that leave are those that a tensor has after what was queued on the sender's
//             current streams when it was sent; nothing else of the sender waits for the copy.
//   STREAM-3  a handler starts when the copies of its arguments are queued, on the streams that are
//             current while it runs; a consumer's current streams wait for the copies of a result.
//   STREAM-4  memory that a stream still uses is not given to another one.
//   STREAM-5  what has been published (rpc/spi/device_order.h) comes before what handlers queue that
//             start later.
//   STREAM-6  the kernels of a call on an object come after those that made the object, and after
//             those of the calls before it: of a const method, of the others only.
//
// Threads: any. Callbacks run once each, on a thread of the backend; short.

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/from_blob.h"
#include "absl/functional/any_invocable.h"
#include "c10/core/Device.h"
#include "weft/common/api.h"
#include "weft/common/call_scope.h"
#include "weft/common/error.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"
#include "weft/common/value_guard.h"

namespace weft::internal {

// Streams of one message, one for each of its devices: current in the scope of its handler, or what
// the consumer of a result waits for.
class DeviceWork : public ScopeAttachment, public ValueGuard {};

// Memory of the host for so many bytes of a message, from which a peer on this host takes them without
// another copy. Null: there is none now, ordinary memory will do. Any thread; may itself be null.
using HostMemory = std::function<std::shared_ptr<char>(size_t bytes)>;
// A tensor on the CPU of the type, sizes and strides of `source`, which is dense; in `memory` if there is some.
inline at::Tensor empty_on_host(const at::Tensor& source, const HostMemory& memory) {
  const at::TensorOptions options = at::TensorOptions().dtype(source.scalar_type());
  std::shared_ptr<char> here;
  if (memory != nullptr && source.nbytes() > 0) here = memory(source.nbytes());
  if (here == nullptr) return at::empty_strided(source.sizes(), source.strides(), options);
  char* const data = here.get();
  return at::from_blob(
      data, source.sizes(), source.strides(), [here = std::move(here)](void*) {}, options);
}

class DeviceBackend {
 public:
  using Copied = absl::AnyInvocable<void(StatusOr<std::vector<at::Tensor>>)>;

  virtual ~DeviceBackend() = default;
  // How many of them this process may use, numbered from 0.
  virtual int device_count() const = 0;

  // Before the first use of these: what takes long is done here, at join. May block.
  virtual Status prepare(const std::vector<c10::Device>& devices) = 0;

  // What is queued now on the calling thread's current streams of these tensors' devices.
  virtual StatusOr<std::shared_ptr<const void>> mark(const std::vector<at::Tensor>& tensors) = 0;
  // Copies of contiguous `sources` on the CPU, in `memory`, taken when what `after` marks is done
  // (STREAM-2).
  virtual void to_host(std::vector<at::Tensor> sources, std::shared_ptr<const void> after,
                       HostMemory memory, Copied done) = 0;

  // REQUIRES: `devices` differ and exist.
  virtual StatusOr<std::shared_ptr<DeviceWork>> make_work(
      const std::vector<c10::Device>& devices) = 0;
  // Copies of `hosts`, dense tensors on the CPU, with their strides, each on its target. Calls
  // `done` when the copies are queued on the streams of `work` (STREAM-3), which has the targets.
  virtual void to_devices(std::vector<at::Tensor> hosts, std::vector<c10::Device> targets,
                          const std::shared_ptr<DeviceWork>& work, Copied done) = 0;

  // Ends what is under way with `why`, and refuses what comes. Idempotent.
  virtual void shutdown(const Status& why) = 0;
};

// What weft::cuda exports, as `weft_cuda_open` (cuda_library.cc).
using OpenDeviceBackend = void(const std::shared_ptr<Runtime>& runtime, const Logger& log,
                               StatusOr<std::shared_ptr<DeviceBackend>>* backend);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_DEVICE_BACKEND_H_
