// What a server does when tables are restored: their parts are loaded aside, and then take the place of
// those that are there.

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/service.h"

namespace weft::ps::internal {
namespace {
constexpr int kMostListed = 4096;  // of a table, as proto/ps.proto has it
}

void PsService::on_restore(CallContext& call, Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = unpack_bytes(std::move(arguments));
  v1::PsRestore request;
  if (!bytes.ok() || !request.ParseFromString(*bytes) || request.number() == 0 ||
      request.step() < 1 || request.step() > 5 ||
      (request.step() == 1 &&
       (request.servers().empty() || request.servers_size() > kMostListed))) {
    return reply(make_error(ErrorKind::kProtocol, "message about a restore: it is nonsense"));
  }
  const CutName name{key_of(call.caller()), request.number()};
  if (request.step() <= 2) {
    if (asked_again(name, request.step(), &reply)) return;
    const auto work = [this, name, request]() -> StatusOr<std::string> {
      WEFT_RETURN_IF_ERROR(request.step() == 1 ? load_snapshot(name, request)
                                               : commit_restore(name));
      return std::string();
    };
    return start_files(name, request.step(), work, std::move(reply));
  }
  if (request.step() == 4) {
    look_again(request);
    return reply(pack_bytes(""));
  }
  if (request.step() == 5) {
    MutexLock lock(&mutex_);
    const bool serves = closed_.ok() && limits_ != nullptr;
    lock.unlock();
    if (serves) return reply(pack_bytes(""));
    return reply(make_error(
        absl::StatusCode::kUnavailable, ErrorKind::kState,
        absl::StrCat("worker '", worker().name(), "' serves no tables: make a ps::Server there")));
  }
  std::shared_ptr<Loaded> dropped;
  {
    MutexLock lock(&mutex_);
    if (loaded_ != nullptr && loaded_->name == name) dropped = std::exchange(loaded_, nullptr);
  }
  reply(pack_bytes(""));
}

Status PsService::load_snapshot(const CutName& name, const v1::PsRestore& request) {
  Files& files = context_.runtime->files();
  v1::PsSnapshot manifest;
  uint64_t hash = 0;
  WEFT_RETURN_IF_ERROR(read_manifest(files, request.path(), &manifest, &hash));
  if (hash != request.hash()) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("'", worker().name(), "' sees another snapshot at '",
                                   request.path(), "' than the client that restores it"));
  }
  const std::string folder = request.path().substr(0, request.path().rfind('/'));
  const std::set<std::string> wanted(request.tables().begin(), request.tables().end());
  auto loaded = std::make_shared<Loaded>();
  loaded->name = name;
  for (const v1::PsSnapshot::Table& table : manifest.tables()) {
    if (!wanted.empty() && !wanted.contains(table.name())) continue;
    TableReader reader(files, folder, manifest, table);
    WEFT_RETURN_IF_ERROR(reader.open());
    auto restored = std::make_shared<RestoredTable>();
    restored->snapshot = request.path();
    restored->table = table.name();
    for (const v1::PsSnapshot::Client& client : table.clients()) {
      restored->pushes[{get(client.life()), client.number()}] = client.pushes();
    }
    loaded->tables[table.name()] = restored;
    WEFT_RETURN_IF_ERROR(load_table(reader, table.name(), request, restored, &loaded->parts));
  }
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return closed_;
  if (limits_ == nullptr) return make_error(ErrorKind::kState, "the server has ended");
  loaded_ = std::move(loaded);
  return absl::OkStatus();
}

Status PsService::load_table(const TableReader& reader, const std::string& table,
                             const v1::PsRestore& request,
                             const std::shared_ptr<const RestoredTable>& from,
                             std::vector<PartRef>* out) {
  OpenRequest open{table, reader.definition(), {}, 0};
  open.servers.assign(request.servers().begin(), request.servers().end());
  const size_t servers = open.servers.size();
  const std::string what = absl::StrCat("table '", table, "' at '", worker().name(), "'");
  const bool copied = in_map(*open.definition);
  if (open.definition->copies > 1 && servers < 2) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat(what, " has two copies, and wants two servers or more"));
  }
  const size_t parts = part_count(*open.definition, servers);
  for (size_t i = 0; i < parts; ++i) {
    if (open.servers[home_of(i, parts, servers)] != worker().name()) continue;
    open.index = static_cast<uint32_t>(i);
    std::shared_ptr<ServerLimits> limits;
    uint64_t id = 0;
    {
      MutexLock lock(&mutex_);
      WEFT_ASSIGN_OR_RETURN(const PartRef there, find(open));
      if (there != nullptr) WEFT_RETURN_IF_ERROR(check_same(open, *there));
      if (draining_) {
        return make_error(ErrorKind::kState, absl::StrCat("server '", worker().name(), "' drains"));
      }
      limits = limits_;
      id = ++last_part_;
    }
    WEFT_ASSIGN_OR_RETURN(
        const PartRef made,
        make_part(open, limits, id, copied ? std::optional<RangeMap>(RangeMap{}) : std::nullopt));
    WEFT_ASSIGN_OR_RETURN(LoadedPart loaded,
                          reader.load(open.servers, open.index, made->buffer_names()));
    if (Status s = made->restore(loaded.image, std::move(loaded.tensors), from); !s.ok()) {
      return annotate(s, what);
    }
    const uint64_t cap = open.definition->max_bytes;
    const int64_t bytes = made->report().bytes;
    if ((cap != 0 && static_cast<uint64_t>(bytes) > cap) || bytes > limits->table_bytes) {
      return make_error(
          ErrorKind::kResource,
          absl::StrCat(what, " would have rows of ", bytes, " bytes, and the most are ",
                       cap == 0 ? limits->table_bytes : static_cast<int64_t>(cap)));
    }
    out->push_back(made);
  }
  return absl::OkStatus();
}

Status PsService::commit_restore(const CutName& name) {
  std::shared_ptr<Loaded> loaded;
  {
    MutexLock lock(&mutex_);
    if (loaded_ != nullptr && loaded_->name == name) loaded = std::exchange(loaded_, nullptr);
  }
  if (loaded == nullptr) {
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("nothing of the restore is left at '", worker().name(), "'"));
  }
  bool copied = false;
  for (const PartRef& part : loaded->parts) {
    copied |= in_map(part->identity().definition);
    WEFT_RETURN_IF_ERROR(install(part, loaded->tables.at(part->identity().table)));
  }
  if (!copied) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(Keeper * keeper, this->keeper());
  keeper->tick_soon();
  return absl::OkStatus();
}

Status PsService::install(const PartRef& part, const std::shared_ptr<const RestoredTable>& from) {
  const PartIdentity& identity = part->identity();
  RangeMap map;
  if (in_map(identity.definition)) {
    WEFT_ASSIGN_OR_RETURN(map, claim_anew(identity));
    part->own(map, weak_from_this());
  }
  PartRef before;
  std::vector<WorkerKey> gone;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_;
    if (limits_ == nullptr) return make_error(ErrorKind::kState, "the server has ended");
    PartRef& place = by_name_[{identity.table, identity.index}];
    before = std::exchange(place, part);
    if (before != nullptr) {
      replaced_[before->identity().id] = from;
      by_id_.erase(before->identity().id);
    }
    by_id_.emplace(identity.id, part);
    if (map.epoch != 0) epochs_[{identity.table, identity.index}] = map.epoch;
    gone.assign(gone_.begin(), gone_.end());
  }
  if (before != nullptr) {
    before->close(make_error(ErrorKind::kState, absl::StrCat("the table was restored from '",
                                                             from->snapshot, "'; open it again")));
  }
  for (const WorkerKey& worker : gone) part->worker_gone(worker);
  return absl::OkStatus();
}

void PsService::look_again(const v1::PsRestore& request) {
  const std::set<std::string> tables(request.tables().begin(), request.tables().end());
  for (const auto& [name, part] : parts_by_name()) {
    if (in_map(part->identity().definition) && (tables.empty() || tables.contains(name.first))) {
      read_map(part);
    }
  }
}

Status PsService::say_restored(uint64_t part, const ClientKey& client) const {
  std::shared_ptr<const RestoredTable> table;
  {
    MutexLock lock(&mutex_);
    const auto at = replaced_.find(part);
    if (at == replaced_.end()) return absl::OkStatus();
    table = at->second;
  }
  return restored_since(*table, client);
}

}  // namespace weft::ps::internal
