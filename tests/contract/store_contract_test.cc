// What every Store promises, asked of every kind of store. A new kind joins in store_world.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/store/prefix_store.h"
#include "weft/store/store.h"
#include "weft/tests/contract/store_world.h"

namespace weft::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr size_t kMaxKey = 1024;
constexpr size_t kMaxValue = 1 << 20;

class StoreContract : public ::testing::TestWithParam<StoreKind> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) {
      const char* full = std::getenv("WEFT_TEST_FULL");
      ASSERT_TRUE(full == nullptr || std::string(full) != "1") << missing;
      GTEST_SKIP() << missing;
    }
    world_ = GetParam().make(runtime_);
    store_ = world_->client(Timeout());
    ASSERT_NE(store_, nullptr);
  }
  void TearDown() override {
    store_ = nullptr;
    world_ = nullptr;
  }

  std::optional<std::string> value(std::string_view key) {
    StatusOr<std::optional<std::string>> got = store_->try_get(key);
    EXPECT_TRUE(got.ok()) << got.status();
    return got.ok() ? *got : std::nullopt;
  }
  std::string compare_set(std::string_view key, std::string_view expected,
                          std::string_view desired) {
    StatusOr<std::string> got = store_->compare_set(key, expected, desired);
    EXPECT_TRUE(got.ok()) << got.status();
    return got.ok() ? *got : "<failed>";
  }
  size_t max_key() const { return kMaxKey - world_->key_overhead(); }

  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
  std::unique_ptr<StoreWorld> world_;
  std::shared_ptr<Store> store_;
};

TEST_P(StoreContract, SetThenGetGivesTheLastValue) {
  ASSERT_TRUE(store_->set("k", "one").ok());
  ASSERT_TRUE(store_->set("k", "two").ok());
  EXPECT_EQ(value("k"), "two");
  EXPECT_EQ(*store_->get("k"), "two");
}

TEST_P(StoreContract, MissingKeyIsNotAnEmptyValue) {
  EXPECT_EQ(value("k"), std::nullopt);
  EXPECT_FALSE(*store_->check({"k"}));
  ASSERT_TRUE(store_->set("k", "").ok());
  EXPECT_EQ(value("k"), "");
  EXPECT_EQ(*store_->get("k"), "");
  EXPECT_TRUE(*store_->check({"k"}));
}

TEST_P(StoreContract, BytesTravelUnchanged) {
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  const std::string key = "k\n/\t = \"" + all.substr(0, 200);
  ASSERT_TRUE(store_->set(key, all).ok());
  EXPECT_EQ(value(key), all);
  EXPECT_EQ(value(key.substr(0, key.size() - 1)), std::nullopt);
  EXPECT_THAT(*store_->list_keys("k\n"), ElementsAre(key));
  EXPECT_EQ(compare_set(key, all, std::string("\0x\0", 3)), std::string("\0x\0", 3));
  EXPECT_EQ(value(key), std::string("\0x\0", 3));
}

TEST_P(StoreContract, AddCountsFromZero) {
  EXPECT_EQ(*store_->add("n", 5), 5);
  EXPECT_EQ(*store_->add("n", -7), -2);
  EXPECT_EQ(*store_->add("n", 0), -2);
  EXPECT_EQ(value("n"), "-2");
  ASSERT_TRUE(store_->set("m", "41").ok());
  EXPECT_EQ(*store_->add("m", 1), 42);
}

TEST_P(StoreContract, AddToSomethingElseIsAnErrorAndChangesNothing) {
  ASSERT_TRUE(store_->set("k", "forty").ok());
  const StatusOr<int64_t> sum = store_->add("k", 1);
  ASSERT_FALSE(sum.ok());
  EXPECT_EQ(error_kind(sum.status()), ErrorKind::kInvalidArgument) << sum.status();
  EXPECT_THAT(std::string(sum.status().message()), HasSubstr("forty"));
  EXPECT_EQ(value("k"), "forty");
}

TEST_P(StoreContract, AddThatOverflowsIsAnErrorAndChangesNothing) {
  const std::string top = "9223372036854775807";
  ASSERT_TRUE(store_->set("k", top).ok());
  EXPECT_EQ(store_->add("k", 1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(value("k"), top);
  EXPECT_EQ(*store_->add("k", INT64_MIN), -1);
}

TEST_P(StoreContract, CompareSetReplacesOnlyWhatWasExpected) {
  EXPECT_EQ(compare_set("k", "old", "new"), "");  // missing, something expected
  EXPECT_EQ(value("k"), std::nullopt);
  EXPECT_EQ(compare_set("k", "", "one"), "one");       // missing, as expected
  EXPECT_EQ(compare_set("k", "", "two"), "one");       // there, expected missing
  EXPECT_EQ(compare_set("k", "three", "two"), "one");  // something else
  EXPECT_EQ(compare_set("k", "one", "two"), "two");
  EXPECT_EQ(value("k"), "two");
  EXPECT_EQ(compare_set("k", "two", ""), "");  // to an empty value
  EXPECT_EQ(value("k"), "");
  EXPECT_EQ(compare_set("k", "", "three"), "three");  // and on from there
}

TEST_P(StoreContract, DeleteTellsWhetherTheKeyWasThere) {
  ASSERT_TRUE(store_->set("k", "v").ok());
  EXPECT_TRUE(*store_->delete_key("k"));
  EXPECT_FALSE(*store_->delete_key("k"));
  EXPECT_EQ(value("k"), std::nullopt);
  EXPECT_EQ(*store_->num_keys(), 0);
}

TEST_P(StoreContract, ListIsSortedAndByPrefix) {
  for (const char* key : {"b/2", "b/10", "a", "b", "c", "b/1", "b\xff"}) {
    ASSERT_TRUE(store_->set(key, "v").ok());
  }
  EXPECT_THAT(*store_->list_keys("b/"), ElementsAre("b/1", "b/10", "b/2"));
  EXPECT_THAT(*store_->list_keys("b"), ElementsAre("b", "b/1", "b/10", "b/2", "b\xff"));
  EXPECT_THAT(*store_->list_keys("zz"), IsEmpty());
  EXPECT_EQ(store_->list_keys("")->size(), 7u);
  EXPECT_EQ(*store_->num_keys(), 7);
}

TEST_P(StoreContract, ManyKeysAreListedWhole) {
  // More than 1 MiB of keys.
  std::vector<std::string> keys;
  for (int i = 0; i < 1200; ++i) {
    keys.push_back(absl::StrCat("many/", 10000 + i, std::string(900, 'x')));
  }
  const bool slow = GetParam().name.find("file") != std::string::npos ||
                    GetParam().name.find("etcd") != std::string::npos;
  if (slow) keys.resize(120);
  for (const std::string& key : keys) ASSERT_TRUE(store_->set(key, "").ok());
  EXPECT_EQ(*store_->list_keys("many/"), keys);
  EXPECT_EQ(*store_->num_keys(), static_cast<int64_t>(keys.size()));
  EXPECT_TRUE(*store_->check(keys));
  ASSERT_TRUE(store_->wait(keys).ok());
  keys.push_back("none");
  EXPECT_FALSE(*store_->check(keys));
}

TEST_P(StoreContract, DEF_11_ManyValuesAreReadAtOnce) {
  for (const char* key : {"b/2", "b/10", "a", "b/1"}) ASSERT_TRUE(store_->set(key, key).ok());
  ASSERT_TRUE(store_->set("b/empty", "").ok());
  const auto values = store_->multi_get({"b/2", "none", "a", "b/2", "b/empty"});
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_THAT(*values, ElementsAre("b/2", std::nullopt, "a", "b/2", ""));
  EXPECT_THAT(*store_->multi_get({}), IsEmpty());
  const auto entries = store_->list_entries("b/");
  ASSERT_TRUE(entries.ok()) << entries.status();
  EXPECT_THAT(*entries, ElementsAre(StoreEntry{"b/1", "b/1"}, StoreEntry{"b/10", "b/10"},
                                    StoreEntry{"b/2", "b/2"}, StoreEntry{"b/empty", ""}));
  EXPECT_THAT(*store_->list_entries("zz"), IsEmpty());
  EXPECT_EQ(store_->list_entries("")->size(), 5u);
  EXPECT_EQ(error_kind(store_->multi_get({"a", ""}).status()), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_kind(store_->multi_get({"a"}, 0ms).status()), ErrorKind::kDeadline);
  EXPECT_EQ(error_kind(store_->list_entries("a", 0ms).status()), ErrorKind::kDeadline);
}

// More than any message holds.
TEST_P(StoreContract, DEF_11_LargeValuesAreReadWhole) {
  std::vector<StoreEntry> entries;
  std::vector<std::string> keys;
  for (int i = 0; i < 10; ++i) {
    entries.push_back({absl::StrCat("large/", i), std::string(kMaxValue, static_cast<char>(i))});
    keys.push_back(entries.back().key);
  }
  for (const StoreEntry& e : entries) ASSERT_TRUE(store_->set(e.key, e.value).ok());
  const auto listed = store_->list_entries("large/");
  ASSERT_TRUE(listed.ok()) << listed.status();
  EXPECT_TRUE(*listed == entries);
  keys.insert(keys.begin() + 5, "none");
  const auto values = store_->multi_get(keys);
  ASSERT_TRUE(values.ok()) << values.status();
  ASSERT_EQ(values->size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t entry = i < 5 ? i : i - 1;
    EXPECT_EQ(i == 5, !(*values)[i].has_value()) << i;
    if (i != 5) {
      EXPECT_TRUE((*values)[i] == entries[entry].value) << i;
    }
  }
}

TEST_P(StoreContract, CheckWantsAll) {
  ASSERT_TRUE(store_->set("a", "1").ok());
  ASSERT_TRUE(store_->set("b", "1").ok());
  EXPECT_TRUE(*store_->check({"a", "b"}));
  EXPECT_FALSE(*store_->check({"a", "c", "b"}));
  EXPECT_TRUE(*store_->check({}));
  EXPECT_TRUE(store_->wait({}).ok());
}

TEST_P(StoreContract, KeysHaveOneTo1024Bytes) {
  const std::string longest(max_key(), 'k');
  ASSERT_TRUE(store_->set(longest, "v").ok());
  EXPECT_EQ(value(longest), "v");
  EXPECT_TRUE(store_->set("1", "v").ok());
  for (const std::string& bad : {std::string(), longest + "k"}) {
    const std::vector<Status> all = {store_->set(bad, "v"),
                                     store_->try_get(bad).status(),
                                     store_->get(bad).status(),
                                     store_->add(bad, 1).status(),
                                     store_->compare_set(bad, "", "v").status(),
                                     store_->delete_key(bad).status(),
                                     store_->check({"1", bad}).status(),
                                     store_->wait({"1", bad}),
                                     store_->wait_change(bad, std::nullopt).status(),
                                     store_->multi_get({"1", bad}).status()};
    for (const Status& status : all) {
      EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << status;
    }
  }
  EXPECT_EQ(*store_->num_keys(), 2);
}

TEST_P(StoreContract, ValuesHaveAtMostOneMiB) {
  const std::string biggest(kMaxValue, '\xfe');
  ASSERT_TRUE(store_->set("k", biggest).ok());
  EXPECT_EQ(value("k"), biggest);
  const std::string other(kMaxValue, '\x01');
  EXPECT_EQ(compare_set("k", biggest, other), other);
  const std::string too_big = biggest + "x";
  EXPECT_EQ(error_kind(store_->set("k", too_big)), ErrorKind::kInvalidArgument);
  EXPECT_EQ(error_kind(store_->compare_set("k", other, too_big).status()),
            ErrorKind::kInvalidArgument);
  EXPECT_EQ(value("k"), other);
}

TEST_P(StoreContract, GetWaitsForTheKey) {
  const std::shared_ptr<Store> other = world_->client(Timeout());
  std::thread setter([&] { EXPECT_TRUE(other->set("k", "v").ok()); });
  // Without a deadline: a thread that is not woken hangs here.
  const StatusOr<std::string> got = store_->get("k", kInfinite);
  setter.join();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, "v");
}

TEST_P(StoreContract, WaitersOfOneKeyAllWake) {
  std::vector<std::shared_ptr<Store>> clients = {store_, world_->client(Timeout())};
  std::vector<std::thread> threads;
  std::atomic<int> woken{0};
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      Store& store = *clients[static_cast<size_t>(i) % clients.size()];
      const StatusOr<std::string> got = store.get("go", kInfinite);
      EXPECT_TRUE(got.ok()) << got.status();
      woken += got.ok() && *got == "now";
    });
  }
  EXPECT_TRUE(store_->set("other", "v").ok());
  EXPECT_TRUE(store_->set("go", "now").ok());
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(woken, 6);
}

TEST_P(StoreContract, WaitWantsAllKeysWhateverTheirOrder) {
  const std::shared_ptr<Store> other = world_->client(Timeout());
  std::thread setter([&] {
    for (const char* key : {"c", "a", "b"}) EXPECT_TRUE(other->set(key, "v").ok());
  });
  const Status status = store_->wait({"a", "b", "c"}, kInfinite);
  setter.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(StoreContract, DeadlineNamesOperationKeyAndStore) {
  const Status status = store_->get("never", 60ms).status();
  EXPECT_EQ(error_kind(status), ErrorKind::kDeadline) << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("get("));
  EXPECT_THAT(message, HasSubstr("never"));
  EXPECT_THAT(message, HasSubstr(store_->describe()));
}

TEST_P(StoreContract, WaitNamesThoseThatAreMissing) {
  ASSERT_TRUE(store_->set("here", "v").ok());
  const Status status = store_->wait({"absent1", "here", "absent2"}, 400ms);
  EXPECT_EQ(error_kind(status), ErrorKind::kDeadline) << status;
  const std::string message(status.message());
  const size_t missing = message.find("missing");
  ASSERT_NE(missing, std::string::npos) << message;
  EXPECT_THAT(message.substr(missing), HasSubstr("absent1"));
  EXPECT_THAT(message.substr(missing), HasSubstr("absent2"));
  EXPECT_THAT(message.substr(missing), Not(HasSubstr("here")));
}

TEST_P(StoreContract, NoTimeMeansNothingIsDone) {
  ASSERT_TRUE(store_->set("k", "v").ok());
  const std::vector<Status> all = {store_->set("k", "w", 0ms),
                                   store_->try_get("k", 0ms).status(),
                                   store_->get("k", -1s).status(),
                                   store_->add("n", 1, 0ms).status(),
                                   store_->compare_set("k", "v", "w", 0ms).status(),
                                   store_->delete_key("k", 0ms).status(),
                                   store_->check({"k"}, 0ms).status(),
                                   store_->wait({"k"}, 0ms),
                                   store_->wait_change("k", std::nullopt, 0ms).status(),
                                   store_->list_keys("", 0ms).status(),
                                   store_->num_keys(0ms).status()};
  for (const Status& status : all) EXPECT_EQ(error_kind(status), ErrorKind::kDeadline) << status;
  EXPECT_EQ(value("k"), "v");
  EXPECT_EQ(*store_->num_keys(), 1);
}

TEST_P(StoreContract, WaitChangeSeesEveryKindOfChange) {
  const std::shared_ptr<Store> other = world_->client(Timeout());
  ASSERT_TRUE(store_->set("k", "1").ok());
  EXPECT_EQ(*store_->wait_change("k", std::nullopt), "1");  // at once
  EXPECT_EQ(*store_->wait_change("k", "0"), "1");
  EXPECT_EQ(*store_->wait_change("nobody", "x"), std::nullopt);

  std::thread changer([&] {
    EXPECT_TRUE(other->set("k", "2").ok());
    EXPECT_EQ(*other->get("seen2"), "");
    EXPECT_TRUE(*other->delete_key("k"));
    EXPECT_EQ(*other->get("seen_deleted"), "");
    EXPECT_TRUE(other->set("k", "").ok());
  });
  EXPECT_EQ(*store_->wait_change("k", "1"), "2");
  EXPECT_TRUE(store_->set("seen2", "").ok());
  EXPECT_EQ(*store_->wait_change("k", "2"), std::nullopt);
  EXPECT_TRUE(store_->set("seen_deleted", "").ok());
  EXPECT_EQ(*store_->wait_change("k", std::nullopt), "");  // missing to empty is a change
  changer.join();
  EXPECT_EQ(error_kind(store_->wait_change("k", "", 60ms).status()), ErrorKind::kDeadline);
}

TEST_P(StoreContract, EightThreadsAddAndNothingIsLost) {
  const int each = GetParam().name.find("etcd") != std::string::npos ? 10 : 40;
  std::vector<std::shared_ptr<Store>> clients = {store_, world_->client(Timeout())};
  std::vector<std::thread> threads;
  std::vector<std::vector<int64_t>> seen(8);
  for (size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < each; ++i) {
        const StatusOr<int64_t> sum = clients[t % 2]->add("n", 1);
        EXPECT_TRUE(sum.ok()) << sum.status();
        if (sum.ok()) seen[t].push_back(*sum);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(value("n"), absl::StrCat(8 * each));
  // Every value in between was given to exactly one.
  std::vector<int64_t> all;
  for (const auto& s : seen) {
    EXPECT_TRUE(std::is_sorted(s.begin(), s.end()));
    all.insert(all.end(), s.begin(), s.end());
  }
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), static_cast<size_t>(8 * each));
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], static_cast<int64_t>(i) + 1);
}

TEST_P(StoreContract, CompareSetRacesHaveOneWinner) {
  std::vector<std::shared_ptr<Store>> clients = {store_, world_->client(Timeout())};
  for (int round = 0; round < 5; ++round) {
    const std::string key = absl::StrCat("race", round);
    std::atomic<int> winners{0};
    std::vector<std::string> results(8);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        const std::string mine = absl::StrCat("t", t);
        const StatusOr<std::string> got = clients[t % 2]->compare_set(key, "", mine);
        EXPECT_TRUE(got.ok()) << got.status();
        if (!got.ok()) return;
        results[t] = *got;
        winners += *got == mine;
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(winners, 1);
    for (const std::string& r : results) EXPECT_EQ(r, value(key));
  }
}

TEST_P(StoreContract, TwoClientsSeeOneStore) {
  const std::shared_ptr<Store> other = world_->client(Timeout());
  ASSERT_TRUE(store_->set("a", "1").ok());
  EXPECT_EQ(**other->try_get("a"), "1");
  EXPECT_EQ(*other->add("a", 1), 2);
  EXPECT_EQ(value("a"), "2");
  EXPECT_TRUE(*other->delete_key("a"));
  EXPECT_EQ(value("a"), std::nullopt);
}

TEST_P(StoreContract, InterruptEndsWaitsOfThisClientOnly) {
  const std::shared_ptr<Store> other = world_->client(Timeout());
  std::vector<Status> ended(3);
  std::vector<std::thread> threads;
  threads.emplace_back([&] { ended[0] = store_->get("never", kInfinite).status(); });
  threads.emplace_back([&] { ended[1] = store_->wait({"never", "ever"}, kInfinite); });
  threads.emplace_back(
      [&] { ended[2] = store_->wait_change("never", std::nullopt, kInfinite).status(); });
  std::thread bystander([&] { EXPECT_EQ(*other->get("later"), "v"); });
  // Some of them wait by now and some have not begun: both must end.
  store_->interrupt();
  for (std::thread& t : threads) t.join();
  for (const Status& status : ended) {
    EXPECT_EQ(error_kind(status), ErrorKind::kCancelled) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(store_->describe()));
  }
  store_->interrupt();
  const std::vector<Status> later = {store_->set("k", "v"),
                                     store_->num_keys().status(),
                                     store_->try_get("k").status(),
                                     store_->add("k", 1).status(),
                                     store_->multi_get({"k"}).status(),
                                     store_->list_entries("k").status()};
  for (const Status& status : later) EXPECT_EQ(error_kind(status), ErrorKind::kCancelled) << status;
  EXPECT_TRUE(other->set("later", "v").ok());
  bystander.join();
  EXPECT_EQ(*other->num_keys(), 1);
}

TEST_P(StoreContract, InterruptOfAPrefixLeavesTheStoreBelow) {
  PrefixStore mine("mine", store_);
  PrefixStore theirs("mine", store_);
  Status ended;
  std::thread waiter([&] { ended = mine.get("never", kInfinite).status(); });
  mine.interrupt();
  waiter.join();
  EXPECT_EQ(error_kind(ended), ErrorKind::kCancelled) << ended;
  EXPECT_TRUE(theirs.set("k", "v").ok());
  EXPECT_EQ(value("mine/k"), "v");
}

TEST_P(StoreContract, DefaultTimeoutOfTheClientIsTaken) {
  const std::shared_ptr<Store> impatient = world_->client(400ms);
  if (GetParam().name.find("hash") != std::string::npos) {
    GTEST_SUCCEED() << "clients of one HashStore share its default";
    return;
  }
  EXPECT_EQ(error_kind(impatient->get("never").status()), ErrorKind::kDeadline);
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract, ::testing::ValuesIn(all_store_kinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace weft::testing
