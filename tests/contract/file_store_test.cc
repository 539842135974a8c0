// What FileStore alone promises: whose file it is, and what it makes of damaged ones.
#include "weft/store/file_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "weft/common/files.h"
#include "weft/store/internal/file_format.h"
#include "weft/tests/contract/store_world.h"

namespace weft::testing {
namespace {

using internal::parse_store_file;
using ::testing::HasSubstr;

class FileStoreTest : public ::testing::Test {
 protected:
  ~FileStoreTest() override { std::filesystem::remove_all(directory_); }

  StatusOr<std::shared_ptr<FileStore>> open(const std::string& run) {
    return FileStore::open(path_, {.run_id = run}, runtime_);
  }
  std::string content() { return *runtime_->files().read(path_); }
  void set_content(const std::string& bytes) {
    ASSERT_TRUE(runtime_->files().write_atomic(path_, bytes).ok());
  }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  const std::string directory_ = make_temp_dir();
  const std::string path_ = directory_ + "/store";
};

TEST_F(FileStoreTest, ClientsOfOneRunShareTheFile) {
  auto a = *open("run1");
  auto b = *open("run1");
  ASSERT_TRUE(a->set("k", "v").ok());
  EXPECT_EQ(*b->get("k"), "v");
}

TEST_F(FileStoreTest, ALockThatIsNeverReleasedEndsOperationsAtTheirDeadlines) {
  auto store = *open("run1");
  ASSERT_TRUE(store->set("k", "v").ok());
  const auto has_not_read = *open("run1");
  // As a process has it that was stopped in the middle of an operation.
  const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  const absl::Duration long_time = absl::Milliseconds(600);
  for (const Status& status :
       {store->set("k", "w", long_time), has_not_read->try_get("k", long_time).status(),
        has_not_read->wait({"other"}, long_time),
        FileStore::open(path_, {.run_id = "run1", .timeout = long_time}, runtime_).status()}) {
    EXPECT_EQ(error_kind(status), ErrorKind::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("holds the lock of the file"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
  }
  // FILE-6: to read on takes no lock.
  EXPECT_EQ(*store->try_get("k"), "v");
  const Status missing = store->wait({"other"}, absl::Milliseconds(20));
  EXPECT_EQ(error_kind(missing), ErrorKind::kDeadline) << missing;
  // A short wait says nothing about the holder of the lock.
  const Status moment = store->set("k", "w", absl::Milliseconds(5));
  EXPECT_EQ(error_kind(moment), ErrorKind::kDeadline) << moment;
  // And an interrupt reaches one that waits for it.
  Status ended;
  auto waiter = runtime_->spawn("waiter", [&] { ended = store->set("k", "w"); });
  store->interrupt();
  waiter->join();
  EXPECT_EQ(error_kind(ended), ErrorKind::kCancelled) << ended;
  ::close(fd);
  EXPECT_EQ(*(*open("run1"))->get("k"), "v");
}

TEST_F(FileStoreTest, StaleFileOfACrashedRunIsBegunAnew) {
  { ASSERT_TRUE((*open("run1"))->set("k", "stale").ok()); }
  auto store = *open("run2");
  EXPECT_EQ(*store->try_get("k"), std::nullopt);
  EXPECT_EQ(*store->num_keys(), 0);
}

TEST_F(FileStoreTest, LateMembersOfAReplacedRunAreRefused) {
  auto old = *open("run1");
  ASSERT_TRUE(old->set("k", "v").ok());
  auto store = *open("run2");
  const Status write = old->set("k", "poison");
  EXPECT_EQ(error_kind(write), ErrorKind::kState) << write;
  EXPECT_THAT(std::string(write.message()), HasSubstr("run1"));
  EXPECT_THAT(std::string(write.message()), HasSubstr("run2"));
  const Status again = open("run1").status();
  EXPECT_EQ(error_kind(again), ErrorKind::kState) << again;
  EXPECT_EQ(*store->num_keys(), 0);
}

TEST_F(FileStoreTest, AWaiterOfAReplacedRunEnds) {
  auto old = *open("run1");
  Status ended;
  auto waiter = runtime_->spawn("waiter", [&] { ended = old->get("k").status(); });
  auto store = *open("run2");
  waiter->join();
  EXPECT_EQ(error_kind(ended), ErrorKind::kState) << ended;
}

TEST_F(FileStoreTest, OnlyTheLastRunsAreRemembered) {
  for (int i = 0; i < 30; ++i) ASSERT_TRUE(open(absl::StrCat("run", i)).ok());
  EXPECT_FALSE(open("run28").ok());
  EXPECT_LT(content().size(), 1000u);
}

TEST_F(FileStoreTest, BadArgumentsAndPathsAreNamed) {
  EXPECT_EQ(error_kind(open("").status()), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_kind(open(std::string(257, 'r')).status()), ErrorKind::kInvalidArgument);
  const Status status =
      FileStore::open(directory_ + "/none/store", {.run_id = "r"}, runtime_).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("/none/store"));
}

TEST_F(FileStoreTest, AFileThatIsNoStoreIsLeftAlone) {
  for (const std::string& bytes :
       {std::string("my thesis, the only copy"), std::string("W"), std::string(4096, '\0')}) {
    set_content(bytes);
    const Status status = open("run1").status();
    EXPECT_EQ(error_kind(status), ErrorKind::kProtocol) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
    EXPECT_EQ(content(), bytes);
  }
}

TEST_F(FileStoreTest, ARemovedFileIsAnError) {
  auto store = *open("run1");
  ASSERT_TRUE(runtime_->files().remove(path_).ok());
  const Status status = store->set("k", "v");
  EXPECT_EQ(error_kind(status), ErrorKind::kState) << status;
}

TEST_F(FileStoreTest, EveryCutIsAnErrorOrLosesOnlyTheLastChange) {
  auto store = *open("run1");
  ASSERT_TRUE(store->set("a", "1").ok());
  ASSERT_TRUE(store->set("b", "2").ok());
  const size_t before_last = content().size();
  ASSERT_TRUE(store->set("c", std::string(50, '3')).ok());
  const std::string whole = content();
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto file = parse_store_file(whole.substr(0, size));
    if (size < before_last) {
      EXPECT_EQ(error_kind(file.status()), ErrorKind::kProtocol) << size;
      continue;
    }
    // What a writer leaves that was killed while it added "c".
    ASSERT_TRUE(file.ok()) << size << file.status();
    EXPECT_EQ(file->table.size(), 2);
    EXPECT_EQ(file->end, before_last);
  }
}

TEST_F(FileStoreTest, TheNextWriterTakesTheCutRecordAway) {
  auto store = *open("run1");
  ASSERT_TRUE(store->set("a", "1").ok());
  const size_t good = content().size();
  ASSERT_TRUE(store->set("b", std::string(300, '2')).ok());
  for (size_t cut : {good + 1, good + 13, good + 200}) {
    set_content(content().substr(0, good));
    ASSERT_TRUE(store->set("b", std::string(300, '2')).ok());
    set_content(content().substr(0, cut));
    ASSERT_TRUE(store->set("c", "3").ok());
    EXPECT_EQ(*store->list_keys(""), (std::vector<std::string>{"a", "c"}));
    EXPECT_EQ(parse_store_file(content())->end, content().size());
  }
}

TEST_F(FileStoreTest, AnyFlippedBitIsFoundOrHarmless) {
  auto store = *open("run1");
  ASSERT_TRUE(store->set("a", "1").ok());
  ASSERT_TRUE(store->add("n", 41).ok());
  ASSERT_TRUE(store->set("b", "2").ok());
  const std::string whole = content();
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string bad = whole;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    const auto file = parse_store_file(bad);
    if (!file.ok()) {
      EXPECT_EQ(error_kind(file.status()), ErrorKind::kProtocol);
      continue;
    }
    // A longer length at the very end looks like a cut record; never like other content.
    EXPECT_LE(file->table.size(), 2);
    for (const auto& [key, value] : file->table.entries()) {
      EXPECT_TRUE((key == "a" && value == "1") || (key == "n" && value == "41")) << key;
    }
  }
}

TEST_F(FileStoreTest, RandomBytesNeverCrash) {
  std::mt19937 random(42);
  auto store = *open("run1");
  ASSERT_TRUE(store->set("a", "1").ok());
  const std::string header = content();
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = round % 2 == 0 ? "WEFTSTOR" : header;
    const size_t n = random() % 200;
    for (size_t i = 0; i < n; ++i)
      bytes.push_back(static_cast<char>(random() % 5 == 0 ? random() : 0));
    const auto file = parse_store_file(bytes);
    if (!file.ok()) {
      EXPECT_EQ(error_kind(file.status()), ErrorKind::kProtocol);
    }
  }
}

TEST_F(FileStoreTest, TheLogIsBegunAnewBeforeItGrowsForEver) {
  auto store = *open("run1");
  const std::string value(40'000, 'v');
  for (int i = 0; i < 60; ++i) {
    ASSERT_TRUE(store->set("k", value).ok());
    ASSERT_TRUE(store->add("n", 1).ok());
  }
  EXPECT_LT(content().size(), 600'000u);
  EXPECT_EQ(*store->get("k"), value);
  EXPECT_EQ(*store->get("n"), "60");
}

TEST_F(FileStoreTest, ProcessesShareIt) {
  auto store = *open("run1");
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      auto runtime = make_system_runtime();
      auto mine = FileStore::open(path_, {.run_id = "run1"}, runtime);
      bool ok = mine.ok();
      for (int n = 0; ok && n < 50; ++n) ok = (*mine)->add("n", 1).ok();
      ok = ok && (*mine)->get("go").ok();
      ::_exit(ok ? 0 : 1);
    }
    children.push_back(pid);
  }
  auto seen = *store->try_get("n");
  while (seen != "200") {
    const auto changed = store->wait_change("n", seen, absl::Seconds(30));
    ASSERT_TRUE(changed.ok()) << changed.status();
    seen = *changed;
  }
  ASSERT_TRUE(store->set("go", "").ok());
  for (const pid_t pid : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace weft::testing
