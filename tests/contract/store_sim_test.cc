// Stores under the seeded scheduler with virtual time.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/files.h"
#include "weft/common/sim.h"
#include "weft/store/file_store.h"
#include "weft/store/hash_store.h"
#include "weft/store/prefix_store.h"
#include "weft/tests/testing/forwarding_files.h"

namespace weft::testing {
namespace {

std::shared_ptr<Runtime> borrowed(Runtime* runtime) {
  return std::shared_ptr<Runtime>(std::shared_ptr<Runtime>(), runtime);
}

using MakeStore = std::function<std::shared_ptr<Store>(const std::shared_ptr<Runtime>&)>;

// Five actors race for a leader's key, count, and meet at a barrier; the last to be counted opens
// it.
uint64_t race(uint64_t seed, const MakeStore& make_store, std::set<std::string>* winners) {
  SimRuntime sim({.seed = seed, .keep_events = 50});
  const auto runtime = borrowed(&sim);
  const Status status = sim.run([&] {
    const std::shared_ptr<Store> store = make_store(runtime);
    int won = 0;
    std::vector<std::unique_ptr<Thread>> actors;
    for (int i = 0; i < 5; ++i) {
      actors.push_back(sim.spawn(absl::StrCat("actor", i), [&, i] {
        const std::string me = absl::StrCat("actor", i);
        sim.sleep(absl::Milliseconds(static_cast<int64_t>(sim.random().below(3))));
        const StatusOr<std::string> leader = store->compare_set("leader", "", me);
        ASSERT_TRUE(leader.ok()) << leader.status();
        won += *leader == me;
        const StatusOr<int64_t> arrived = store->add("arrived", 1);
        ASSERT_TRUE(arrived.ok()) << arrived.status();
        if (*arrived == 5) {
          EXPECT_TRUE(store->set("go", me).ok());
        }
        EXPECT_TRUE(store->get("go").ok());
        sim.trace("passed", static_cast<uint64_t>(i), static_cast<uint64_t>(*arrived));
      }));
    }
    for (auto& actor : actors) actor->join();
    EXPECT_EQ(won, 1);
    EXPECT_EQ(*store->get("arrived"), "5");
    winners->insert(*store->get("leader"));
    const Status late = store->get("never", absl::Seconds(10)).status();
    EXPECT_EQ(error_kind(late), ErrorKind::kDeadline) << late;
  });
  EXPECT_TRUE(status.ok()) << status;
  return sim.trace_hash();
}

void check(const MakeStore& make_store) {
  std::set<std::string> winners;
  std::set<uint64_t> hashes;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const uint64_t hash = race(seed, make_store, &winners);
    EXPECT_EQ(race(seed, make_store, &winners), hash) << "seed " << seed;
    hashes.insert(hash);
  }
  EXPECT_GT(winners.size(), 2u) << "the schedules are all alike";
  EXPECT_EQ(hashes.size(), 40u);
}

TEST(StoreSim, HashStoreSameSeedSameTrace) {
  check(
      [](const std::shared_ptr<Runtime>& runtime) { return std::make_shared<HashStore>(runtime); });
}

TEST(StoreSim, PrefixOfFileStoreSameSeedSameTrace) {
  check([](const std::shared_ptr<Runtime>& runtime) -> std::shared_ptr<Store> {
    auto store = FileStore::open("/sim/store", {.run_id = "r"}, runtime);
    EXPECT_TRUE(store.ok()) << store.status();
    return std::make_shared<PrefixStore>("p", *store);
  });
}

class CountingFile : public LockedFile {
 public:
  CountingFile(LockedFile* inner, uint64_t* bytes) : inner_(inner), bytes_(bytes) {}
  absl::StatusOr<FileStamp> stamp() override { return inner_->stamp(); }
  absl::StatusOr<std::string> read(uint64_t offset, uint64_t length) override {
    absl::StatusOr<std::string> out = inner_->read(offset, length);
    if (out.ok()) *bytes_ += out->size();
    return out;
  }
  absl::Status write(uint64_t offset, std::string_view content) override {
    return inner_->write(offset, content);
  }
  absl::Status truncate(uint64_t size) override { return inner_->truncate(size); }

 private:
  LockedFile* const inner_;
  uint64_t* const bytes_;
};

// Counts how often a file is looked at, locked to be read and locked for a change through it, and how many bytes
// are read.
class CountingFiles : public ForwardingFiles {
 public:
  using ForwardingFiles::ForwardingFiles;
  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    ++(lock == Lock::kExclusive ? updates : lock == Lock::kShared ? reads : looks);
    return ForwardingFiles::try_locked(path, lock, [&](LockedFile* file) {
      CountingFile counting(file, &bytes);
      return use(&counting);
    });
  }

  uint64_t bytes = 0;
  int updates = 0;
  int reads = 0;
  int looks = 0;
};

TEST(StoreSim, AFileThatDoesNotChangeIsHardlyRead) {
  SimRuntime sim({.seed = 11});
  CountingFiles files(&sim.files());
  WithFiles counting(&sim, &files);
  const Status status = sim.run([&] {
    const auto waiting = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&counting));
    const auto other = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&sim));
    absl::Time seen;
    auto waiter = sim.spawn("waiter", [&] {
      EXPECT_EQ(*waiting->get("key", absl::Seconds(60)), "value");
      seen = sim.now();
    });
    sim.sleep(absl::Seconds(20.5));
    // Every second, and not every 50 ms.
    EXPECT_GE(files.looks, 20);
    EXPECT_LE(files.looks, 25);
    EXPECT_EQ(files.reads, 1) << "FILE-6: the first time";
    EXPECT_EQ(files.updates, 1) << "FILE-4: nobody but who opens or changes it excludes others";
    const absl::Time changed = sim.now();
    ASSERT_TRUE(other->set("key", "value").ok());
    waiter->join();
    EXPECT_LE(seen - changed, absl::Milliseconds(50)) << "a change is seen at the next look";
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(StoreSim, FILE_4_AChangeReadsTheFileOnce) {
  SimRuntime sim({.seed = 12});
  CountingFiles files(&sim.files());
  WithFiles counting(&sim, &files);
  const Status status = sim.run([&] {
    const auto store = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&counting));
    const auto costs = [&](int looks, int updates, const std::function<void()>& operation) {
      files.looks = files.reads = files.updates = 0;
      operation();
      EXPECT_EQ(files.looks, looks);
      EXPECT_EQ(files.updates, updates);
      EXPECT_EQ(files.reads, 0) << "FILE-6";
    };
    costs(0, 1, [&] { EXPECT_TRUE(store->set("key", "value").ok()); });
    costs(0, 1, [&] { EXPECT_EQ(*store->add("count", 2), 2); });
    // These may change nothing, and then exclude no other client.
    costs(1, 0, [&] { EXPECT_EQ(*store->compare_set("key", "other", "new"), "value"); });
    costs(1, 1, [&] { EXPECT_EQ(*store->compare_set("key", "value", "new"), "new"); });
    costs(1, 0, [&] { EXPECT_FALSE(*store->delete_key("none")); });
    costs(1, 1, [&] { EXPECT_TRUE(*store->delete_key("key")); });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(StoreSim, DEF_11_and_FILE_5_WhatOneWritesIsAllThatOthersRead) {
  SimRuntime sim({.seed = 13});
  CountingFiles files(&sim.files());
  WithFiles counting(&sim, &files);
  const Status status = sim.run([&] {
    const auto store = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&counting));
    const auto other = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&sim));
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(other->set(absl::StrCat("large", i), std::string(1000, 'x')).ok());
    }
    EXPECT_EQ(*store->num_keys(), 100);
    EXPECT_GE(files.bytes, 100'000u);
    files.bytes = 0;
    constexpr int kBeats = 100;
    for (int i = 0; i < kBeats; ++i) {
      ASSERT_TRUE(other->set("beat", absl::StrCat(i)).ok());
      EXPECT_EQ(*store->get("beat"), absl::StrCat(i));
      ASSERT_TRUE(store->set("mine", absl::StrCat(i)).ok());
    }
    EXPECT_LE(files.bytes, 3 * kBeats * 100u) << "the file is not read again";
    EXPECT_EQ(other->list_entries("")->size(), 102u);
    EXPECT_EQ(*store->list_entries(""), *other->list_entries(""));
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Holds the lock of a file itself, and may show who looks without a lock what a change leaves half done: the bytes
// that are read first of one content, those that are read then of another.
class HeldFiles : public ForwardingFiles {
 public:
  using ForwardingFiles::ForwardingFiles;
  absl::StatusOr<bool> try_locked(std::string_view path, Lock lock,
                                  const std::function<absl::Status(LockedFile*)>& use) override {
    if (held && lock != Lock::kNone) return false;
    if (lock != Lock::kNone || contents.empty())
      return ForwardingFiles::try_locked(path, lock, use);
    Torn torn(&contents);
    WEFT_RETURN_IF_ERROR(use(&torn));
    return true;
  }

  bool held = false;
  std::vector<std::string> contents;  // shown one by one, the last from then on

 private:
  class Torn : public LockedFile {
   public:
    explicit Torn(const std::vector<std::string>* contents) : contents_(*contents) {}
    absl::StatusOr<FileStamp> stamp() override { return FileStamp{0, contents_[at_].size(), 0}; }
    absl::StatusOr<std::string> read(uint64_t offset, uint64_t length) override {
      const std::string& now = contents_[at_];
      if (at_ + 1 < contents_.size()) ++at_;
      return offset >= now.size() ? std::string() : now.substr(offset, length);
    }
    absl::Status write(uint64_t, std::string_view) override { return refused(); }
    absl::Status truncate(uint64_t) override { return refused(); }

   private:
    static absl::Status refused() { return absl::FailedPreconditionError("there is no lock"); }
    const std::vector<std::string>& contents_;
    size_t at_ = 0;
  };
};

TEST(StoreSim, FILE_6_WhoHasReadBeforeNeedsNoLockToReadOn) {
  SimRuntime sim({.seed = 16});
  HeldFiles files(&sim.files());
  WithFiles held(&sim, &files);
  const Status status = sim.run([&] {
    const auto reader = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&held));
    const auto writer = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&sim));
    ASSERT_TRUE(writer->set("a", "1").ok());
    ASSERT_EQ(*reader->get("a"), "1");
    files.held = true;
    ASSERT_TRUE(writer->set("a", "2").ok());
    EXPECT_EQ(*reader->get("a"), "2");
    EXPECT_EQ(reader->list_entries("")->size(), 1u);
    EXPECT_EQ(*reader->compare_set("a", "none", "new"), "2") << "this one changes nothing";
    const Status refused = reader->set("a", "3", absl::Seconds(1));
    EXPECT_EQ(error_kind(refused), ErrorKind::kUnavailable) << refused;
    // Another file under the name is not what was read.
    ASSERT_TRUE(sim.files().write_atomic("/sim/store", "").ok());
    EXPECT_FALSE(reader->get("a", absl::Seconds(1)).ok());
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What a look without the lock finds of a change under way is the state before or after it, or nothing.
TEST(StoreSim, FILE_6_WhatIsHalfDoneIsReadUnderTheLock) {
  SimRuntime sim({.seed = 17});
  HeldFiles files(&sim.files());
  WithFiles held(&sim, &files);
  const std::string path = "/sim/store";
  int seen_before = 0, seen_after = 0, not_understood = 0;
  // `at`: what the store holds when the reader has read last, and then what it may find.
  const auto look = [&](const std::string& at, const std::vector<std::string>& shown,
                        const std::string& before, const std::string& after) {
    ASSERT_TRUE(sim.files().write_atomic(path, at).ok());
    files.contents.clear();
    files.held = false;
    const auto reader = *FileStore::open(path, {.run_id = "r"}, borrowed(&held));
    ASSERT_EQ(*reader->get("k"), before);
    files.contents = shown;
    files.held = true;
    const StatusOr<std::string> got = reader->get("k", absl::Milliseconds(1));
    if (got.ok()) {
      ASSERT_TRUE(*got == before || *got == after) << *got;
      ++(*got == before ? seen_before : seen_after);
      return;
    }
    ASSERT_EQ(error_kind(got.status()), ErrorKind::kDeadline) << got.status();
    ++not_understood;
    files.held = false;
    const StatusOr<std::string> locked = reader->get("k");
    ASSERT_TRUE(locked.ok()) << locked.status();
    EXPECT_EQ(*locked, before);
  };
  const Status status = sim.run([&] {
    const auto writer = *FileStore::open(path, {.run_id = "r"}, borrowed(&sim));
    const auto content = [&] { return *sim.files().read(path); };
    ASSERT_TRUE(writer->set("k", "before").ok());
    const std::string old = content();
    ASSERT_TRUE(writer->set("k", std::string(40, 'a')).ok());
    const std::string grown = content();
    // The header, then the record, each byte by byte; and over the rest of a record that was cut.
    for (const std::string& begin : {old, old + std::string(25, 'x')}) {
      const size_t header = 16 + static_cast<unsigned char>(old[12]) + 8;
      for (size_t done = 0; done <= grown.size(); ++done) {
        if (done > header && done < old.size()) continue;
        std::string half = begin;
        if (half.size() < done) half.resize(done);
        half.replace(0, done, grown.substr(0, done));
        look(old, {half}, "before", std::string(40, 'a'));
        look(old, {old, half}, "before", std::string(40, 'a'));
      }
    }
    EXPECT_GT(seen_before, 50);
    EXPECT_GE(seen_after, 4);
    EXPECT_GT(not_understood, 50);
    // A log that is begun anew, over the old one.
    const std::string generation = old.substr(16, 8);
    std::string longest;
    while (content().substr(16, 8) == generation) {
      longest = content();
      ASSERT_TRUE(writer->set("k", absl::StrCat("after", std::string(20'000, 'z'))).ok());
    }
    const std::string begun = content();
    const std::string after = *writer->get("k");
    ASSERT_LT(begun.size(), longest.size());
    seen_before = seen_after = not_understood = 0;
    for (size_t done = 1; done <= begun.size(); done += 97) {
      std::string half = longest;
      half.replace(0, done, begun.substr(0, done));
      // The header may have been read just before.
      look(old, {half}, "before", after);
      look(old, {longest, half}, "before", after);
    }
    look(old, {longest, begun}, "before", after);
    EXPECT_GT(not_understood, 100);
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The log is begun anew now and then; a client that has read the old one sees the same.
TEST(StoreSim, FILE_5_ALogThatIsBegunAnewIsReadAnew) {
  SimRuntime sim({.seed = 14});
  const Status status = sim.run([&] {
    const auto a = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&sim));
    const auto b = *FileStore::open("/sim/store", {.run_id = "r"}, borrowed(&sim));
    for (int i = 0; i < 2000; ++i) {
      const auto& [writer, reader] = i % 2 == 0 ? std::tie(a, b) : std::tie(b, a);
      ASSERT_TRUE(writer->set("k", absl::StrCat(i, std::string(400, 'v'))).ok());
      ASSERT_EQ(*writer->add("n", 1), i + 1);
      if (i % 7 == 0) {
        EXPECT_EQ(*reader->get("n"), absl::StrCat(i + 1));
      }
    }
    EXPECT_LT(sim.files().stamp("/sim/store")->size, 300u << 10);
    EXPECT_EQ(*a->list_entries(""), *b->list_entries(""));
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What a killed writer leaves is overwritten by the next; a client that has read so far reads on.
TEST(StoreSim, FILE_5_ARecordThatWasCutIsOverwrittenUnderAReader) {
  SimRuntime sim({.seed = 15});
  const Status status = sim.run([&] {
    const std::string path = "/sim/store";
    const auto reader = *FileStore::open(path, {.run_id = "r"}, borrowed(&sim));
    const auto writer = *FileStore::open(path, {.run_id = "r"}, borrowed(&sim));
    for (int round = 0; round < 40; ++round) {
      ASSERT_TRUE(writer->set("a", absl::StrCat(round)).ok());
      ASSERT_EQ(*reader->get("a"), absl::StrCat(round));
      const size_t whole = sim.files().stamp(path)->size;
      ASSERT_TRUE(writer->set("cut", std::string(300, 'x')).ok());
      const size_t cut = whole + 1 + static_cast<size_t>(round) * 7;
      ASSERT_TRUE(*sim.files().try_update_locked(path, [cut](std::string* content) {
        content->resize(cut);
        return true;
      }));
      EXPECT_EQ(*reader->get("a"), absl::StrCat(round)) << "nothing was acknowledged";
      // Shorter and longer than what is there.
      ASSERT_TRUE(writer->set("b", std::string(round % 2 == 0 ? 1 : 500, 'b')).ok());
      EXPECT_FALSE(*reader->check({"cut"}));
      EXPECT_EQ(*reader->list_entries(""), *writer->list_entries(""));
    }
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(StoreSim, InterruptWakesInVirtualTime) {
  SimRuntime sim({.seed = 7});
  const auto runtime = borrowed(&sim);
  const Status status = sim.run([&] {
    auto store = std::make_shared<HashStore>(runtime);
    Status ended;
    auto waiter = sim.spawn("waiter", [&] { ended = store->get("never", kInfinite).status(); });
    sim.sleep(absl::Hours(1));
    store->interrupt();
    waiter->join();
    EXPECT_EQ(error_kind(ended), ErrorKind::kCancelled) << ended;
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace weft::testing
