// The cutter: asks servers and clients, step by step (proto/ps_snapshot.proto), and writes the manifest.

#include "weft/ps/internal/cutter.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "weft/common/trace.h"
#include "weft/proto/ps_snapshot.pb.h"
#include "weft/ps/internal/ask.h"
#include "weft/ps/internal/definition.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kPause = absl::Seconds(2);
constexpr absl::Duration kSnapshotTime = absl::Minutes(10);
constexpr absl::Duration kCleanUp = absl::Seconds(1);

enum class CutStep : uint32_t { kBegin = 1, kTake = 2, kWrite = 3, kDrop = 4 };
enum class HoldStep : uint32_t { kHold = 1, kRelease = 2 };

Status given_up(std::string_view what, const Status& why) {
  const std::string text =
      absl::StrCat("the cut was given up: ", std::string(what), ": ", std::string(why.message()));
  return make_error(ErrorKind::kUnavailable, text);
}

class Cutter {
 public:
  Cutter(PsService& service, std::string folder, const SnapshotOptions& options)
      : worker_(service.worker()),
        folder_(std::move(folder)),
        options_(options),
        number_(service.next_cut()),
        end_(deadline_after(worker_.now(), options.deadline.value_or(kSnapshotTime))) {}

  StatusOr<SnapshotInfo> run(const std::vector<std::string>& servers) {
    absl::Cleanup tidy = [this] { drop(); };
    WEFT_RETURN_IF_ERROR(read_before());
    WEFT_RETURN_IF_ERROR(begin(servers));
    const absl::Time then = worker_.now();
    Status held = hold();
    if (held.ok()) held = take();
    const Status released = release();
    if (const auto trace = trace_of(worker_)) {
      trace->complete("ps", "clients held", then, worker_.now() - then);
    }
    WEFT_RETURN_IF_ERROR(held);
    WEFT_RETURN_IF_ERROR(released);
    const absl::Duration pause = worker_.now() - then;
    WEFT_RETURN_IF_ERROR(write());
    WEFT_RETURN_IF_ERROR(put_in_place());
    WEFT_ASSIGN_OR_RETURN(SnapshotInfo info, info_of(path_in(folder_, kNewest), manifest_));
    info.held = pause;
    return info;
  }

 private:
  struct TableParts {
    TableDefinition definition{};
    std::vector<std::string> servers{};
    std::map<uint32_t, size_t> at{};  // by part: which of the servers
    std::set<ClientKey> clients{};
  };
  using NeedList = std::map<size_t, std::vector<v1::PsCut::Need>>;  // by server

  absl::Duration time_left() const { return std::max(absl::ZeroDuration(), end_ - worker_.now()); }
  absl::Duration pause_left() const {
    return std::max(absl::ZeroDuration(), std::min(end_, until_) - worker_.now());
  }

  // The first error, naming the server.
  StatusOr<std::vector<v1::PsCutDone>> ask_servers(CutStep step, const std::vector<v1::PsCut>& what,
                                                   absl::Duration deadline) {
    std::vector<Question> questions;
    for (size_t i = 0; i < servers_.size(); ++i) {
      v1::PsCut request = what[i];
      request.set_number(number_);
      request.set_step(static_cast<uint32_t>(step));
      questions.push_back({servers_[i], request.SerializeAsString()});
    }
    const auto answers =
        step == CutStep::kWrite
            ? ask_all_again(worker_, kCutMethod, kCutSignature, questions, deadline)
            : ask_all(worker_, kCutMethod, kCutSignature, questions, deadline);
    std::vector<v1::PsCutDone> out;
    for (size_t i = 0; i < answers.size(); ++i) {
      if (!answers[i].ok()) {
        return annotate(answers[i].status(), absl::StrCat("server '", servers_[i].name, "'"));
      }
      if (!out.emplace_back().ParseFromString(*answers[i])) {
        return make_error(ErrorKind::kProtocol, absl::StrCat("server '", servers_[i].name, "'"));
      }
    }
    return out;
  }

  Status begin(const std::vector<std::string>& servers);
  Status add_parts(size_t server, const v1::PsCutDone& done);
  Status hold();
  Status add_held(const WorkerInfo& at, const v1::PsHeld& held);
  Status take();
  Status release();
  Status write();
  Status read_before();
  Status put_in_place();
  Status remove_others();
  void drop();

  const Worker& worker_;
  const std::string folder_;
  const SnapshotOptions& options_;
  const uint64_t number_;
  const absl::Time end_;
  absl::Time until_{};  // of the cut
  std::vector<WorkerInfo> servers_;
  std::map<std::string, TableParts> tables_;
  std::map<WorkerInfo, std::vector<uint64_t>> holders_;  // workers with clients, and which
  std::map<ClientKey, std::string> table_of_;
  std::map<std::string, std::vector<v1::PsSnapshot::Client>> clients_;  // by table
  std::set<WorkerInfo> held_;
  NeedList needs_;
  v1::PsSnapshot manifest_;
  v1::PsSnapshot before_;  // the newest that is there; number 0: none
  bool newest_is_whole_ = false;
  bool in_place_ = false;
};

Status Cutter::begin(const std::vector<std::string>& servers) {
  for (const std::string& name : servers) {
    const StatusOr<WorkerInfo> info = worker_.try_get_worker_info(name);
    // The others may have all of its parts.
    if (info.ok()) servers_.push_back(*info);
  }
  const absl::Duration pause = options_.pause.value_or(kPause);
  v1::PsCut request;
  request.set_pause_us(static_cast<uint64_t>(absl::ToInt64Microseconds(pause)));
  for (const std::string& table : options_.tables) request.add_tables(table);
  until_ = worker_.now() + pause;
  const auto answers =
      ask_servers(CutStep::kBegin, std::vector<v1::PsCut>(servers_.size(), request), pause_left());
  if (!answers.ok()) return given_up("begin", answers.status());
  for (size_t i = 0; i < answers->size(); ++i) WEFT_RETURN_IF_ERROR(add_parts(i, (*answers)[i]));
  for (const std::string& table : options_.tables) {
    if (tables_.contains(table)) continue;
    return make_error(ErrorKind::kNotFound,
                      absl::StrCat("snapshot: no server has a table '", table, "'"));
  }
  for (const auto& [name, table] : tables_) {
    const size_t parts = part_count(table.definition, table.servers.size());
    if (table.at.size() == parts) continue;
    return given_up(
        absl::StrCat("table '", name, "'"),
        make_error(ErrorKind::kUnavailable, absl::StrCat(table.at.size(), " of its ", parts,
                                                         " parts are at the servers that answer")));
  }
  return absl::OkStatus();
}

Status Cutter::add_parts(size_t server, const v1::PsCutDone& done) {
  for (const v1::PsCutDone::Part& part : done.parts()) {
    WEFT_ASSIGN_OR_RETURN(const TableDefinition definition, get(part.definition()));
    TableParts& table = tables_[part.table()];
    if (table.at.empty()) {
      table.definition = definition;
      table.servers.assign(part.servers().begin(), part.servers().end());
    }
    const std::string what = absl::StrCat("table '", part.table(), "', part ", part.index());
    if (table.definition != definition || table.servers.empty() ||
        part.index() >= part_count(definition, table.servers.size())) {
      return make_error(ErrorKind::kProtocol, absl::StrCat(what, " is another at each server"));
    }
    if (!table.at.emplace(part.index(), server).second) {
      return given_up(what,
                      make_error(ErrorKind::kUnavailable, "two servers say that they own it"));
    }
    for (const v1::PsCutDone::Client& client : part.clients()) {
      const ClientKey key{get(client.worker()), client.number()};
      table_of_[key] = part.table();
      if (!table.clients.insert(key).second) continue;
      const StatusOr<WorkerInfo> info = worker_.try_get_worker_info(key.worker.id.value());
      if (!info.ok() || key_of(*info) != key.worker) {
        return given_up(to_string(key), make_error(ErrorKind::kUnavailable, "its worker is lost"));
      }
      holders_[*info].push_back(key.number);
    }
  }
  return absl::OkStatus();
}

Status Cutter::hold() {
  std::vector<Question> questions;
  std::vector<WorkerInfo> asked;
  for (const auto& [at, clients] : holders_) {
    v1::PsHold request;
    request.set_number(number_);
    request.set_step(static_cast<uint32_t>(HoldStep::kHold));
    request.set_pause_us(static_cast<uint64_t>(absl::ToInt64Microseconds(pause_left())));
    for (const uint64_t client : clients) request.add_clients(client);
    questions.push_back({at, request.SerializeAsString()});
    asked.push_back(at);
    held_.insert(at);
  }
  const auto answers = ask_all(worker_, kHoldMethod, kCutSignature, questions, pause_left());
  for (size_t i = 0; i < answers.size(); ++i) {
    const std::string who = absl::StrCat("clients at '", asked[i].name, "'");
    if (!answers[i].ok()) return given_up(who, answers[i].status());
    v1::PsHeld held;
    if (!held.ParseFromString(*answers[i])) return make_error(ErrorKind::kProtocol, who);
    WEFT_RETURN_IF_ERROR(add_held(asked[i], held));
  }
  return absl::OkStatus();
}

Status Cutter::add_held(const WorkerInfo& at, const v1::PsHeld& held) {
  std::vector<uint64_t> there;
  for (const v1::PsHeld::Client& client : held.clients()) {
    const ClientKey key{key_of(at), client.number()};
    const auto table = table_of_.find(key);
    if (table == table_of_.end()) {
      return make_error(ErrorKind::kProtocol, absl::StrCat(to_string(key), " was not asked for"));
    }
    there.push_back(client.number());
    TableParts& parts = tables_[table->second];
    for (const v1::PsHeld::Open& open : client.open()) {
      const auto server = parts.at.find(open.part());
      if (server == parts.at.end()) {
        return make_error(ErrorKind::kProtocol,
                          absl::StrCat(to_string(key), ": part ", open.part()));
      }
      v1::PsCut::Need need;
      need.set_table(table->second);
      need.set_index(open.part());
      put(key.worker, need.mutable_worker());
      need.set_client(key.number);
      need.set_push(open.push());
      need.set_clock(open.clock());
      needs_[server->second].push_back(std::move(need));
    }
    v1::PsSnapshot::Client kept;
    kept.set_worker(at.name);
    put(key.worker, kept.mutable_life());
    kept.set_number(key.number);
    kept.set_pushes(client.pushes());
    kept.set_clock(client.clock());
    kept.set_position(client.position());
    clients_[table->second].push_back(std::move(kept));
  }
  holders_[at] = std::move(there);  // the others have left
  return absl::OkStatus();
}

Status Cutter::take() {
  std::vector<v1::PsCut> requests(servers_.size());
  for (auto& [server, needs] : needs_) {
    for (v1::PsCut::Need& need : needs) *requests[server].add_needs() = std::move(need);
  }
  const auto taken = ask_servers(CutStep::kTake, requests, pause_left());
  return taken.ok() ? absl::OkStatus() : given_up("take", taken.status());
}

Status Cutter::release() {
  std::vector<Question> questions;
  std::vector<WorkerInfo> asked;
  for (const WorkerInfo& at : held_) {
    v1::PsHold request;
    request.set_number(number_);
    request.set_step(static_cast<uint32_t>(HoldStep::kRelease));
    for (const uint64_t client : holders_[at]) request.add_clients(client);
    questions.push_back({at, request.SerializeAsString()});
    asked.push_back(at);
  }
  const auto answers =
      ask_all(worker_, kHoldMethod, kCutSignature, questions, pause_left() + kCleanUp);
  for (size_t i = 0; i < answers.size(); ++i) {
    const std::string who = absl::StrCat("clients at '", asked[i].name, "'");
    v1::PsHeld said;
    if (!answers[i].ok()) return given_up(who, answers[i].status());
    if (said.ParseFromString(*answers[i]) && said.throughout()) continue;
    return given_up(who, make_error(ErrorKind::kUnavailable, "they went on before it was done"));
  }
  return absl::OkStatus();
}

Status Cutter::write() {
  manifest_.set_number(before_.number() + 1);
  const WorkerInfo self = worker_.info();
  std::vector<v1::PsCut> requests(servers_.size());
  for (size_t i = 0; i < servers_.size(); ++i) {
    const std::string name = file_name(manifest_.number(), self.incarnation, number_, i);
    manifest_.add_files()->set_name(name);
    requests[i].set_path(path_in(folder_, name));
  }
  const auto written = ask_servers(CutStep::kWrite, requests, time_left());
  if (!written.ok()) return annotate(written.status(), "snapshot");
  for (size_t i = 0; i < servers_.size(); ++i) {
    v1::PsSnapshot::File* file = manifest_.mutable_files(static_cast<int>(i));
    file->set_bytes((*written)[i].bytes());
    file->set_hash((*written)[i].hash());
  }
  for (const auto& [name, parts] : tables_) {
    v1::PsSnapshot::Table* table = manifest_.add_tables();
    table->set_name(name);
    put(parts.definition, table->mutable_definition());
    for (const std::string& server : parts.servers) table->add_servers(server);
    for (v1::PsSnapshot::Client& client : clients_[name]) {
      *table->add_clients() = std::move(client);
    }
    for (const auto& [part, server] : parts.at) table->add_files(static_cast<uint32_t>(server));
  }
  return absl::OkStatus();
}

// The number of the newest that is there, and whether it is to be kept.
Status Cutter::read_before() {
  Files& files = worker_.runtime().files();
  const std::string newest = path_in(folder_, kNewest);
  uint64_t hash = 0;
  Status read = read_manifest(files, newest, &before_, &hash);
  if (absl::IsNotFound(read)) {
    // A cutter that has ended between two renames.
    const Status named = files.rename(path_in(folder_, kNext), newest);
    if (absl::IsNotFound(named)) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(named);
    read = read_manifest(files, newest, &before_, &hash);
  }
  newest_is_whole_ = read.ok();
  if (read.ok()) return read;
  before_.Clear();
  // It is overwritten; what is kept is the one before it.
  const Status older = read_manifest(files, path_in(folder_, kPrevious), &before_, &hash);
  before_.set_number(older.ok() ? before_.number() + 1 : 1);
  return absl::OkStatus();
}

Status Cutter::put_in_place() {
  Files& files = worker_.runtime().files();
  WEFT_RETURN_IF_ERROR(write_manifest(files, path_in(folder_, kNext), manifest_));
  in_place_ = true;
  WEFT_RETURN_IF_ERROR(files.sync_names(folder_));
  if (newest_is_whole_) {
    WEFT_RETURN_IF_ERROR(files.rename(path_in(folder_, kNewest), path_in(folder_, kPrevious)));
  }
  WEFT_RETURN_IF_ERROR(files.rename(path_in(folder_, kNext), path_in(folder_, kNewest)));
  WEFT_RETURN_IF_ERROR(files.sync_names(folder_));
  return remove_others();
}

// Files of older snapshots, and of those that were never there: a server or cutter has ended while it
// wrote. Nothing is removed before the names above survive a stop of the machine.
Status Cutter::remove_others() {
  Files& files = worker_.runtime().files();
  v1::PsSnapshot previous;
  uint64_t hash = 0;
  const Status read = read_manifest(files, path_in(folder_, kPrevious), &previous, &hash);
  if (!read.ok() && !absl::IsNotFound(read)) return absl::OkStatus();  // its files may be of use
  std::set<std::string> named;
  for (const v1::PsSnapshot* one : {&manifest_, &previous}) {
    for (const v1::PsSnapshot::File& file : one->files()) named.insert(file.name());
  }
  WEFT_ASSIGN_OR_RETURN(const std::vector<std::string> there, files.list(folder_));
  for (const std::string& name : there) {
    const bool of_a_manifest = absl::StartsWith(name, absl::StrCat(std::string(kNext), "."));
    if ((!is_file_name(name) && !of_a_manifest) || named.contains(name)) continue;
    const Status removed = files.remove(path_in(folder_, name));
    if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  }
  return absl::OkStatus();
}

// Nothing stays of a snapshot that is not there. What does not hear of it ends with its time.
void Cutter::drop() {
  if (in_place_) return;
  (void)ask_servers(CutStep::kDrop, std::vector<v1::PsCut>(servers_.size()), kCleanUp);
  for (const v1::PsSnapshot::File& file : manifest_.files()) {
    (void)worker_.runtime().files().remove(path_in(folder_, file.name()));  // it may not be there
  }
}

}  // namespace

StatusOr<SnapshotInfo> info_of(const std::string& path, const v1::PsSnapshot& manifest) {
  SnapshotInfo out;
  out.path = path;
  out.number = manifest.number();
  for (const v1::PsSnapshot::Table& table : manifest.tables()) {
    SnapshotTable one;
    one.name = table.name();
    WEFT_ASSIGN_OR_RETURN(one.definition, get(table.definition()));
    one.servers.assign(table.servers().begin(), table.servers().end());
    for (const v1::PsSnapshot::Client& client : table.clients()) {
      one.clients.push_back({client.worker(), client.pushes(), client.clock(), client.position()});
    }
    out.tables.push_back(std::move(one));
  }
  return out;
}

StatusOr<SnapshotInfo> take_snapshot(PsService& service, const std::vector<std::string>& servers,
                                     std::string_view folder, const SnapshotOptions& options) {
  const absl::Duration pause = options.pause.value_or(kPause);
  if (folder.empty() || pause <= absl::ZeroDuration() || pause > absl::Minutes(10)) {
    return make_error(ErrorKind::kInvalidArgument,
                      "snapshot: it needs a folder, and a pause above 0 and of at most 10 minutes");
  }
  const std::shared_ptr<TraceWriter> trace = trace_of(service.worker());
  const TraceSpan span(trace.get(), &service.worker().runtime().clock(), "ps", "snapshot");
  return Cutter(service, std::string(folder), options)
      .run(service.with_joined(servers, options.deadline.value_or(kSnapshotTime)));
}

}  // namespace weft::ps::internal
