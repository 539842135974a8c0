#ifndef WEFT_RPC_DEVICE_MAP_H_
#define WEFT_RPC_DEVICE_MAP_H_

// DeviceMap: where the tensors of calls to one worker belong there.
//
//   auto worker = weft::join({.device_maps = {{"ps0", {{{at::kCUDA, 0}, {at::kCUDA, 1}}}}}});
//
// Our cuda:0 stands for cuda:1 of ps0: arguments on the one arrive on the other, and results come
// back the other way. One to one: neither side may occur twice. A tensor on a device without an
// entry is an error, never a silent copy; CPU tensors stay on the CPU unless the CPU has an entry.
// docs/devices.md has the rest. A value type.

#include <utility>
#include <vector>

#include "c10/core/Device.h"

namespace weft {

// {one of our devices, one of the other worker's}. A list, so that what is said twice is seen.
using DeviceMap = std::vector<std::pair<c10::Device, c10::Device>>;

}  // namespace weft

#endif  // WEFT_RPC_DEVICE_MAP_H_
