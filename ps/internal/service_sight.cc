// What a worker says of the parts that it has.

#include <algorithm>
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

// Who has the copies of a part, and how far the backup's log is behind.
void PsService::put_ranges(const std::vector<PartRef>& parts, Inspection* out) {
  Inspection::Table& ranges = out->table(
      "ps_ranges",
      {"table", "part", "role", "epoch", "owner", "backup", "ready", "position", "unconfirmed"});
  for (const PartRef& part : parts) {
    const PartReport r = part->report();
    const bool copied = r.map.epoch != 0;
    const bool owns = r.role == ReplicaProtocol::Role::kOwner;
    const char* const role =
        owns ? "owner" : (r.role == ReplicaProtocol::Role::kBackup ? "backup" : "gone");
    const bool streams = owns && !r.map.backup.empty();
    const bool room = ranges.add(
        {part->identity().table, int64_t{part->identity().index}, std::string(role),
         static_cast<int64_t>(r.map.epoch), copied ? r.map.owner.name : part->identity().self.name,
         r.map.backup.name, int64_t{r.map.ready}, static_cast<int64_t>(r.position),
         streams ? static_cast<int64_t>(r.position - std::min(r.confirmed, r.position))
                 : int64_t{0}});
    if (!room) return;
  }
}

// `behind`: steps that a client is behind the one that has finished most.
void PsService::put_clients(const std::vector<PartRef>& parts, Inspection* out) const {
  Inspection::Table& clients = out->table(
      "ps_clients", {"table", "part", "worker", "client", "clock", "behind", "remembered"});
  for (const PartRef& part : parts) {
    const auto views = part->client_views();
    uint64_t most = 0;
    for (const auto& one : views) most = std::max(most, one.clock);
    for (const auto& one : views) {
      const StatusOr<WorkerInfo> info = worker().try_get_worker_info(one.key.worker.id.value());
      const bool there = info.ok() && info->incarnation == one.key.worker.incarnation.value();
      const bool room = clients.add(
          {part->identity().table, int64_t{part->identity().index},
           there ? info->name : absl::StrCat("worker ", one.key.worker.id.value(), ", gone"),
           static_cast<int64_t>(one.key.number), static_cast<int64_t>(one.clock),
           static_cast<int64_t>(most - one.clock), static_cast<int64_t>(one.remembered)});
      if (!room) return;
    }
  }
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
  put_ranges(all, out);
  put_clients(all, out);
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
