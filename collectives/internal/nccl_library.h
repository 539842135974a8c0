#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_LIBRARY_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_LIBRARY_H_

// Opens weft::nccl, the library with all that knows NCCL. A build without it, and a machine where
// it or libnccl.so.2 cannot be loaded, have the other backends all the same. Any thread.

#include <memory>

#include "weft/collectives/internal/device_engine.h"

namespace weft::internal {

// Error, kind unavailable, with the loader's reason: weft::nccl or libnccl cannot be loaded, or
// libnccl is too old. The library stays loaded, as LibTorch's own CUDA code must.
StatusOr<std::unique_ptr<DeviceLibrary>> open_nccl_library(const DeviceLibraryOptions& options);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_LIBRARY_H_
