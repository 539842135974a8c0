#include "weft/collectives/ddp/checkpoint.h"

#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/broadcast_object.h"
#include "weft/collectives/ddp/reduce_value.h"
#include "weft/collectives/internal/ddp/checkpoint_contents.h"
#include "weft/collectives/internal/ddp/group_io.h"
#include "weft/rpc/safetensors.h"

namespace weft {
namespace {

using internal::CheckpointContents;

void require_module(const TrainingState* state, std::string_view what) {
  if (state != nullptr && state->module != nullptr) return;
  throw_error(make_error(ErrorKind::kInvalidArgument,
                         absl::StrCat(std::string(what), ": the state has no module")));
}

// ---- writing -----------------------------------------------------------------------------------

std::string next_of(const std::string& path) { return path + ".next"; }
std::string previous_of(const std::string& path) { return path + ".previous"; }

// The new file has a name of its own until it is whole, and then that of the one before it. A writer
// that ends between the two renames leaves `next`, which is whole, and which is read then.
Status put_in_place(Files& files, const std::string& path, bool keep_previous) {
  if (keep_previous) {
    const Status kept = files.rename(path, previous_of(path));
    if (!kept.ok() && !absl::IsNotFound(kept)) return kept;
  }
  return files.rename(next_of(path), path);
}

Status write_checkpoint(Files& files, const std::string& path, const TrainingState& state,
                        const std::map<std::string, at::Tensor>& generators, int ranks,
                        const CheckpointOptions& options) {
  try {
    // A writer that was killed between the two names has left it: whole, and newer than what has the name. So `next` is
    // free below, and is made without a name beside it, which a writer that is killed would leave.
    const Status taken_up = files.rename(next_of(path), path);
    if (!taken_up.ok() && !absl::IsNotFound(taken_up)) return taken_up;
    const CheckpointContents contents = internal::contents_of(state, generators, ranks);
    if (options.format == CheckpointFormat::kSafetensors) {
      WEFT_RETURN_IF_ERROR(
          replace_safetensors(files, next_of(path), contents.tensors, contents.metadata));
    } else {
      WEFT_RETURN_IF_ERROR(files.replace(next_of(path), [&](FileAppender* file) {
        return internal::write_archive(state, contents, file);
      }));
    }
    return put_in_place(files, path, options.keep_previous);
  } catch (...) {
    return status_from_current_exception();
  }
}

// ---- reading -----------------------------------------------------------------------------------

StatusOr<CheckpointContents> read_tensors(Files& files, const std::string& path) {
  WEFT_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(files, path));
  CheckpointContents out;
  out.metadata = file.header().metadata;
  for (const auto& [name, entry] : file.header().tensors) {
    WEFT_ASSIGN_OR_RETURN(at::Tensor tensor, file.read(name));
    out.tensors.emplace(name, std::move(tensor));
  }
  return out;
}

StatusOr<CheckpointContents> read_checkpoint(Files& files, const std::string& path,
                                             const TrainingState& state) {
  constexpr std::string_view kZip = "PK\x03\x04";
  StatusOr<CheckpointContents> out = CheckpointContents();
  bool is_archive = false;
  const auto done = files.try_locked(path, Files::Lock::kShared, [&](LockedFile* file) -> Status {
    WEFT_ASSIGN_OR_RETURN(const std::string head, file->read(0, kZip.size()));
    is_archive = head == kZip;
    if (is_archive) out = internal::read_archive(file, state);
    return absl::OkStatus();
  });
  if (!done.ok()) return done.status();
  if (!*done) {
    return make_error(ErrorKind::kUnavailable, "it is locked by another process");
  }
  return is_archive ? out : read_tensors(files, path);
}

// What rank 0 gives to the others: the file's name ("": there is no checkpoint), why newer ones were
// refused, and its metadata and tensors.
using Found = std::tuple<std::string, std::string, std::map<std::string, std::string>,
                         std::map<std::string, at::Tensor>>;

// The first of the files that is whole and fits. An error: there are some, and none fits.
StatusOr<Found> find_checkpoint(Files& files, const std::string& path, const TrainingState& state,
                                int ranks) {
  std::string refused;
  bool any = false;
  for (const std::string& one : {path, next_of(path), previous_of(path)}) {
    const auto there = files.stamp(one);
    if (absl::IsNotFound(there.status())) continue;
    any = true;
    StatusOr<CheckpointContents> contents = read_checkpoint(files, one, state);
    Status status = contents.status();
    if (status.ok()) status = internal::check_contents(*contents, state, ranks);
    if (status.ok()) return Found(one, refused, contents->metadata, contents->tensors);
    absl::StrAppend(&refused, refused.empty() ? "" : "; ", "'", one,
                    "' is not used: ", std::string(status.message()));
  }
  if (!any) return Found();
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("no checkpoint can be loaded: ", refused));
}

// What rank 0 has, at every rank; its error, too, with its kind.
template <class T>
StatusOr<T> share(ProcessGroup& group, const StatusOr<T>& mine) {
  std::tuple<int64_t, std::string, T> all;
  if (group.rank() == 0) {
    all = mine.ok() ? std::tuple(int64_t{0}, std::string(), *mine)
                    : std::tuple(static_cast<int64_t>(error_kind(mine.status())),
                                 std::string(mine.status().message()), T());
  }
  WEFT_ASSIGN_OR_RETURN(all, try_broadcast_object(group, all));
  const auto& [kind, message, value] = all;
  if (message.empty()) return value;
  const Status error = make_error(static_cast<ErrorKind>(kind), message);
  return group.rank() == 0 ? error : annotate(error, "rank 0");
}

// The first rank that cannot load what the others can, for all of them.
Status agree(ProcessGroup& group, const Status& mine) {
  const auto all = internal::all_gather_lines(group, {std::string(mine.message())}, {});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string message = absl::StrJoin(all[rank], " ");
    if (message.empty()) continue;
    return make_error(ErrorKind::kInvalidArgument, absl::StrCat("rank ", rank, ": ", message));
  }
  return absl::OkStatus();
}

}  // namespace

void save_checkpoint(ProcessGroup& group, std::string_view path, const TrainingState& state,
                     const CheckpointOptions& options) {
  const std::string name(path);
  const std::string what = absl::StrCat("saving checkpoint '", name, "'");
  require_module(&state, what);
  std::map<std::string, at::Tensor> generators;
  for (const auto& [label, generator] : state.generators) {
    generators.emplace(label, all_gather_rows(group, generator.get_state().view({1, -1})));
  }
  StatusOr<bool> written = true;
  if (group.rank() == 0) {
    const Status status =
        write_checkpoint(group.runtime()->files(), name, state, generators, group.size(), options);
    if (!status.ok()) written = status;
  }
  written = share(group, written);
  if (!written.ok()) throw_error(annotate(written.status(), what));
}

std::optional<LoadedCheckpoint> load_checkpoint(ProcessGroup& group, std::string_view path,
                                                TrainingState* state) {
  const std::string name(path);
  const std::string what = absl::StrCat("loading checkpoint '", name, "'");
  require_module(state, what);
  StatusOr<Found> mine = Found();
  if (group.rank() == 0) {
    try {
      mine = find_checkpoint(group.runtime()->files(), name, *state, group.size());
    } catch (...) {
      mine = status_from_current_exception();
    }
  }
  const auto found = share(group, mine);
  if (!found.ok()) throw_error(annotate(found.status(), what));
  const auto& [file, refused, metadata, tensors] = *found;
  if (file.empty()) return std::nullopt;
  const CheckpointContents contents{tensors, metadata};
  Status status = agree(group, internal::check_contents(contents, *state, group.size()));
  if (!status.ok()) throw_error(annotate(status, what));
  try {
    internal::apply_contents(contents, state, group.rank());
  } catch (...) {
    status = status_from_current_exception();
  }
  status = agree(group, status);
  if (!status.ok()) throw_error(annotate(status, what));
  return LoadedCheckpoint{file, refused};
}

}  // namespace weft
