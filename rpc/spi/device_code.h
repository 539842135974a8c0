#ifndef WEFT_RPC_SPI_DEVICE_CODE_H_
#define WEFT_RPC_SPI_DEVICE_CODE_H_

// Devices as numbers, as they travel (proto/rpc.proto, DeviceRecord). Free functions; any thread.

#include <cstdint>
#include <optional>
#include <string>

#include "c10/core/Device.h"
#include "weft/common/api.h"

namespace weft {

using DeviceCode = uint32_t;                      // kind and index, as on the wire
inline constexpr DeviceCode kCpuCode = 0;         // host memory
inline constexpr DeviceCode kCudaCode = 0x100;    // first GPU; the next is one more
inline constexpr DeviceCode kMostDevices = 0x80;  // what LibTorch's index of a device can count

// REQUIRES: the CPU or a CUDA device with an index; no other device travels.
inline DeviceCode device_code(c10::Device device) {
  return device.is_cpu() ? kCpuCode : kCudaCode + static_cast<DeviceCode>(device.index());
}
// Nothing for a number that stands for no device.
WEFT_API std::optional<c10::Device> device_of_code(DeviceCode code);
// "cuda:1".
WEFT_API std::string device_text(DeviceCode code);

}  // namespace weft

#endif  // WEFT_RPC_SPI_DEVICE_CODE_H_
