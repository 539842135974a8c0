#include "weft/collectives/internal/nccl_library.h"

#include <dlfcn.h>

#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

constexpr char kNcclLibrary[] = "libweft_nccl.so";
constexpr char kNcclOpen[] = "weft_nccl_open";

Status no_nccl(const char* what) {
  const char* const reason = ::dlerror();
  return make_error(ErrorKind::kUnavailable,
                    cat("weft::nccl ", what, ": ", reason == nullptr ? "no reason given" : reason));
}

}  // namespace

StatusOr<std::unique_ptr<DeviceLibrary>> open_nccl_library(const DeviceLibraryOptions& options) {
  // Found beside this library, by its own search path.
  void* const library = ::dlopen(kNcclLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return no_nccl("cannot be loaded");
  auto* const open = reinterpret_cast<OpenDeviceLibrary*>(::dlsym(library, kNcclOpen));
  if (open == nullptr) return no_nccl("is not the one of this build");
  StatusOr<std::unique_ptr<DeviceLibrary>> out =
      make_error(ErrorKind::kInternal, "weft::nccl gave no answer");
  open(options, &out);
  return out;
}

}  // namespace weft::internal
