// weft::nccl: groups by NCCL, opened by the core at run time (internal/nccl_library.cc).

#include <cuda_runtime_api.h>

#include <cstdio>
#include <utility>

#include "c10/cuda/CUDAException.h"
#include "c10/cuda/CUDAFunctions.h"
#include "c10/cuda/CUDAGuard.h"
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/nccl/api.h"
#include "weft/collectives/internal/nccl/engine.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

// From here on NCCL can be told to take several ranks on one GPU.
constexpr int kFirstWithSharedDevices = 23003;

class NcclLibrary : public DeviceLibrary {
 public:
  NcclLibrary(const DeviceLibraryOptions& options, std::shared_ptr<const NcclApi> api, int device)
      : options_(options), api_(std::move(api)), device_(device) {}

  StatusOr<DeviceOffer> offer(bool first) override {
    try {
      return make_offer(first);
    } catch (...) {
      return status_from_current_exception();
    }
  }

  StatusOr<std::unique_ptr<DeviceEngine>> connect(const Membership& member, const std::string& id,
                                                  absl::FunctionRef<Status()> given_up,
                                                  absl::Time deadline) override {
    try {
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_));
      auto comm = std::make_unique<Comm>(api_, options_.runtime);
      WEFT_RETURN_IF_ERROR(comm->connect(member, id, given_up, deadline));
      return std::make_unique<NcclEngine>(options_.runtime, std::move(comm), options_.group, member,
                                          device_, options_.log);
    } catch (...) {
      return status_from_current_exception();
    }
  }

 private:
  StatusOr<DeviceOffer> make_offer(bool first) {
    DeviceOffer out;
    cudaDeviceProp about{};
    C10_CUDA_CHECK(cudaGetDeviceProperties(&about, device_));
    char address[32];
    std::snprintf(address, sizeof address, "%04x:%02x:%02x", about.pciDomainID, about.pciBusID,
                  about.pciDeviceID);
    out.address = address;
    out.library = api_->text();
    out.shared = options_.shares_devices && api_->version >= kFirstWithSharedDevices;
    if (!first) return out;
    ncclUniqueId id{};
    if (const ncclResult_t got = api_->get_unique_id(&id); got != ncclSuccess) {
      return annotate(api_->error(got, nullptr), "ncclGetUniqueId");
    }
    out.id.assign(id.internal, sizeof id.internal);
    return out;
  }

  const DeviceLibraryOptions options_;
  const std::shared_ptr<const NcclApi> api_;
  const int device_;
};

StatusOr<std::unique_ptr<DeviceLibrary>> open_library(const DeviceLibraryOptions& options) {
  WEFT_ASSIGN_OR_RETURN(auto api, NcclApi::open(options.file));
  const int count = c10::cuda::device_count();
  if (count == 0) return make_error(ErrorKind::kUnavailable, "backend nccl: there is no GPU");
  const int device = options.device.has_value() ? *options.device : c10::cuda::current_device();
  if (device < 0 || device >= count) {
    return make_error(ErrorKind::kInvalidArgument,
                      cat("backend nccl: there is no cuda:", device, ", of ", count, " GPUs"));
  }
  return std::make_unique<NcclLibrary>(options, std::move(api), device);
}

}  // namespace
}  // namespace weft::internal

extern "C" __attribute__((visibility("default"))) void weft_nccl_open(
    const weft::internal::DeviceLibraryOptions& options,
    weft::StatusOr<std::unique_ptr<weft::internal::DeviceLibrary>>* library) {
  try {
    *library = weft::internal::open_library(options);
  } catch (...) {
    *library = weft::status_from_current_exception();
  }
}
