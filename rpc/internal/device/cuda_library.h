#ifndef WEFT_RPC_INTERNAL_DEVICE_CUDA_LIBRARY_H_
#define WEFT_RPC_INTERNAL_DEVICE_CUDA_LIBRARY_H_

// Opens weft::cuda, the library with all that knows CUDA. A build without it, and a machine where
// it cannot be loaded, have weft all the same, for CPU tensors. Any thread.

#include <memory>

#include "weft/common/error.h"
#include "weft/common/log.h"
#include "weft/common/runtime.h"
#include "weft/rpc/internal/device/device_backend.h"

namespace weft::internal {

// Error, kind unavailable: the library cannot be loaded, with the loader's reason. Without a GPU
// there is a backend with no devices. The library stays loaded, as LibTorch's own CUDA code must.
StatusOr<std::shared_ptr<DeviceBackend>> open_cuda_library(const std::shared_ptr<Runtime>& runtime,
                                                           const Logger& log);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_DEVICE_CUDA_LIBRARY_H_
