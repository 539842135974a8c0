#ifndef WEFT_TESTS_TESTING_FORWARDING_FILES_H_
#define WEFT_TESTS_TESTING_FORWARDING_FILES_H_

// Files that hand every operation to others, for tests that change some of them; and a runtime with files of the
// test's own. Any thread.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/files.h"
#include "weft/tests/testing/forwarding_runtime.h"

namespace weft::testing {

class ForwardingFiles : public Files {
 public:
  explicit ForwardingFiles(Files* inner) : inner_(inner) {}
  absl::StatusOr<std::string> read(std::string_view path) override { return inner_->read(path); }
  absl::Status replace(std::string_view path,
                       const std::function<absl::Status(FileAppender*)>& write) override {
    return inner_->replace(path, write);
  }
  absl::Status rename(std::string_view from, std::string_view to) override {
    return inner_->rename(from, to);
  }
  absl::Status remove(std::string_view path) override { return inner_->remove(path); }
  absl::StatusOr<FileStamp> stamp(std::string_view path) override { return inner_->stamp(path); }
  absl::StatusOr<std::vector<std::string>> list(std::string_view folder) override {
    return inner_->list(folder);
  }
  absl::Status sync_names(std::string_view folder) override { return inner_->sync_names(folder); }
  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    return inner_->try_locked(path, lock, use);
  }

 private:
  Files* const inner_;
};

class WithFiles : public ForwardingRuntime {
 public:
  // Both are borrowed.
  WithFiles(Runtime* inner, Files* files)
      : ForwardingRuntime(std::shared_ptr<Runtime>(std::shared_ptr<Runtime>(), inner)),
        files_(files) {}
  Files& files() override { return *files_; }

 private:
  Files* const files_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_TESTING_FORWARDING_FILES_H_
