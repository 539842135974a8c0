#include "weft/rpc/internal/device/cuda_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "weft/rpc/spi/device_copies.h"

namespace weft::internal {
namespace {

constexpr char kLibrary[] = "libweft_cuda.so";

Status cannot_be_used(const char* what) {
  const char* reason = ::dlerror();
  return make_error(
      ErrorKind::kUnavailable,
      absl::StrCat("weft::cuda ", what, ": ", reason == nullptr ? "no reason is given" : reason));
}

// What `Open`, exported under that name, gives. Found beside this library, by its own search path.
template <class Open, class Opened>
StatusOr<Opened> open(const char* name, const std::shared_ptr<Runtime>& runtime,
                      const Logger& log) {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return cannot_be_used("cannot be loaded");
  auto* exported = reinterpret_cast<Open*>(::dlsym(library, name));
  if (exported == nullptr) return cannot_be_used("is not the one of this build");
  StatusOr<Opened> opened = make_error(ErrorKind::kInternal, "weft::cuda gave no answer");
  exported(runtime, log, &opened);
  return opened;
}

}  // namespace

StatusOr<std::shared_ptr<DeviceBackend>> open_cuda_library(const std::shared_ptr<Runtime>& runtime,
                                                           const Logger& log) {
  return open<OpenDeviceBackend, std::shared_ptr<DeviceBackend>>("weft_cuda_open", runtime, log);
}

}  // namespace weft::internal

namespace weft {

StatusOr<std::shared_ptr<DeviceCopies>> open_device_copies(const std::shared_ptr<Runtime>& runtime,
                                                           const Logger& log) {
  return internal::open<internal::OpenDeviceCopies, std::shared_ptr<DeviceCopies>>(
      "weft_cuda_open_copies", runtime, log);
}

}  // namespace weft
