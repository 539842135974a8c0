#include "weft/rpc/worker_key.h"

#include "absl/strings/str_cat.h"
#include "weft/rpc/worker.h"

namespace weft {

WorkerInfo info_of(const Worker& worker, const WorkerKey& key) {
  const StatusOr<WorkerInfo> info = worker.try_get_worker_info(key.id.value());
  if (info.ok() && info->incarnation == key.incarnation.value()) return *info;
  return WorkerInfo{to_string(key), key.id.value(), key.incarnation.value()};
}

std::string to_string(const WorkerKey& key) {
  return absl::StrCat("worker ", to_string(key.id), " (", to_string(key.incarnation), ")");
}

}  // namespace weft
