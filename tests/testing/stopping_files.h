#ifndef WEFT_TESTS_TESTING_STOPPING_FILES_H_
#define WEFT_TESTS_TESTING_STOPPING_FILES_H_

// Files of a machine that stops at one step of what it writes, and starts again with what its disk has then:
// of the names that were given, changed and removed since the last sync_names() any, each with its content;
// of a file that was being written perhaps a piece under a name of its own; of a file that was changed in place
// perhaps only its beginning. Any thread.

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/common/mutex.h"

namespace weft::testing {

class StoppingFiles : public Files {
 public:
  // Every step after so many fails, until the restart. Steps: an append, a write, and each change of a name.
  void stop_after(int64_t steps) {
    MutexLock lock(&mutex_);
    left_ = steps;
  }
  bool stopped() const {
    MutexLock lock(&mutex_);
    return left_ < 0;
  }
  void restart(uint32_t seed) {
    std::mt19937 random(seed);
    MutexLock lock(&mutex_);
    left_ = kNever;
    for (Change& change : std::exchange(changes_, {})) {
      if (random() % 2 == 0) continue;
      if (change.torn) change.content.resize(random() % (change.content.size() + 1));
      apply(change, &disk_);
    }
    for (auto& [path, content] : std::exchange(unnamed_, {})) {
      if (random() % 2 == 0) disk_[absl::StrCat(path, ".left")] = std::move(content);
    }
    seen_ = disk_;
  }

  absl::StatusOr<std::string> read(std::string_view path) override {
    MutexLock lock(&mutex_);
    if (left_ < 0) return stopped_error();
    const auto at = seen_.find(std::string(path));
    if (at == seen_.end()) return missing(path);
    return at->second;
  }
  absl::Status replace(std::string_view path,
                       const std::function<absl::Status(FileAppender*)>& write) override {
    Appender file(this);
    const absl::Status written = write(&file);
    MutexLock lock(&mutex_);
    if (left_ < 0) unnamed_.emplace_back(std::string(path), file.content);
    WEFT_RETURN_IF_ERROR(written);
    return change({"", std::string(path), std::move(file.content)});
  }
  absl::Status rename(std::string_view from, std::string_view to) override {
    MutexLock lock(&mutex_);
    const auto at = seen_.find(std::string(from));
    if (left_ >= 0 && at == seen_.end()) return missing(from);
    return change({std::string(from), std::string(to), left_ < 0 ? "" : at->second});
  }
  absl::Status remove(std::string_view path) override {
    MutexLock lock(&mutex_);
    if (left_ >= 0 && !seen_.contains(std::string(path))) return missing(path);
    return change({std::string(path), "", ""});
  }
  absl::StatusOr<FileStamp> stamp(std::string_view path) override {
    WEFT_ASSIGN_OR_RETURN(const std::string content, read(path));
    return FileStamp{0, content.size(), 0};
  }
  absl::StatusOr<std::vector<std::string>> list(std::string_view folder) override {
    const std::string prefix = absl::StrCat(std::string(folder), "/");
    MutexLock lock(&mutex_);
    if (left_ < 0) return stopped_error();
    std::vector<std::string> out;
    for (const auto& [path, content] : seen_) {
      if (path.compare(0, prefix.size(), prefix) == 0) out.push_back(path.substr(prefix.size()));
    }
    return out;
  }
  absl::Status sync_names(std::string_view) override {
    MutexLock lock(&mutex_);
    WEFT_RETURN_IF_ERROR(step());
    for (const Change& one : std::exchange(changes_, {})) apply(one, &disk_);
    return absl::OkStatus();
  }
  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    Held file;
    const absl::StatusOr<std::string> before = read(path);
    if (!before.ok() && !absl::IsNotFound(before.status())) return before.status();
    file.content = before.value_or("");
    WEFT_RETURN_IF_ERROR(use(&file));
    if (lock != Lock::kExclusive || !file.changed) return true;
    MutexLock guard(&mutex_);
    WEFT_RETURN_IF_ERROR(change({"", std::string(path), std::move(file.content), true}));
    return true;
  }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  using Disk = std::map<std::string, std::string>;
  struct Change {
    std::string from;  // is no more
    std::string to;    // has this content
    std::string content;
    bool torn = false;
  };
  struct Appender : FileAppender {
    explicit Appender(StoppingFiles* of) : files(of) {}
    absl::Status append(std::string_view bytes) override {
      MutexLock lock(&files->mutex_);
      WEFT_RETURN_IF_ERROR(files->step());
      content.append(bytes);
      return absl::OkStatus();
    }
    StoppingFiles* const files;
    std::string content;
  };
  struct Held : LockedFile {
    absl::StatusOr<FileStamp> stamp() override { return FileStamp{0, content.size(), 0}; }
    absl::StatusOr<std::string> read(uint64_t offset, uint64_t length) override {
      return offset >= content.size() ? "" : content.substr(offset, length);
    }
    absl::Status write(uint64_t offset, std::string_view bytes) override {
      changed = true;
      if (content.size() < offset + bytes.size()) content.resize(offset + bytes.size());
      content.replace(offset, bytes.size(), bytes);
      return absl::OkStatus();
    }
    absl::Status truncate(uint64_t size) override {
      changed = true;
      content.resize(size);
      return absl::OkStatus();
    }
    std::string content;
    bool changed = false;
  };

  static void apply(const Change& change, Disk* disk) {
    if (!change.from.empty()) disk->erase(change.from);
    if (!change.to.empty()) (*disk)[change.to] = change.content;
  }
  static absl::Status stopped_error() {
    return make_error(ErrorKind::kUnavailable, "the machine has stopped");
  }
  static absl::Status missing(std::string_view path) {
    return make_error(ErrorKind::kNotFound, absl::StrCat("no file '", std::string(path), "'"));
  }
  absl::Status step() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (left_ > 0 && left_ != kNever)
      --left_;
    else if (left_ == 0)
      left_ = -1;
    return left_ < 0 ? stopped_error() : absl::OkStatus();
  }
  absl::Status change(Change one) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    WEFT_RETURN_IF_ERROR(step());
    apply(one, &seen_);
    changes_.push_back(std::move(one));
    return absl::OkStatus();
  }

  mutable Mutex mutex_;
  int64_t left_ ABSL_GUARDED_BY(mutex_) = kNever;  // steps; -1: it has stopped
  Disk seen_ ABSL_GUARDED_BY(mutex_);
  Disk disk_ ABSL_GUARDED_BY(mutex_);  // what a restart finds at least
  std::vector<Change> changes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<std::string, std::string>> unnamed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_STOPPING_FILES_H_
