// Membership without a worker around it: what it writes into the store, what it does when a single
// operation fails, and when its thread rests and wakes.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/proto/rpc.pb.h"
#include "weft/rpc/internal/membership/membership.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"

namespace weft::internal {
namespace {

// An incarnation as keys have it.
std::string inc(uint64_t incarnation) {
  return absl::StrCat(absl::Hex(incarnation, absl::kZeroPad16));
}

// What the clients of one store share: operations that fail, and how often was listed.
struct Control {
  std::function<bool(std::string_view operation, std::string_view key)> fails;
  int64_t operations = 0;
  int64_t lists = 0;
};

class ControlledStore : public DelegatingStore, public ForkableStore {
 public:
  ControlledStore(std::shared_ptr<HashStore> inner, Control* control)
      : DelegatingStore(inner), hash_(std::move(inner)), control_(control) {}
  std::shared_ptr<Store> new_client() override {
    return std::make_shared<ControlledStore>(
        std::dynamic_pointer_cast<HashStore>(hash_->new_client()), control_);
  }
  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(begin("set", key));
    return DelegatingStore::set(key, value, timeout);
  }
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(begin("add", key));
    return DelegatingStore::add(key, delta, timeout);
  }
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(begin("compare_set", key));
    return DelegatingStore::compare_set(key, expected, desired, timeout);
  }
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(begin("delete_key", key));
    return DelegatingStore::delete_key(key, timeout);
  }
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override {
    ++control_->lists;
    return DelegatingStore::list_keys(prefix, timeout);
  }
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout) override {
    ++control_->lists;
    return DelegatingStore::list_entries(prefix, timeout);
  }

 private:
  Status begin(std::string_view operation, std::string_view key) {
    ++control_->operations;
    if (control_->fails == nullptr || !control_->fails(operation, key)) return absl::OkStatus();
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("no ", std::string(operation), " of ", std::string(key)));
  }

  const std::shared_ptr<HashStore> hash_;
  Control* const control_;
};

class MembershipAlone : public ::testing::Test {
 protected:
  static constexpr absl::Duration kHeartbeat = absl::Seconds(1);
  static constexpr absl::Duration kLease = absl::Seconds(5);
  static constexpr char kPrefix[] = "weft/job/";

  // `rank` below 0: of a dynamic group.
  std::unique_ptr<Membership> make(const std::string& name, uint64_t incarnation, int rank = -1) {
    MembershipOptions o;
    o.runtime = sim_;
    o.store = std::make_shared<ControlledStore>(store_, &control_);
    o.prefix = kPrefix;
    o.name = name;
    o.incarnation = incarnation;
    if (rank >= 0) o.rank = static_cast<uint32_t>(rank);
    o.world_size = rank >= 0 ? 2 : 0;
    o.heartbeat = kHeartbeat;
    o.lease = kLease;
    o.on_change = [this](const MembershipChange& change) { changes_.push_back(change); };
    return std::make_unique<Membership>(std::move(o));
  }
  absl::Time soon() const { return sim_->now() + absl::Seconds(10); }
  static Member member(const std::string& name, uint32_t id, uint64_t incarnation) {
    Member out;
    out.info = WorkerInfo{name, id, incarnation};
    out.address = absl::StrCat("inproc:", name);
    return out;
  }
  std::unique_ptr<Membership> join(const std::string& name, uint64_t incarnation, int rank = -1) {
    auto out = make(name, incarnation, rank);
    const StatusOr<uint32_t> id = out->claim(soon());
    EXPECT_TRUE(id.ok()) << id.status();
    if (!id.ok()) return out;
    const Status published = out->publish(member(name, *id, incarnation), soon());
    EXPECT_TRUE(published.ok()) << published;
    return out;
  }
  std::optional<std::string> stored(const std::string& key) const {
    const auto value = store_->try_get(kPrefix + key, absl::Seconds(1));
    EXPECT_TRUE(value.ok()) << value.status();
    return value.value_or(std::nullopt);
  }
  void in_simulation(const std::function<void()>& body) {
    const Status ended = sim_->run([&] {
      store_ = std::make_shared<HashStore>(sim_);
      body();
      store_.reset();
    });
    EXPECT_TRUE(ended.ok()) << ended;
  }

  std::shared_ptr<SimRuntime> sim_ = std::make_shared<SimRuntime>(SimOptions{.seed = 21});
  std::shared_ptr<HashStore> store_;
  Control control_;
  std::vector<MembershipChange> changes_;
};

TEST_F(MembershipAlone, ARecordHoldsAllThatOthersAskFor) {
  in_simulation([&] {
    auto m = make("a", 7);
    const StatusOr<uint32_t> id = m->claim(soon());
    ASSERT_TRUE(id.ok()) << id.status();
    Member self = member("a", *id, 7);
    self.methods = {"f", "g"};
    self.host = "host1";
    self.pid = 4711;
    ASSERT_TRUE(m->publish(self, soon()).ok());
    const auto record = stored(absl::StrCat("member/", *id, ".", inc(7)));
    ASSERT_TRUE(record.has_value());
    const std::optional<Member> read = read_member(*record);
    ASSERT_TRUE(read.has_value());
    EXPECT_EQ(read->info, self.info);
    EXPECT_EQ(read->address, self.address);
    EXPECT_EQ(read->methods, self.methods);
    EXPECT_EQ(read->host, self.host);
    EXPECT_EQ(read->pid, self.pid);
  });
}

TEST_F(MembershipAlone, WaitingForAListEndsWithAChangeOrAtTheDeadline) {
  in_simulation([&] {
    auto a = join("a", 1);
    const MemberListRef seen = a->list();
    const absl::Time begin = sim_->now();
    EXPECT_FALSE(a->wait_list_change(seen, begin + absl::Seconds(3)));
    EXPECT_EQ(sim_->now() - begin, absl::Seconds(3));
    std::unique_ptr<Membership> b;
    auto joining = sim_->spawn("join", [&] { b = join("b", 2); });
    EXPECT_TRUE(a->wait_list_change(seen, begin + absl::Minutes(1)));
    EXPECT_LT(sim_->now() - begin, absl::Seconds(3) + kHeartbeat);
    EXPECT_NE(a->list()->find("b"), nullptr);
    joining->join();
  });
}

// The reason is written before anything that is done for its sake: else the others would take the
// dead one for a worker that has left.
TEST_F(MembershipAlone, ADeathThatCannotBeWrittenDownIsDeclaredLater) {
  in_simulation([&] {
    auto a = join("a", 1);
    auto b = join("b", 2);
    ASSERT_TRUE(a->wait_list_change(a->list(), soon()));
    int failures = 0;
    control_.fails = [&failures](std::string_view operation, std::string_view key) {
      return operation == "set" && key.find("/dead/") != std::string_view::npos && ++failures < 4;
    };
    changes_.clear();
    b->stop();  // and beats no more
    const MemberListRef seen = a->list();
    ASSERT_TRUE(a->wait_list_change(seen, sim_->now() + absl::Minutes(1)));
    EXPECT_EQ(failures, 4);
    ASSERT_EQ(changes_.size(), 1U);
    EXPECT_EQ(changes_[0].kind, MembershipChange::Kind::kDied);
    EXPECT_NE(changes_[0].reason.find("no sign of life"), std::string::npos) << changes_[0].reason;
    EXPECT_EQ(stored("name/b"), "free");
  });
}

// MEM-6: while a large group gathers, a worker looks once per heartbeat; but one that waits for its
// own record looks at once, and then rests as before.
TEST_F(MembershipAlone, MEM_6_only_a_worker_that_has_just_published_looks_at_once) {
  in_simulation([&] {
    for (uint32_t id = 1000; id < 1128; ++id) {
      v1::MemberRecord record;
      record.set_name(absl::StrCat("w", id));
      record.set_id(id);
      record.set_incarnation(id);
      ASSERT_TRUE(store_
                      ->set(absl::StrCat(kPrefix, "member/", id, ".", inc(id)),
                            record.SerializeAsString(), absl::Seconds(1))
                      .ok());
    }
    auto m = make("a", 1);
    const StatusOr<uint32_t> id = m->claim(soon());
    ASSERT_TRUE(id.ok()) << id.status();
    const auto lists_while_others_come = [&] {
      const int64_t before = control_.lists;
      for (int i = 0; i < 400; ++i) {
        EXPECT_TRUE(m->bump_version(absl::Seconds(1)).ok());
        sim_->sleep(absl::Milliseconds(10));
      }
      return control_.lists - before;
    };
    EXPECT_LT(lists_while_others_come(), 16);
    const absl::Time begin = sim_->now();
    ASSERT_TRUE(m->publish(member("a", *id, 1), soon()).ok());
    EXPECT_LT(sim_->now() - begin, absl::Milliseconds(1));
    EXPECT_LT(lists_while_others_come(), 16);
  });
}

TEST_F(MembershipAlone, MEM_7_stopping_ends_the_pause_after_a_failure) {
  in_simulation([&] {
    auto m = join("a", 1);
    control_.fails = [](std::string_view operation, std::string_view) {
      return operation == "set";
    };
    sim_->sleep(kHeartbeat + kHeartbeat / 2);
    const absl::Time begin = sim_->now();
    m->stop();
    EXPECT_EQ(sim_->now(), begin);
  });
}

TEST_F(MembershipAlone, ItsThreadEndsWithIt) {
  in_simulation([&] {
    auto m = join("a", 1);
    m.reset();
    const int64_t before = control_.operations;
    sim_->sleep(10 * kHeartbeat);
    EXPECT_EQ(control_.operations, before);
  });
}

TEST_F(MembershipAlone, OnlyAStaticGroupIsAborted) {
  in_simulation([&] {
    auto m = join("a", 1);
    EXPECT_TRUE(m->abort("a map is wrong", soon()).ok());
    EXPECT_FALSE(stored("abort").has_value());
    EXPECT_FALSE(stored("full").has_value());
  });
}

// The mistake of a latecomer fails the latecomer alone.
TEST_F(MembershipAlone, AGroupThatIsCompleteIsNotAborted) {
  in_simulation([&] {
    std::unique_ptr<Membership> b;
    auto joining = sim_->spawn("join", [&] { b = join("b", 2, 1); });
    auto a = join("a", 1, 0);
    joining->join();
    auto late = make("c", 3, 1);
    const StatusOr<uint32_t> id = late->claim(soon());
    EXPECT_EQ(error_kind(id.status()), ErrorKind::kInvalidArgument) << id.status();
    EXPECT_TRUE(a->aborted(soon()).ok()) << a->aborted(soon());
    EXPECT_FALSE(stored("abort").has_value());
    // It takes back what it has claimed, and no more.
    late->leave(soon());
    EXPECT_FALSE(stored("name/c").has_value());
    EXPECT_EQ(stored("rank/1"), absl::StrCat(inc(2), " b"));
    EXPECT_EQ(a->list()->by_id.size(), 2U);
  });
}

// A store that is gone would cost its timeout at every step.
TEST_F(MembershipAlone, LeavingEndsAtTheFirstFailure) {
  in_simulation([&] {
    auto m = join("a", 1);
    std::vector<std::string> tried;
    control_.fails = [&tried](std::string_view operation, std::string_view key) {
      if (key.find("/beat/") != std::string_view::npos && operation == "set") return false;
      tried.push_back(absl::StrCat(std::string(operation), " ", std::string(key)));
      return true;
    };
    m->leave(soon());
    EXPECT_EQ(tried,
              std::vector<std::string>{absl::StrCat("delete_key weft/job/member/0.", inc(1))});
    EXPECT_EQ(stored("name/a"), absl::StrCat("0 ", inc(1)));
  });
}

}  // namespace
}  // namespace weft::internal
