#include "weft/common/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "weft/common/error.h"

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

FileStamp stamp_of(const struct stat& info) {
  return FileStamp{static_cast<uint64_t>(info.st_ino), static_cast<uint64_t>(info.st_size),
                   int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
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

// A file in the directory of `name` that goes with its last descriptor, so that a writer that is
// killed leaves nothing behind. -1: the file system has none of the kind, or there is no directory.
int open_unnamed(const std::string& name) {
  const size_t slash = name.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : name.substr(0, slash + 1);
  return ::open(directory.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
}

// False, with errno: EEXIST where the name is taken.
bool link_to(int fd, const std::string& name) {
  const std::string self = absl::StrCat("/proc/self/fd/", fd);
  return ::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
}

// One that is not taken, for a moment: a link does not replace a file, a rename does.
absl::Status give_name(int fd, const std::string& name, std::string* given) {
  constexpr int kTries = 1000;  // taken names are those of writers that were killed just here
  for (int i = 0; i < kTries; ++i) {
    const std::string next = absl::StrCat(name, ".", ::getpid(), "-", fd, "-", i);
    if (link_to(fd, next)) {
      *given = next;
      return absl::OkStatus();
    }
    if (errno != EEXIST) break;
  }
  return errno_error("cannot name a temporary file for", name);
}

// Descriptor -1: there is no file.
class SystemLockedFile : public LockedFile {
 public:
  SystemLockedFile(int fd, const std::string& name) : fd_(fd), name_(name) {}

  absl::StatusOr<FileStamp> stamp() override {
    struct stat info;
    if (fd_ < 0) return FileStamp{};
    if (::fstat(fd_, &info) != 0) return errno_error("cannot examine", name_);
    return stamp_of(info);
  }
  absl::StatusOr<std::string> read(uint64_t offset, uint64_t length) override {
    std::string out;
    if (fd_ < 0) return out;
    WEFT_ASSIGN_OR_RETURN(const FileStamp now, stamp());
    if (offset >= now.size) return out;
    out.resize(std::min<uint64_t>(length, now.size - offset));
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t n =
          ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
      if (n == 0) break;
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno_error("cannot read", name_);
      done += static_cast<size_t>(n);
    }
    out.resize(done);
    return out;
  }
  absl::Status write(uint64_t offset, std::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno_error("cannot write", name_);
      offset += static_cast<uint64_t>(n);
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }
  absl::Status truncate(uint64_t size) override {
    if (::ftruncate(fd_, static_cast<off_t>(size)) == 0) return absl::OkStatus();
    return errno_error("cannot truncate", name_);
  }

 private:
  const int fd_;
  const std::string& name_;
};

class SystemAppender : public FileAppender {
 public:
  SystemAppender(int fd, const std::string& name) : fd_(fd), name_(name) {}
  absl::Status append(std::string_view bytes) override { return write_all(fd_, bytes, name_); }

 private:
  const int fd_;
  const std::string& name_;
};

class SystemFiles : public Files {
 public:
  absl::StatusOr<std::string> read(std::string_view path) override {
    const std::string name(path);
    const int fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno_error("cannot open", name);
    absl::Cleanup close = [fd] { ::close(fd); };
    return read_all(fd, name);
  }

  absl::Status replace(std::string_view path,
                       const std::function<absl::Status(FileAppender*)>& write) override {
    const std::string name(path);
    std::string temporary;  // empty while the file has no name
    int fd = open_unnamed(name);
    absl::Cleanup drop = [&fd, &temporary] {
      if (fd >= 0) ::close(fd);
      if (!temporary.empty()) ::unlink(temporary.c_str());
    };
    if (fd < 0) {
      std::string beside = absl::StrCat(name, ".XXXXXX");
      fd = ::mkostemp(beside.data(), O_CLOEXEC);
      if (fd < 0) return errno_error("cannot create a temporary file for", name);
      temporary = std::move(beside);
    }
    SystemAppender appender(fd, name);
    WEFT_RETURN_IF_ERROR(write(&appender));
    if (::fsync(fd) != 0) return errno_error("cannot flush", name);
    if (temporary.empty()) {
      // Where the name is free no other one is needed, which a writer that is killed would leave behind.
      if (link_to(fd, name)) return absl::OkStatus();
      WEFT_RETURN_IF_ERROR(give_name(fd, name, &temporary));
    }
    if (::rename(temporary.c_str(), name.c_str()) != 0) {
      return errno_error("cannot rename to", name);
    }
    temporary.clear();
    return absl::OkStatus();
  }

  absl::Status rename(std::string_view from, std::string_view to) override {
    const std::string name(from);
    if (::rename(name.c_str(), std::string(to).c_str()) != 0) {
      return errno_error("cannot rename", name);
    }
    return absl::OkStatus();
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
    return stamp_of(info);
  }

  absl::StatusOr<std::vector<std::string>> list(std::string_view folder) override {
    const std::string name(folder);
    DIR* const open = ::opendir(name.c_str());
    if (open == nullptr) return errno_error("cannot list", name);
    const absl::Cleanup close = [open] { ::closedir(open); };
    std::vector<std::string> out;
    for (errno = 0; const dirent* const entry = ::readdir(open); errno = 0) {
      const std::string_view one = entry->d_name;
      if (one != "." && one != "..") out.emplace_back(one);
    }
    if (errno != 0) return errno_error("cannot list", name);
    std::sort(out.begin(), out.end());
    return out;
  }

  absl::Status sync_names(std::string_view folder) override {
    const std::string name(folder);
    const int fd = ::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno_error("cannot open", name);
    const absl::Cleanup close = [fd] { ::close(fd); };
    // EINVAL: a file system whose folders cannot be flushed, and need not be.
    if (::fsync(fd) != 0 && errno != EINVAL) return errno_error("cannot flush", name);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    const std::string name(path);
    int fd = -1;
    const absl::Cleanup close = [&fd] {
      if (fd >= 0) ::close(fd);  // also drops the lock
    };
    if (lock == Lock::kNone) {
      fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0 && errno != ENOENT) return errno_error("cannot open", name);
    } else {
      const bool alone = lock == Lock::kExclusive;
      WEFT_ASSIGN_OR_RETURN(const bool locked, try_lock(name, alone ? O_RDWR | O_CREAT : O_RDONLY,
                                                        alone ? LOCK_EX : LOCK_SH, &fd));
      if (!locked) return false;
    }
    SystemLockedFile file(fd, name);
    WEFT_RETURN_IF_ERROR(use(&file));
    return true;
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

}  // namespace

absl::Status Files::write_atomic(std::string_view path, std::string_view content) {
  return replace(path, [content](FileAppender* file) { return file->append(content); });
}

absl::StatusOr<bool> Files::try_update_locked(std::string_view path,
                                              const std::function<bool(std::string*)>& update) {
  return try_locked(path, Lock::kExclusive, [&update](LockedFile* file) -> absl::Status {
    WEFT_ASSIGN_OR_RETURN(std::string content, file->read(0, UINT64_MAX));
    if (!update(&content)) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(file->write(0, content));
    return file->truncate(content.size());
  });
}

absl::StatusOr<std::optional<std::string>> Files::try_read_locked(std::string_view path) {
  std::optional<std::string> content;
  WEFT_RETURN_IF_ERROR(
      try_locked(path, Lock::kShared, [&content](LockedFile* file) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(content, file->read(0, UINT64_MAX));
        return absl::OkStatus();
      }).status());
  return content;
}

std::unique_ptr<Files> make_system_files() { return std::make_unique<SystemFiles>(); }
}  // namespace weft
