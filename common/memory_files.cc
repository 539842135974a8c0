// Files in memory, on a disk that may be full.

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/common/mutex.h"

namespace weft {
namespace {

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
  absl::StatusOr<std::vector<std::string>> list(std::string_view folder) override {
    const std::string prefix = absl::StrCat(std::string(folder), "/");
    std::vector<std::string> out;
    MutexLock lock(&mutex_);
    for (auto it = files_.lower_bound(prefix); it != files_.end(); ++it) {
      if (it->first.compare(0, prefix.size(), prefix) != 0) break;
      std::string name = it->first.substr(prefix.size());
      if (name.find('/') == std::string::npos) out.push_back(std::move(name));
    }
    if (out.empty()) return missing(folder);
    return out;
  }
  absl::Status sync_names(std::string_view) override { return absl::OkStatus(); }
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

std::unique_ptr<Files> make_memory_files() { return std::make_unique<MemoryFiles>(nullptr); }
std::unique_ptr<Files> make_memory_files(std::shared_ptr<const std::atomic<uint64_t>> capacity) {
  return std::make_unique<MemoryFiles>(std::move(capacity));
}

}  // namespace weft
