#include "weft/rpc/internal/cuda_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

constexpr char kLibrary[] = "libweft_cuda.so";
constexpr char kOpen[] = "weft_cuda_open";

Status cannot_be_used(const char* what) {
  const char* reason = ::dlerror();
  return make_error(ErrorKind::kUnavailable,
                    absl::StrCat("join: device_maps or devices are given, but weft::cuda ", what,
                                 ": ", reason == nullptr ? "no reason is given" : reason));
}

}  // namespace

StatusOr<std::shared_ptr<DeviceBackend>> open_cuda_library(const std::shared_ptr<Runtime>& runtime,
                                                           const Logger& log) {
  // Found beside this library, by its own search path.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return cannot_be_used("cannot be loaded");
  auto* open = reinterpret_cast<OpenDeviceBackend*>(::dlsym(library, kOpen));
  if (open == nullptr) return cannot_be_used("is not the one of this build");
  StatusOr<std::shared_ptr<DeviceBackend>> backend =
      make_error(ErrorKind::kInternal, "weft::cuda gave no answer");
  open(runtime, log, &backend);
  return backend;
}

}  // namespace weft::internal
