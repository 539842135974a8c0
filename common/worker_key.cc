#include "weft/common/worker_key.h"

#include "absl/strings/str_cat.h"

namespace weft {

std::string to_string(const WorkerInfo& info) {
  return absl::StrCat("'", info.name, "' (id ", info.id, ", incarnation ",
                      absl::Hex(info.incarnation, absl::kZeroPad16), ")");
}

std::string to_string(const WorkerKey& key) {
  return absl::StrCat("worker ", to_string(key.id), " (", to_string(key.incarnation), ")");
}

}  // namespace weft
