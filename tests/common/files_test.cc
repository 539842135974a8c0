// One contract for the system's files and those in memory, then what only the system's can show.
#include "weft/common/files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/error.h"
#include "weft/tests/testing/names_made.h"

namespace weft {
namespace {

class TemporaryFolder {
 public:
  TemporaryFolder() : path_(::testing::TempDir() + "weft_files_XXXXXX") {
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  size_t count() const {
    size_t n = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path_)) ++n;
    return n;
  }

 private:
  std::string path_;
};

// Tries until no other thread holds the lock.
absl::Status update(Files* files, const std::string& path,
                    const std::function<bool(std::string*)>& change) {
  while (true) {
    const absl::StatusOr<bool> done = files->try_update_locked(path, change);
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
    std::this_thread::yield();
  }
}

class FilesContract : public ::testing::TestWithParam<bool> {
 protected:
  FilesContract() : files_(GetParam() ? make_system_files() : make_memory_files()) {}

  TemporaryFolder folder_;
  std::unique_ptr<Files> files_;
};

INSTANTIATE_TEST_SUITE_P(All, FilesContract, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "System" : "Memory"; });

TEST_P(FilesContract, ReadsWhatWasWritten) {
  const std::string path = folder_ / "a";
  EXPECT_EQ(error_kind(files_->read(path).status()), ErrorKind::kNotFound);
  const std::string odd("\0\xff\n", 3);
  ASSERT_TRUE(files_->write_atomic(path, odd).ok());
  EXPECT_EQ(*files_->read(path), odd);
  const std::string large(300'000, 'x');
  ASSERT_TRUE(files_->write_atomic(path, large).ok());
  EXPECT_EQ(*files_->read(path), large);
  ASSERT_TRUE(files_->write_atomic(path, "").ok());
  EXPECT_EQ(*files_->read(path), "");
  EXPECT_TRUE(files_->remove(path).ok());
  EXPECT_EQ(error_kind(files_->read(path).status()), ErrorKind::kNotFound);
  EXPECT_EQ(error_kind(files_->remove(path)), ErrorKind::kNotFound);
}

TEST_P(FilesContract, ErrorsNameTheFile) {
  const std::string path = folder_ / "missing";
  EXPECT_NE(std::string(files_->read(path).status().message()).find(path), std::string::npos);
  EXPECT_NE(std::string(files_->remove(path).message()).find(path), std::string::npos);
}

TEST_P(FilesContract, UpdateSeesTheContentAndMayLeaveIt) {
  const std::string path = folder_ / "a";
  std::string seen = "?";
  const auto set = [&](std::string value, bool keep) {
    return files_->try_update_locked(path, [&seen, value, keep](std::string* content) {
      seen = *content;
      *content = value;
      return keep;
    });
  };
  ASSERT_TRUE(set("first, rather long", true).ok());
  EXPECT_EQ(seen, "");
  ASSERT_TRUE(set("dropped", false).ok());
  EXPECT_EQ(seen, "first, rather long");
  ASSERT_TRUE(set("short", true).ok());
  EXPECT_EQ(seen, "first, rather long");
  EXPECT_EQ(*files_->read(path), "short");
}

TEST_P(FilesContract, UpdatesExcludeEachOther) {
  const std::string path = folder_ / "count";
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_TRUE(update(files_.get(), path, [](std::string* content) {
                      int n = 0;
                      if (!content->empty()) {
                        EXPECT_TRUE(absl::SimpleAtoi(*content, &n));
                      }
                      *content = absl::StrCat(n + 1);
                      return true;
                    }).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(*files_->read(path), "200");
}

TEST_P(FilesContract, ReadersSeeTheOldOrTheNewContent) {
  const std::string path = folder_ / "whole";
  const std::string a(100'000, 'a');
  const std::string b(70'000, 'b');
  ASSERT_TRUE(files_->write_atomic(path, a).ok());
  std::thread writer([&] {
    for (int i = 0; i < 30; ++i) EXPECT_TRUE(files_->write_atomic(path, i % 2 == 0 ? b : a).ok());
  });
  for (int i = 0; i < 100; ++i) {
    const auto content = files_->read(path);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_TRUE(*content == a || *content == b);
  }
  writer.join();
}

TEST_P(FilesContract, AFileInPiecesIsThereWhenItIsWhole) {
  const std::string path = folder_ / "pieces";
  ASSERT_TRUE(files_->write_atomic(path, "old").ok());
  const absl::Status written = files_->replace(path, [&](FileAppender* file) -> absl::Status {
    for (const char* const piece : {"a", "", "bc"}) {
      WEFT_RETURN_IF_ERROR(file->append(piece));
      EXPECT_EQ(*files_->read(path), "old");
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(written.ok()) << written;
  EXPECT_EQ(*files_->read(path), "abc");
  // A writer that fails leaves what was there, and nothing beside it.
  const absl::Status failed = files_->replace(path, [](FileAppender* file) -> absl::Status {
    WEFT_RETURN_IF_ERROR(file->append("x"));
    return make_error(ErrorKind::kUser, "no more");
  });
  EXPECT_EQ(failed.message(), "no more");
  EXPECT_EQ(*files_->read(path), "abc");
}

TEST_P(FilesContract, RenamesReplace) {
  ASSERT_TRUE(files_->write_atomic(folder_ / "from", "new").ok());
  ASSERT_TRUE(files_->write_atomic(folder_ / "to", "old").ok());
  EXPECT_TRUE(files_->rename(folder_ / "from", folder_ / "to").ok());
  EXPECT_EQ(*files_->read(folder_ / "to"), "new");
  EXPECT_EQ(error_kind(files_->read(folder_ / "from").status()), ErrorKind::kNotFound);
  EXPECT_EQ(error_kind(files_->rename(folder_ / "from", folder_ / "to")), ErrorKind::kNotFound);
  EXPECT_TRUE(files_->rename(folder_ / "to", folder_ / "to").ok());
  EXPECT_EQ(*files_->read(folder_ / "to"), "new");
}

TEST_P(FilesContract, AFolderIsListed) {
  EXPECT_EQ(error_kind(files_->list(folder_ / "none").status()), ErrorKind::kNotFound);
  for (const char* const name : {"b", "a.c", "a"}) {
    ASSERT_TRUE(files_->write_atomic(folder_ / name, name).ok());
  }
  ASSERT_TRUE(files_->rename(folder_ / "b", folder_ / "c").ok());
  ASSERT_TRUE(files_->remove(folder_ / "a").ok());
  const std::string folder = folder_ / "";
  EXPECT_EQ(*files_->list(folder.substr(0, folder.size() - 1)),
            (std::vector<std::string>{"a.c", "c"}));
  EXPECT_TRUE(files_->sync_names(folder.substr(0, folder.size() - 1)).ok());
}

TEST(SystemFiles, NamesOfAFolderThatIsNotThereCannotBeFlushed) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_kind(make_system_files()->sync_names(folder / "none")), ErrorKind::kNotFound);
}

TEST(MemoryFiles, AFullDiskRefusesWhatIsTooMuch) {
  const auto capacity = std::make_shared<std::atomic<uint64_t>>(10);
  const auto files = make_memory_files(capacity);
  ASSERT_TRUE(files->write_atomic("a", "123456").ok());
  const absl::Status full = files->write_atomic("a", "12345");  // old and new, for a moment
  EXPECT_EQ(error_kind(full), ErrorKind::kUnavailable);
  EXPECT_EQ(full.message(), "cannot write 'a': No space left on device");
  EXPECT_EQ(*files->read("a"), "123456");
  EXPECT_TRUE(files->write_atomic("b", "1234").ok());
  const auto grow = [&](uint64_t offset) {
    return files->try_locked("b", Files::Lock::kExclusive,
                             [offset](LockedFile* file) { return file->write(offset, "x"); });
  };
  EXPECT_TRUE(grow(3).ok());
  EXPECT_FALSE(grow(4).ok());
  capacity->store(11);
  EXPECT_TRUE(grow(4).ok());
  ASSERT_TRUE(files->remove("a").ok());
  EXPECT_TRUE(files->write_atomic("c", "123456").ok());
}

// A file may be removed, or replaced by write_atomic, while others wait for its lock: an update
// that then changed the old one would be lost.
TEST(SystemFiles, NoUpdateIsLostToAFileThatWasReplaced) {
  TemporaryFolder folder;
  const auto files = make_system_files();
  const std::string path = folder / "a";
  int lost = 0;
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(files->write_atomic(path, "old").ok());
    std::latch locked(1);
    std::latch waiting(1);
    std::thread remover([&] {
      // Removes under the lock, so that what comes later starts from nothing.
      EXPECT_TRUE(update(files.get(), path, [&](std::string*) {
                    locked.count_down();
                    waiting.wait();
                    // By now the other one waits for the lock, most likely.
                    for (int n = 0; n < 100; ++n) std::this_thread::yield();
                    EXPECT_TRUE(files->remove(path).ok());
                    return false;
                  }).ok());
    });
    locked.wait();
    waiting.count_down();
    std::string seen = "?";
    EXPECT_TRUE(update(files.get(), path, [&](std::string* content) {
                  seen = *content;
                  *content = "new";
                  return true;
                }).ok());
    remover.join();
    EXPECT_EQ(seen, "");
    const auto after = files->read(path);
    lost += !after.ok() || *after != "new";
  }
  EXPECT_EQ(lost, 0);
}

TEST(SystemFiles, WritesArePrivateAndLeaveNothingBehind) {
  TemporaryFolder folder;
  const auto files = make_system_files();
  ASSERT_TRUE(files->write_atomic(folder / "a", "x").ok());
  struct stat info;
  ASSERT_EQ(::stat((folder / "a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(folder.count(), 1u);
  const absl::Status status = files->write_atomic(folder / "none/a", "x");
  EXPECT_EQ(error_kind(status), ErrorKind::kNotFound) << status;
  // A folder cannot be replaced by a file; the temporary file must be gone again.
  std::filesystem::create_directory(folder / "sub");
  EXPECT_FALSE(files->write_atomic(folder / "sub", "x").ok());
  EXPECT_FALSE(files->read(folder / "sub").ok());
  EXPECT_EQ(folder.count(), 2u);
}

// Whatever the moment at which its writer is killed, it leaves no file of another name.
TEST(SystemFiles, ANewFileHasNoOtherNameBefore) {
  TemporaryFolder folder;
  const int unnamed = ::open((folder / "").c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (unnamed < 0) return;  // this file system has no files without a name
  ::close(unnamed);
  const auto files = make_system_files();
  const testing::NamesMade names(folder / "");
  ASSERT_TRUE(files->write_atomic(folder / "a", "x").ok());
  EXPECT_EQ(names.take(), std::set<std::string>{"a"});
  ASSERT_TRUE(files->write_atomic(folder / "a", "y").ok());
  EXPECT_EQ(files->read(folder / "a").value(), "y");
  EXPECT_EQ(folder.count(), 1u);
}

TEST(SystemFiles, AWriterThatIsKilledLeavesTheOldFileAlone) {
  TemporaryFolder folder;
  const auto files = make_system_files();
  ASSERT_TRUE(files->write_atomic(folder / "a", "old").ok());
  const std::string large(2 << 20, 'x');
  const pid_t child = ::fork();
  if (child == 0) {
    // The system kills it (SIGXFSZ) in the middle of the file.
    const rlimit limit = {1 << 20, 1 << 20};
    const rlimit no_core = {0, 0};
    (void)::setrlimit(RLIMIT_CORE, &no_core);
    if (::setrlimit(RLIMIT_FSIZE, &limit) == 0) (void)files->write_atomic(folder / "a", large);
    ::_exit(0);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(files->read(folder / "a").value(), "old");
  const int unnamed = ::open((folder / "").c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (unnamed < 0) return;  // this file system has no files without a name
  ::close(unnamed);
  EXPECT_EQ(folder.count(), 1u);
}

}  // namespace
}  // namespace weft
