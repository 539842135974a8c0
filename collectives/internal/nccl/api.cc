#include "weft/collectives/internal/nccl/api.h"

#include <dlfcn.h>

#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

// Communicators that do not block, which deadlines need.
constexpr int kOldest = 21400;

std::string version_text(int version) {
  // 2.8 and older count by 1,000.
  const int major = version < 10'000 ? version / 1000 : version / 10'000;
  const int minor = version < 10'000 ? version % 1000 / 100 : version % 10'000 / 100;
  return cat("NCCL ", major, ".", minor, ".", version % 100);
}

Status cannot_use(std::string_view file, std::string_view why) {
  return make_error(ErrorKind::kUnavailable, cat("backend nccl cannot use ", file, ": ", why));
}

}  // namespace

StatusOr<std::shared_ptr<const NcclApi>> NcclApi::open(const std::string& file) {
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = ::dlerror();
    return cannot_use(file, reason == nullptr ? "no reason given" : reason);
  }
  auto api = std::make_shared<NcclApi>();
  std::string_view missing;
  const auto find = [&](std::string_view name, auto* function, bool needed = true) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(
        ::dlsym(library, std::string(name).c_str()));
    if (*function == nullptr && needed && missing.empty()) missing = name;
  };
  find("ncclGetVersion", &api->get_version);
  if (!missing.empty()) return cannot_use(file, "it has no ncclGetVersion");
  if (const ncclResult_t got = api->get_version(&api->version); got != ncclSuccess) {
    return cannot_use(file, cat("ncclGetVersion gave ", static_cast<int>(got)));
  }
  if (api->version < kOldest) {
    return cannot_use(file, cat("it is ", version_text(api->version), ", and ",
                                version_text(kOldest), " or newer is needed"));
  }
  find("ncclGetUniqueId", &api->get_unique_id);
  find("ncclGetErrorString", &api->get_error_string);
  find("ncclCommInitRankConfig", &api->comm_init_rank_config);
  find("ncclCommFinalize", &api->comm_finalize);
  find("ncclCommDestroy", &api->comm_destroy);
  find("ncclCommAbort", &api->comm_abort);
  find("ncclCommGetAsyncError", &api->comm_get_async_error);
  find("ncclGroupStart", &api->group_start);
  find("ncclGroupEnd", &api->group_end);
  find("ncclAllReduce", &api->all_reduce);
  find("ncclBroadcast", &api->broadcast);
  find("ncclReduce", &api->reduce);
  find("ncclAllGather", &api->all_gather);
  find("ncclReduceScatter", &api->reduce_scatter);
  find("ncclSend", &api->send);
  find("ncclRecv", &api->recv);
  find("ncclRedOpCreatePreMulSum", &api->red_op_create_premul_sum);
  find("ncclRedOpDestroy", &api->red_op_destroy);
  find("ncclGetLastError", &api->get_last_error, false);
  find("ncclCommSplit", &api->comm_split, false);
  if (!missing.empty()) {
    return cannot_use(file, cat("it is ", version_text(api->version), " and has no ", missing));
  }
  return std::shared_ptr<const NcclApi>(std::move(api));
}

std::string NcclApi::text() const { return version_text(version); }

Status NcclApi::error(ncclResult_t result, ncclComm_t comm) const {
  std::string why = cat(text(), ": ", get_error_string(result));
  const char* const last = get_last_error == nullptr ? nullptr : get_last_error(comm);
  if (last != nullptr && *last != '\0') cat_to(&why, " (", last, ")");
  const bool remote = result == ncclRemoteError;
  return make_error(remote ? ErrorKind::kPeerLost : ErrorKind::kInternal, why);
}

}  // namespace weft::internal
