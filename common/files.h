#ifndef WEFT_COMMON_FILES_H_
#define WEFT_COMMON_FILES_H_

// Files: the few operations on a file system that weft needs (rendezvous files, certificates,
// checkpoints). The system's, or one in memory for simulation and tests. Any thread.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "weft/common/api.h"

namespace weft {

// Differs from an earlier one when the file has changed since. Two changes within one tick of the
// file system's clock, which leave the size alone, may share a stamp.
struct FileStamp {
  uint64_t inode = 0;  // number of the file in its file system
  uint64_t size = 0;
  int64_t changed_ns = 0;  // time of the last change, ns since 1970

  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};

// A file while it is locked: parts of it. Valid inside of the call that gave it.
class LockedFile {
 public:
  virtual ~LockedFile() = default;
  // Which file has the name, and how long it is.
  virtual absl::StatusOr<FileStamp> stamp() = 0;
  // Fewer bytes than `length` when the file ends before.
  virtual absl::StatusOr<std::string> read(uint64_t offset, uint64_t length) = 0;
  // REQUIRES for both: the lock is exclusive.
  virtual absl::Status write(uint64_t offset, std::string_view bytes) = 0;
  virtual absl::Status truncate(uint64_t size) = 0;
};

// A file that is being written from its beginning. Valid inside of the call that gave it.
class FileAppender {
 public:
  virtual ~FileAppender() = default;
  // Adds the bytes at the end.
  virtual absl::Status append(std::string_view bytes) = 0;
};

class WEFT_API Files {
 public:
  virtual ~Files() = default;
  // The whole file. not_found when there is none.
  virtual absl::StatusOr<std::string> read(std::string_view path) = 0;
  // Replaces the file in one step by what `write` appends: readers see the old or the new content,
  // never a part. When `write` or an append fails, that error is returned, the old file stays, and
  // nothing is left of the new one. On the system: written beside it with mode 0600 and, if
  // possible, no name yet; flushed to the disk, renamed.
  virtual absl::Status replace(std::string_view path,
                               const std::function<absl::Status(FileAppender*)>& write) = 0;
  // replace() with a content that is in memory.
  absl::Status write_atomic(std::string_view path, std::string_view content);
  // Gives the file another name, in one step; a file of that name is replaced. not_found when there
  // is no file `from`.
  virtual absl::Status rename(std::string_view from, std::string_view to) = 0;
  virtual absl::Status remove(std::string_view path) = 0;
  // Reads nothing of the file. not_found when there is none.
  virtual absl::StatusOr<FileStamp> stamp(std::string_view path) = 0;
  // The names in a folder, in order. not_found when there is none (in memory: no name in it).
  virtual absl::StatusOr<std::vector<std::string>> list(std::string_view folder) = 0;
  // When it returns, the names that were given, changed and removed in the folder survive a stop of the
  // machine. Before that each of them may be as it was: replace() and rename() do not wait for it.
  virtual absl::Status sync_names(std::string_view folder) = 0;

  // None: to read what others may be changing now; a missing file counts as empty.
  // Shared: beside other shared locks, to read; a missing file counts as empty.
  // Exclusive: alone, to change it; a missing file is made.
  enum class Lock { kNone, kShared, kExclusive };
  // Calls `use` with the locked file. False, and nothing was called, when others have a lock that
  // forbids it now: the caller decides how long to try, because a process that is stopped there
  // stays there. An error of `use` is returned. The building block of FileStore.
  virtual absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                          const std::function<absl::Status(LockedFile*)>& use) = 0;

  // Calls `update` with the content ("" when there is no file) while no other process or thread
  // does the same for this path, and replaces the content with what it leaves there, unless it
  // returns false. False as try_locked().
  absl::StatusOr<bool> try_update_locked(std::string_view path,
                                         const std::function<bool(std::string*)>& update);
  // The content ("" when there is no file), as it is between two updates; any number may read at
  // once. Nothing when an update is under way now.
  absl::StatusOr<std::optional<std::string>> try_read_locked(std::string_view path);
};

WEFT_API std::unique_ptr<Files> make_system_files();  // the operating system's
WEFT_API std::unique_ptr<Files> make_memory_files();  // a map in memory, for simulations
// A disk that may be full: writes that would take all files together above so many bytes fail, as
// the system's do. The number may be changed while files are written.
WEFT_API std::unique_ptr<Files> make_memory_files(
    std::shared_ptr<const std::atomic<uint64_t>> capacity);

}  // namespace weft

#endif  // WEFT_COMMON_FILES_H_
