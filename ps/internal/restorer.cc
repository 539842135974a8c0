// The one who restores: finds the newest snapshot that is whole, and has the servers load it.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/trace.h"
#include "weft/ps/internal/ask.h"
#include "weft/ps/internal/cutter.h"
#include "weft/ps/internal/table_core.h"
#include "weft/rpc/spi/untyped_call.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kRestoreTime = absl::Minutes(10);
constexpr absl::Duration kDropTime = absl::Seconds(1);
constexpr absl::Duration kJoinTime = absl::Minutes(1);
constexpr absl::Duration kReadyAgain = absl::Milliseconds(50);

enum class RestoreStep : uint32_t { kLoad = 1, kCommit = 2, kDrop = 3, kLook = 4, kReady = 5 };

Status check_snapshot(Files& files, const std::string& folder, FoundSnapshot* found) {
  WEFT_RETURN_IF_ERROR(read_manifest(files, found->path, &found->manifest, &found->hash));
  for (const v1::PsSnapshot::File& file : found->manifest.files()) {
    WEFT_RETURN_IF_ERROR(
        check_file(files, path_in(folder, file.name()), {file.bytes(), file.hash()}));
  }
  return absl::OkStatus();
}

// The first error, naming the server.
Status ask_step(const Worker& worker, const std::vector<WorkerInfo>& servers, v1::PsRestore request,
                RestoreStep step, absl::Duration deadline) {
  request.set_step(static_cast<uint32_t>(step));
  std::vector<Question> questions;
  for (const WorkerInfo& server : servers) {
    questions.push_back({server, request.SerializeAsString()});
  }
  const auto answers = ask_all_again(worker, kRestoreMethod, kCutSignature, questions, deadline);
  for (size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].ok()) continue;
    return annotate(answers[i].status(), absl::StrCat("restore at '", servers[i].name, "'"));
  }
  return absl::OkStatus();
}

// The servers. A job that begins with a restore has some that have not come yet, or make their ps::Server
// only now: they are waited for.
StatusOr<std::vector<WorkerInfo>> servers_that_serve(const Worker& worker,
                                                     const std::vector<std::string>& names,
                                                     v1::PsRestore request, absl::Duration time) {
  request.set_step(static_cast<uint32_t>(RestoreStep::kReady));
  const absl::Time end = deadline_after(worker.now(), std::min(time, kJoinTime));
  std::vector<WorkerInfo> out;
  while (out.size() < names.size()) {
    const StatusOr<WorkerInfo> info = worker.try_get_worker_info(names[out.size()]);
    const Status there = info.ok() ? ask_bytes(worker, *info, kRestoreMethod, kCutSignature,
                                               request.SerializeAsString(),
                                               std::max(end - worker.now(), kReadyAgain))
                                         .status()
                                   : info.status();
    if (there.ok()) {
      out.push_back(*info);
      continue;
    }
    const ErrorKind kind = error_kind(there);
    const bool may_come =
        kind != ErrorKind::kPeerLost &&
        (gave_no_answer(kind) ||
         (kind == ErrorKind::kState && there.code() == absl::StatusCode::kUnavailable));
    if (!may_come || worker.now() >= end) {
      return annotate(there, absl::StrCat("restore at '", names[out.size()], "'"));
    }
    worker.runtime().make_parker()->park_until(std::min(end, worker.now() + kReadyAgain));
  }
  return out;
}

}  // namespace

StatusOr<FoundSnapshot> find_snapshot(Files& files, const std::string& folder) {
  std::string refused;
  for (const std::string_view name : {kNewest, kNext, kPrevious}) {
    FoundSnapshot found;
    found.path = path_in(folder, name);
    const Status whole = check_snapshot(files, folder, &found);
    if (whole.ok()) {
      found.refused = refused;
      return found;
    }
    if (absl::IsNotFound(whole)) continue;
    absl::StrAppend(&refused, refused.empty() ? "" : "; ", "'", found.path,
                    "' is not used: ", std::string(whole.message()));
  }
  if (refused.empty()) {
    return make_error(ErrorKind::kNotFound, absl::StrCat("there is no snapshot in '", folder, "'"));
  }
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("no snapshot can be restored: ", refused));
}

Status check_tables(const v1::PsSnapshot& manifest, const std::vector<std::string>& wanted) {
  for (const std::string& name : wanted) {
    const bool there = std::any_of(manifest.tables().begin(), manifest.tables().end(),
                                   [&](const auto& table) { return table.name() == name; });
    if (there) continue;
    return make_error(ErrorKind::kNotFound, absl::StrCat("the snapshot has no table '", name, "'"));
  }
  return absl::OkStatus();
}

StatusOr<SnapshotInfo> info_of(const FoundSnapshot& found, const std::vector<std::string>& wanted) {
  WEFT_ASSIGN_OR_RETURN(SnapshotInfo info, info_of(found.path, found.manifest));
  const auto left_out = [&](const SnapshotTable& table) {
    return !wanted.empty() && std::find(wanted.begin(), wanted.end(), table.name) == wanted.end();
  };
  info.tables.erase(std::remove_if(info.tables.begin(), info.tables.end(), left_out),
                    info.tables.end());
  info.refused = found.refused;
  return info;
}

StatusOr<SnapshotInfo> restore_snapshot(PsService& service, const std::vector<std::string>& servers,
                                        std::string_view folder, const RestoreOptions& options) {
  const Worker& worker = service.worker();
  const std::shared_ptr<TraceWriter> trace = trace_of(worker);
  const TraceSpan span(trace.get(), &worker.runtime().clock(), "ps", "restore");
  const absl::Time end = deadline_after(worker.now(), options.deadline.value_or(kRestoreTime));
  const auto left = [&] { return std::max(absl::ZeroDuration(), end - worker.now()); };
  WEFT_ASSIGN_OR_RETURN(const FoundSnapshot found,
                        find_snapshot(worker.runtime().files(), std::string(folder)));
  WEFT_RETURN_IF_ERROR(check_tables(found.manifest, options.tables));
  v1::PsRestore request;
  request.set_number(service.next_cut());
  request.set_path(found.path);
  request.set_hash(found.hash);
  WEFT_ASSIGN_OR_RETURN(const std::vector<WorkerInfo> to,
                        servers_that_serve(worker, servers, request, left()));
  for (const std::string& name : servers) request.add_servers(name);
  for (const std::string& table : options.tables) request.add_tables(table);
  Status done = ask_step(worker, to, request, RestoreStep::kLoad, left());
  if (!done.ok()) {
    (void)ask_step(worker, to, request, RestoreStep::kDrop,
                   kDropTime);  // its error says nothing more
    return done;
  }
  WEFT_RETURN_IF_ERROR(ask_step(worker, to, request, RestoreStep::kCommit, left()));
  // What had the parts before learns of it: servers that have joined, too.
  std::vector<WorkerInfo> all = to;
  for (const std::string& name : service.with_joined(servers, left())) {
    const StatusOr<WorkerInfo> info = worker.try_get_worker_info(name);
    if (info.ok() && std::find(to.begin(), to.end(), *info) == to.end()) all.push_back(*info);
  }
  WEFT_RETURN_IF_ERROR(ask_step(worker, all, request, RestoreStep::kLook, left()));
  return info_of(found, options.tables);
}

}  // namespace weft::ps::internal
