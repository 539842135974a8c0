#ifndef WEFT_RPC_SPI_DEVICE_COPIES_H_
#define WEFT_RPC_SPI_DEVICE_COPIES_H_

// DeviceCopies: bytes between tensors on GPUs and host memory, piece by piece through pinned slots, for
// what works on plain memory: process groups. It is what messages use (docs/devices.md), without a
// worker; each has slots of its own, 32 of 1 MiB, and a thread, from the first copy to the end.
//
// Threads: all methods from anywhere.

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/any_invocable.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"

namespace weft {

class DeviceCopies {
 public:
  // A point in the queues of devices.
  using Mark = std::shared_ptr<const void>;

  virtual ~DeviceCopies() = default;  // as shutdown()
  // What the calling thread has queued until now on its current streams of these tensors' devices.
  virtual StatusOr<Mark> mark(const std::vector<at::Tensor>& tensors) = 0;
  // from[i] into to[i], contiguous tensors of equal size; all of one list are on the CPU, those of the
  // other on GPUs. Begins when what `after` marks is done; without tensors it waits for that alone.
  // `done`: once, when the bytes are there, or with an error; on a thread of this, short. Holds the
  // tensors until then, and no thread waits for a device.
  virtual void copy(std::vector<at::Tensor> from, std::vector<at::Tensor> to, Mark after,
                    absl::AnyInvocable<void(Status)> done) = 0;
  // Ends what is under way with `why`, and refuses what comes. Waits for its thread. Idempotent.
  virtual void shutdown(const Status& why) = 0;
};

// Opens weft::cuda. Error, kind unavailable: it cannot be loaded; the loader's reason.
WEFT_API StatusOr<std::shared_ptr<DeviceCopies>> open_device_copies(
    const std::shared_ptr<Runtime>& runtime, const Logger& log);

namespace internal {
// What weft::cuda exports, as `weft_cuda_open_copies`.
using OpenDeviceCopies = void(const std::shared_ptr<Runtime>& runtime, const Logger& log,
                              StatusOr<std::shared_ptr<DeviceCopies>>* copies);
}  // namespace internal
}  // namespace weft

#endif  // WEFT_RPC_SPI_DEVICE_COPIES_H_
