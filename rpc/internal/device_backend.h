#ifndef WEFT_RPC_INTERNAL_DEVICE_BACKEND_H_
#define WEFT_RPC_INTERNAL_DEVICE_BACKEND_H_

// DeviceBackend: devices whose tensors a worker can send and receive. The core knows this interface
// and no device; weft::cuda is the one that is opened when devices are used, tests bring their own.

#include <memory>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"

namespace weft::internal {

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  // How many of them this process may use, numbered from 0.
  virtual int device_count() const = 0;
};

// What weft::cuda exports, as `weft_cuda_open` (cuda_library.cc).
using OpenDeviceBackend = void(const std::shared_ptr<Runtime>& runtime, const Logger& log,
                               StatusOr<std::shared_ptr<DeviceBackend>>* backend);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_BACKEND_H_
