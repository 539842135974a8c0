#include "weft/rpc/spi/device_code.h"

#include "absl/strings/str_cat.h"

namespace weft {

std::optional<c10::Device> device_of_code(DeviceCode code) {
  if (code == kCpuCode) return c10::Device(c10::kCPU);
  if (code < kCudaCode || code - kCudaCode >= kMostDevices) return std::nullopt;
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(code - kCudaCode));
}

std::string device_text(DeviceCode code) {
  const std::optional<c10::Device> device = device_of_code(code);
  return device.has_value() ? device->str() : absl::StrCat("device number ", code);
}

}  // namespace weft
