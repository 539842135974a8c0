// What a worker says of the parts that it has.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/service.h"
#include "weft/rpc/inspection.h"

namespace weft::ps::internal {
namespace {
constexpr size_t kHotKeysShown = 20;  // of each part
}

std::map<std::string, PartReport> PsService::reports() const {
  std::map<std::string, PartReport> out;
  for (const auto& [name, part] : parts_by_name()) {
    const PartIdentity& identity = part->identity();
    const bool made_here = identity.home() == identity.self.name;
    if (made_here || !out.contains(name.first)) out[name.first] = part->report();
  }
  return out;
}

void PsService::put_debug_info(std::map<std::string, int64_t>* out) const {
  PartReport sum;
  const std::vector<PartRef> all = parts();
  for (const PartRef& part : all) {
    const PartReport one = part->report();
    sum.clients += one.clients;
    sum.held += one.held;
    sum.parked += one.parked;
    sum.rows += one.rows;
    sum.bytes += one.bytes;
    sum.remembered += one.remembered;
  }
  int64_t waiting = 0;
  {
    MutexLock lock(&lanes_mutex_);
    for (const auto& [to, lane] : lanes_) waiting += lane.bytes;
  }
  (*out)["ps_waiting_bytes"] = waiting;  // small operations behind a message
  (*out)["ps_requests"] = requests_.load();
  (*out)["ps_messages"] = messages_.load();
  (*out)["ps_tables"] = static_cast<int64_t>(all.size());
  (*out)["ps_clients"] = static_cast<int64_t>(sum.clients);
  (*out)["ps_rows"] = sum.rows;
  (*out)["ps_bytes"] = sum.bytes;
  (*out)["ps_remembered"] = static_cast<int64_t>(sum.remembered);
  (*out)["ps_waiting_pulls"] = static_cast<int64_t>(sum.parked);
  (*out)["ps_held_pushes"] = static_cast<int64_t>(sum.held);
}

void PsService::put_inspection(Inspection* out) const {
  const std::vector<PartRef> all = parts();
  if (all.empty()) return;
  Inspection::Table& table = out->table(
      "ps_tables",
      {"table", "part", "definition", "version", "clients", "rows", "bytes", "waiting", "held"});
  for (const PartRef& part : all) {
    const PartReport r = part->report();
    const bool room =
        table.add({part->identity().table, static_cast<int64_t>(part->identity().index),
                   to_string(part->identity().definition), static_cast<int64_t>(r.version),
                   static_cast<int64_t>(r.clients), r.rows, r.bytes, static_cast<int64_t>(r.parked),
                   static_cast<int64_t>(r.held)});
    if (!room) break;
  }
  Inspection::Table& keys = out->table("ps_keys", {"table", "part", "key", "pushes", "excess"});
  for (const PartRef& part : all) {
    for (const HotKeys::Key& one : part->hot_keys().top(kHotKeysShown)) {
      const bool room = keys.add({part->identity().table, int64_t{part->identity().index},
                                  absl::StrCat(one.key), one.pushes, one.excess});
      if (!room) return;
    }
  }
}

}  // namespace weft::ps::internal
