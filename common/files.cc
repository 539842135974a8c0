#include "weft/common/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "weft/common/error.h"
#include "weft/common/mutex.h"

namespace weft {
namespace {

absl::Status errno_error(std::string_view what, const std::string& path) {
  const int error = errno;
  const ErrorKind kind = error == ENOENT   ? ErrorKind::kNotFound
                         : error == EACCES ? ErrorKind::kPermission
                                           : ErrorKind::kUnavailable;
  return make_error(kind, absl::StrCat(std::string(what), " '", path, "': ", std::strerror(error)));
}

absl::StatusOr<std::string> read_all(int fd, const std::string& path) {
  std::string out;
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n == 0) return out;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("cannot read", path);
    out.append(buffer, static_cast<size_t>(n));
  }
}

absl::Status write_all(int fd, std::string_view content, const std::string& path) {
  while (!content.empty()) {
    const ssize_t n = ::write(fd, content.data(), content.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("cannot write", path);
    content.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

class SystemFiles : public Files {
 public:
  absl::StatusOr<std::string> read(std::string_view path) override {
    const std::string name(path);
    const int fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno_error("cannot open", name);
    absl::Cleanup close = [fd] { ::close(fd); };
    return read_all(fd, name);
  }

  absl::Status write_atomic(std::string_view path, std::string_view content) override {
    const std::string name(path);
    std::string temporary = absl::StrCat(name, ".XXXXXX");
    const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
    if (fd < 0) return errno_error("cannot create a temporary file for", name);
    absl::Status status = write_all(fd, content, temporary);
    if (status.ok() && ::fsync(fd) != 0) status = errno_error("cannot flush", temporary);
    ::close(fd);
    if (status.ok() && ::rename(temporary.c_str(), name.c_str()) != 0) {
      status = errno_error("cannot rename to", name);
    }
    if (!status.ok()) ::unlink(temporary.c_str());
    return status;
  }

  absl::Status remove(std::string_view path) override {
    const std::string name(path);
    if (::unlink(name.c_str()) != 0) return errno_error("cannot remove", name);
    return absl::OkStatus();
  }

  absl::StatusOr<FileStamp> stamp(std::string_view path) override {
    const std::string name(path);
    struct stat info;
    if (::stat(name.c_str(), &info) != 0) return errno_error("cannot examine", name);
    return FileStamp{static_cast<uint64_t>(info.st_ino), static_cast<uint64_t>(info.st_size),
                     int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
  }

  absl::StatusOr<bool> try_update_locked(std::string_view path,
                                         const std::function<bool(std::string*)>& update) override {
    const std::string name(path);
    int fd = -1;
    const absl::Cleanup close = [&fd] {
      if (fd >= 0) ::close(fd);  // also drops the lock
    };
    WEFT_ASSIGN_OR_RETURN(const bool locked, try_lock(name, O_RDWR | O_CREAT, LOCK_EX, &fd));
    if (!locked) return false;
    WEFT_ASSIGN_OR_RETURN(std::string content, read_all(fd, name));
    if (!update(&content)) return true;
    if (::lseek(fd, 0, SEEK_SET) < 0) return errno_error("cannot seek in", name);
    WEFT_RETURN_IF_ERROR(write_all(fd, content, name));
    if (::ftruncate(fd, static_cast<off_t>(content.size())) != 0) {
      return errno_error("cannot truncate", name);
    }
    return true;
  }

  absl::StatusOr<std::optional<std::string>> try_read_locked(std::string_view path) override {
    const std::string name(path);
    int fd = -1;
    const absl::Cleanup close = [&fd] {
      if (fd >= 0) ::close(fd);
    };
    WEFT_ASSIGN_OR_RETURN(const bool locked, try_lock(name, O_RDONLY, LOCK_SH, &fd));
    if (!locked) return std::nullopt;
    if (fd < 0) return std::string();
    return read_all(fd, name);
  }

 private:
  // Opens the file and takes its lock; -1 for one that is not there and is not made. False: others
  // have the lock. The caller closes `fd` in any case.
  static absl::StatusOr<bool> try_lock(const std::string& name, int flags, int lock, int* fd) {
    while (true) {
      *fd = ::open(name.c_str(), flags | O_CLOEXEC, 0600);
      if (*fd < 0 && errno == ENOENT && (flags & O_CREAT) == 0) return true;
      if (*fd < 0) return errno_error("cannot open", name);
      // Each open file description has its own flock, so threads exclude each other too.
      while (::flock(*fd, lock | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) return false;
        if (errno != EINTR) return errno_error("cannot lock", name);
      }
      // Just before, the file may have been removed or replaced: then this lock guards nothing.
      struct stat opened, named;
      if (::fstat(*fd, &opened) != 0) return errno_error("cannot examine", name);
      if (::stat(name.c_str(), &named) == 0 && named.st_ino == opened.st_ino &&
          named.st_dev == opened.st_dev) {
        return true;
      }
      ::close(std::exchange(*fd, -1));
    }
  }
};

class MemoryFiles : public Files {
 public:
  absl::StatusOr<std::string> read(std::string_view path) override {
    MutexLock lock(&mutex_);
    auto it = files_.find(std::string(path));
    if (it == files_.end()) return missing(path);
    return it->second.content;
  }
  absl::Status write_atomic(std::string_view path, std::string_view content) override {
    MutexLock lock(&mutex_);
    files_[std::string(path)] = {std::string(content), ++changes_};
    return absl::OkStatus();
  }
  absl::Status remove(std::string_view path) override {
    MutexLock lock(&mutex_);
    if (files_.erase(std::string(path)) == 0) return missing(path);
    return absl::OkStatus();
  }
  absl::StatusOr<FileStamp> stamp(std::string_view path) override {
    MutexLock lock(&mutex_);
    auto it = files_.find(std::string(path));
    if (it == files_.end()) return missing(path);
    return FileStamp{0, it->second.content.size(), it->second.changed};
  }
  absl::StatusOr<bool> try_update_locked(std::string_view path,
                                         const std::function<bool(std::string*)>& update) override {
    MutexLock lock(&mutex_);
    File& file = files_[std::string(path)];
    std::string content = file.content;
    if (update(&content)) file = {std::move(content), ++changes_};
    return true;
  }
  absl::StatusOr<std::optional<std::string>> try_read_locked(std::string_view path) override {
    MutexLock lock(&mutex_);
    auto it = files_.find(std::string(path));
    return it == files_.end() ? std::string() : it->second.content;
  }

 private:
  struct File {
    std::string content;
    int64_t changed = 0;  // the number of the change that it is of
  };

  static absl::Status missing(std::string_view path) {
    return make_error(ErrorKind::kNotFound, absl::StrCat("no file '", std::string(path), "'"));
  }

  Mutex mutex_;
  std::map<std::string, File> files_ ABSL_GUARDED_BY(mutex_);
  int64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::unique_ptr<Files> make_system_files() { return std::make_unique<SystemFiles>(); }
std::unique_ptr<Files> make_memory_files() { return std::make_unique<MemoryFiles>(); }

}  // namespace weft
