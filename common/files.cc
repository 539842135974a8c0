#include "weft/common/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
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

// One that is not taken, for a moment: a link does not replace a file, a rename does.
absl::Status give_name(int fd, const std::string& name, std::string* given) {
  const std::string self = absl::StrCat("/proc/self/fd/", fd);
  constexpr int kTries = 1000;  // taken names are those of writers that were killed just here
  for (int i = 0; i < kTries; ++i) {
    const std::string next = absl::StrCat(name, ".", ::getpid(), "-", fd, "-", i);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, next.c_str(), AT_SYMLINK_FOLLOW) == 0) {
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
    if (temporary.empty()) WEFT_RETURN_IF_ERROR(give_name(fd, name, &temporary));
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

  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    const std::string name(path);
    int fd = -1;
    const absl::Cleanup close = [&fd] {
      if (fd >= 0) ::close(fd);  // also drops the lock
    };
    const bool alone = lock == Lock::kExclusive;
    WEFT_ASSIGN_OR_RETURN(const bool locked, try_lock(name, alone ? O_RDWR | O_CREAT : O_RDONLY,
                                                      alone ? LOCK_EX : LOCK_SH, &fd));
    if (!locked) return false;
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

class MemoryFiles : public Files {
 public:
  explicit MemoryFiles(std::shared_ptr<const std::atomic<uint64_t>> capacity)
      : capacity_(std::move(capacity)) {}

  absl::StatusOr<std::string> read(std::string_view path) override {
    MutexLock lock(&mutex_);
    auto it = files_.find(std::string(path));
    if (it == files_.end()) return missing(path);
    return it->second.content;
  }
  absl::Status replace(std::string_view path,
                       const std::function<absl::Status(FileAppender*)>& write) override {
    std::string content;
    Appender appender(this, std::string(path), &content);
    const absl::Status written = write(&appender);
    MutexLock lock(&mutex_);
    unnamed_ -= content.size();
    WEFT_RETURN_IF_ERROR(written);
    files_[std::string(path)] = {std::move(content), ++changes_};
    return absl::OkStatus();
  }
  absl::Status rename(std::string_view from, std::string_view to) override {
    MutexLock lock(&mutex_);
    const auto it = files_.find(std::string(from));
    if (it == files_.end()) return missing(from);
    if (from == to) return absl::OkStatus();
    files_[std::string(to)] = std::move(it->second);
    files_.erase(it);
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
  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    MutexLock guard(&mutex_);
    auto it = files_.find(std::string(path));
    if (it == files_.end() && lock == Lock::kExclusive) {
      it = files_.emplace(std::string(path), File{}).first;
    }
    File none;
    File* const file = it == files_.end() ? &none : &it->second;
    MemoryLockedFile locked(file, room());
    const absl::Status used = use(&locked);
    if (locked.changed()) file->changed = ++changes_;
    WEFT_RETURN_IF_ERROR(used);
    return true;
  }

 private:
  struct File {
    std::string content;
    int64_t changed = 0;  // the number of the change that it is of
  };

  class MemoryLockedFile : public LockedFile {
   public:
    // `room`: so many bytes the disk has left.
    MemoryLockedFile(File* file, uint64_t room)
        : file_(file),
          most_(room > UINT64_MAX - file->content.size() ? UINT64_MAX
                                                         : room + file->content.size()) {}
    bool changed() const { return changed_; }

    absl::StatusOr<FileStamp> stamp() override {
      return FileStamp{0, file_->content.size(), file_->changed};
    }
    absl::StatusOr<std::string> read(uint64_t offset, uint64_t length) override {
      if (offset >= file_->content.size()) return std::string();
      return file_->content.substr(offset, length);
    }
    absl::Status write(uint64_t offset, std::string_view bytes) override {
      changed_ = true;
      const size_t end = offset + bytes.size();
      if (end > most_) return full("the file");
      if (file_->content.size() < end) file_->content.resize(end);
      file_->content.replace(offset, bytes.size(), bytes);
      return absl::OkStatus();
    }
    absl::Status truncate(uint64_t size) override {
      changed_ = true;
      file_->content.resize(size);
      return absl::OkStatus();
    }

   private:
    File* const file_;
    const uint64_t most_;
    bool changed_ = false;
  };

  class Appender : public FileAppender {
   public:
    Appender(MemoryFiles* files, std::string path, std::string* content)
        : files_(files), path_(std::move(path)), content_(content) {}
    absl::Status append(std::string_view bytes) override {
      MutexLock lock(&files_->mutex_);
      if (bytes.size() > files_->room()) return full(path_);
      content_->append(bytes);
      files_->unnamed_ += bytes.size();
      return absl::OkStatus();
    }

   private:
    MemoryFiles* const files_;
    const std::string path_;
    std::string* const content_;
  };

  uint64_t room() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (capacity_ == nullptr) return UINT64_MAX;
    uint64_t used = unnamed_;
    for (const auto& [path, file] : files_) used += file.content.size();
    const uint64_t capacity = capacity_->load();
    return capacity - std::min(capacity, used);
  }
  static absl::Status full(std::string_view path) {
    return make_error(ErrorKind::kUnavailable, absl::StrCat("cannot write '", std::string(path),
                                                            "': ", std::strerror(ENOSPC)));
  }

  static absl::Status missing(std::string_view path) {
    return make_error(ErrorKind::kNotFound, absl::StrCat("no file '", std::string(path), "'"));
  }

  const std::shared_ptr<const std::atomic<uint64_t>> capacity_;  // null: no bound
  Mutex mutex_;
  std::map<std::string, File> files_ ABSL_GUARDED_BY(mutex_);
  int64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t unnamed_ ABSL_GUARDED_BY(mutex_) = 0;  // bytes of files that are being written
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
std::unique_ptr<Files> make_memory_files() { return std::make_unique<MemoryFiles>(nullptr); }
std::unique_ptr<Files> make_memory_files(std::shared_ptr<const std::atomic<uint64_t>> capacity) {
  return std::make_unique<MemoryFiles>(std::move(capacity));
}

}  // namespace weft
