#include "weft/collectives/ddp/local_device.h"

#include "ATen/detail/CUDAHooksInterface.h"
#include "weft/common/error.h"
#include "weft/common/launch_info.h"

namespace weft {

at::Device local_device(const Environment& environment) {
  const Config config = value_or_throw(Config::from_environment(environment));
  const LaunchInfo launch = value_or_throw(launch_info(config, environment));
  const int count = at::detail::getCUDAHooks().deviceCount();
  if (count < 1) return at::Device(at::kCPU);
  return {at::kCUDA, static_cast<c10::DeviceIndex>(launch.local_rank % count)};
}

}  // namespace weft
