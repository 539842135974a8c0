#ifndef WEFT_TESTS_TESTING_SLOW_DISK_H_
#define WEFT_TESTS_TESTING_SLOW_DISK_H_

// A runtime whose disk answers late, or not at all for a while. Any thread.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "weft/common/error.h"
#include "weft/common/files.h"
#include "weft/common/mutex.h"
#include "weft/tests/testing/forwarding_runtime.h"

namespace weft::testing {

class SlowDisk : public ForwardingRuntime {
 public:
  explicit SlowDisk(const std::shared_ptr<Runtime>& inner)
      : ForwardingRuntime(inner), files_(this) {}

  // Each operation takes up to so long, drawn evenly.
  void be_late(absl::Duration most) {
    MutexLock lock(&mutex_);
    late_ = most;
  }
  // What is asked for before then is not done before then.
  void stand_still_until(absl::Time when) {
    MutexLock lock(&mutex_);
    still_until_ = when;
  }
  // Operations that have waited while it stood still.
  int64_t stopped() const { return stopped_.load(); }
  Files& files() override { return files_; }

 private:
  void wait() {
    const absl::Time now = clock().now();
    absl::Time until = now;
    {
      MutexLock lock(&mutex_);
      const auto most = static_cast<uint64_t>(absl::ToInt64Microseconds(late_));
      if (most > 0) until += absl::Microseconds(static_cast<int64_t>(random().below(most)));
      if (still_until_ > until) {
        until = still_until_;
        stopped_.fetch_add(1);
      }
    }
    const auto parker = make_parker();
    while (clock().now() < until) parker->park_until(until);
  }

  class SlowFiles : public Files {
   public:
    explicit SlowFiles(SlowDisk* disk) : disk_(disk) {}
    absl::StatusOr<std::string> read(std::string_view path) override { return there().read(path); }
    absl::Status replace(std::string_view path,
                         const std::function<absl::Status(FileAppender*)>& write) override {
      return there().replace(path, [&](FileAppender* file) {
        Appender slow(disk_, file);
        return write(&slow);
      });
    }
    absl::Status rename(std::string_view from, std::string_view to) override {
      return there().rename(from, to);
    }
    absl::Status remove(std::string_view path) override { return there().remove(path); }
    absl::StatusOr<FileStamp> stamp(std::string_view path) override { return there().stamp(path); }
    absl::StatusOr<std::vector<std::string>> list(std::string_view folder) override {
      return there().list(folder);
    }
    absl::Status sync_names(std::string_view folder) override { return there().sync_names(folder); }
    absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                    const std::function<absl::Status(LockedFile*)>& use) override {
      return there().try_locked(path, lock, use);
    }

   private:
    class Appender : public FileAppender {
     public:
      Appender(SlowDisk* disk, FileAppender* file) : disk_(disk), file_(file) {}
      absl::Status append(std::string_view bytes) override {
        disk_->wait();
        return file_->append(bytes);
      }

     private:
      SlowDisk* const disk_;
      FileAppender* const file_;
    };
    Files& there() {
      disk_->wait();
      return disk_->ForwardingRuntime::files();
    }
    SlowDisk* const disk_;
  };

  SlowFiles files_;
  mutable Mutex mutex_;
  absl::Duration late_ ABSL_GUARDED_BY(mutex_);
  absl::Time still_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::atomic<int64_t> stopped_{0};
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_SLOW_DISK_H_
