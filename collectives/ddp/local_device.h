#ifndef WEFT_COLLECTIVES_DDP_LOCAL_DEVICE_H_
#define WEFT_COLLECTIVES_DDP_LOCAL_DEVICE_H_

// The device that this rank trains on.
//
//   net->to(weft::local_device());
//
// Threads: any.

#include "c10/core/Device.h"
#include "weft/common/api.h"
#include "weft/common/config.h"

namespace weft {

// The GPU with the number of this process on its machine (LOCAL_RANK and its like, as launch_info()
// reads them), counted anew from 0 where there are more processes than GPUs; the CPU where LibTorch
// sees none. Throws weft::Error, invalid_argument: variables of the launcher that are not numbers.
WEFT_API at::Device local_device(const Environment& environment = process_environment());

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_LOCAL_DEVICE_H_
