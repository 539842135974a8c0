// A dynamic group in which workers come and go for long: what those that are gone leave behind is
// bounded (MEM-5), and late questions about them get a clear answer.

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class Churn : public ::testing::Test {
 protected:
  ClusterOptions dynamic(std::vector<std::string> names) {
    ClusterOptions o{.size = static_cast<int>(names.size()), .library = test_.library};
    o.names = std::move(names);
    o.dynamic = true;
    o.worker_threads = 1;
    return o;
  }
  // Waits until `w` sees `n` living workers; every change of its list wakes it.
  void wait_for_members(const Worker& w, size_t n) {
    // Shared: a callback that has begun may outlast its subscription.
    struct Change {
      explicit Change(Runtime* runtime) : changed(runtime) {}
      Mutex mutex;
      Condition changed;
    };
    const auto change = std::make_shared<Change>(runtime_.get());
    const auto subscription = w.subscribe([change](const MembershipChange&) {
      MutexLock lock(&change->mutex);
      change->changed.notify_all();
    });
    MutexLock lock(&change->mutex);
    const absl::Time end = runtime_->now() + absl::Seconds(30);
    while (w.worker_infos().size() != n && runtime_->now() < end) {
      change->changed.wait_until(&change->mutex, end).IgnoreError();
    }
    ASSERT_EQ(w.worker_infos().size(), n);
  }
  std::string key(const Worker& w, const std::string& name) {
    return absl::StrCat("weft/", w.job_id(), "/", name);
  }
  TestLibrary test_;
  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
};

TEST_F(Churn, TwoThousandWorkersThatCameAndWentLeaveABoundedRest) {
  // With a sanitizer, enough for the first sweep of names.
  constexpr int kWorkers = fewer(2000, 300);
  constexpr int64_t kMostGone = 1024;
  Cluster c(dynamic({"anchor"}));
  const Worker& anchor = c[0];
  const int64_t keys_before = *c.store()->num_keys();
  WorkerInfo first;
  WorkerInfo last;
  for (int i = 0; i < kWorkers; ++i) {
    Worker w = Worker::join(c.join_options(0, absl::StrCat("w", i)));
    EXPECT_EQ(rpc_sync(w, "anchor", &add, i, 1), i + 1);
    wait_for_members(anchor, 2);
    if (i == 0) first = w.info();
    last = w.info();
    const ShutdownResult left = w.shutdown();
    ASSERT_TRUE(left.status.ok()) << left.status;
    wait_for_members(anchor, 1);
    if (::testing::Test::HasFatalFailure()) return;
  }
  const std::map<std::string, int64_t> info = anchor.debug_info();
  EXPECT_EQ(info.at("requests_served"), kWorkers);
  EXPECT_EQ(info.at("members"), 1);
  EXPECT_EQ(info.at("members_gone"), std::min<int64_t>(kWorkers, kMostGone));
  EXPECT_LE(info.at("peers"), kMostGone + 1);
  EXPECT_EQ(info.at("answers_kept"), 0);
  // Their names are swept every 512 changes, two of which a worker makes.
  EXPECT_LE(*c.store()->num_keys(), keys_before + 256 + 16);

  // For the workers that went last, it is known that they have left and how; others are not known
  // any more, but a caller that has their info is told that they are not there.
  const Status recent = try_rpc_sync(anchor, last.name, &add, 1, 2).status();
  EXPECT_EQ(error_kind(recent), ErrorKind::kPeerLost) << recent;
  EXPECT_NE(recent.message().find("has left"), std::string::npos) << recent;
  const Status by_id = try_rpc_sync(anchor, last.id, &add, 1, 2).status();
  EXPECT_EQ(error_kind(by_id), ErrorKind::kPeerLost) << by_id;
  const Status old = try_rpc_sync(anchor, first.name, &add, 1, 2).status();
  EXPECT_EQ(error_kind(old), kWorkers > kMostGone ? ErrorKind::kNotFound : ErrorKind::kPeerLost)
      << old;
  const Status old_info = try_rpc_sync(anchor, first, &add, 1, 2).status();
  EXPECT_EQ(error_kind(old_info), ErrorKind::kPeerLost) << old_info;

  // A name that was swept is free, and its next owner another worker.
  Worker again = Worker::join(c.join_options(0, first.name));
  EXPECT_NE(again.info(), first);
  wait_for_members(anchor, 2);
  EXPECT_EQ(rpc_sync(anchor, first.name, &add, 1, 2), 3);
  EXPECT_TRUE(again.shutdown().status.ok());
  c.shutdown();
}

// Reasons of deaths go the same way, but not those of workers that are still remembered.
TEST_F(Churn, OldReasonsOfDeathsAreSwept) {
  Cluster c(dynamic({"anchor"}));
  const std::string stale = key(c[0], "dead/00000000000000aa");
  ASSERT_TRUE(c.store()->set(stale, "long ago").ok());
  ASSERT_TRUE(c.store()->set(key(c[0], "name/ghost"), "free").ok());
  const auto version = c.store()->add(key(c[0], "version"), 600);
  ASSERT_TRUE(version.ok());
  const auto gone = c.store()->wait_change(stale, std::string("long ago"), 30s);
  ASSERT_TRUE(gone.ok()) << gone.status();
  EXPECT_FALSE(gone->has_value());
  const auto name = c.store()->wait_change(key(c[0], "name/ghost"), std::string("free"), 30s);
  ASSERT_TRUE(name.ok()) << name.status();
  // The name of a living worker stays, and so does the group.
  EXPECT_TRUE(*c.store()->check({key(c[0], "name/anchor")}));
  c.add("b");
  EXPECT_EQ(rpc_sync(c[1], "anchor", &add, 1, 2), 3);
}

TEST_F(Churn, ANameThatIsBeingSweptIsWaitedFor) {
  Cluster c(dynamic({"anchor"}));
  const std::string name = key(c[0], "name/b");
  const std::string swept = absl::StrCat("swept ", "00000000000000aa");
  ASSERT_TRUE(c.store()->set(name, swept).ok());
  StatusOr<Worker> joined = make_error(ErrorKind::kInternal, "not yet");
  const auto joiner =
      runtime_->spawn("join", [&] { joined = Worker::try_join(c.join_options(1, "b")); });
  // It has begun: its beat and id are there before its name.
  ASSERT_TRUE(c.store()->wait_change(key(c[0], "next_id"), std::string("1"), 30s).ok());
  EXPECT_EQ(*c.store()->get(name), swept);
  ASSERT_TRUE(c.store()->delete_key(name).ok());
  joiner->join();
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(rpc_sync(*joined, "anchor", &add, 1, 2), 3);
  EXPECT_TRUE(joined->shutdown().status.ok());
}

TEST_F(Churn, ASweeperThatStandsStillLosesTheName) {
  ClusterOptions o = dynamic({"anchor"});
  o.lease = 300ms;
  o.heartbeat = 50ms;
  Cluster c(o);
  ASSERT_TRUE(c.store()->set(key(c[0], "name/b"), "swept 00000000000000aa").ok());
  Worker& b = c.add("b");
  EXPECT_EQ(rpc_sync(b, "anchor", &add, 1, 2), 3);
}

// One that stood still for so long that even the reason of its death has been swept.
TEST_F(Churn, AWorkerWhoseRecordVanishedKnowsThatItIsOut) {
  Cluster c(dynamic({"anchor", "b"}));
  wait_for_members(c[1], 2);
  const auto records = c.store()->list_keys(key(c[0], absl::StrCat("member/", c[1].id(), ".")));
  ASSERT_EQ(records->size(), 1u);
  const FunctionRef<int64_t(int64_t)> wait_at_gate{"test.wait_at_gate"};
  Future<int64_t> held = rpc_async(c[1], "b", wait_at_gate, 7);
  test_.gate->wait_arrived(1);
  ASSERT_TRUE(*c.store()->delete_key(records->front()));
  ASSERT_TRUE(c.store()->add(key(c[0], "version"), 1).ok());
  const Status out = held.try_wait(30s).status();
  EXPECT_EQ(error_kind(out), ErrorKind::kState) << out;
  EXPECT_NE(out.message().find("declared dead"), std::string::npos) << out;
  EXPECT_NE(out.message().find("its record is gone"), std::string::npos) << out;
  EXPECT_EQ(error_kind(try_rpc_sync(c[1], "anchor", &add, 1, 2).status()), ErrorKind::kState);
  test_.gate->open();
  c.shutdown_all();
}

// Not only at its shutdown(), which may come much later: what a service owns there is another's now.
TEST_F(Churn, ServicesOfAWorkerThatIsOutAreToldAtOnceAndOnce) {
  struct Told : Service {
    explicit Told(Runtime* runtime) : changed(runtime) {}
    std::vector<Method> methods() override { return {}; }
    void on_shutdown(const Status& why) override {
      MutexLock lock(&mutex);
      reasons.push_back(why);
      changed.notify_all();
    }
    Mutex mutex;
    Condition changed;
    std::vector<Status> reasons;
  };
  const auto told = std::make_shared<Told>(runtime_.get());
  Cluster c(dynamic({"anchor"}));
  JoinOptions options = c.join_options(1, "b");
  options.services.push_back([told](const ServiceContext&) { return told; });
  StatusOr<Worker> b = Worker::try_join(options);
  ASSERT_TRUE(b.ok()) << b.status();
  const auto records = c.store()->list_keys(key(c[0], absl::StrCat("member/", b->id(), ".")));
  ASSERT_EQ(records->size(), 1u);
  ASSERT_TRUE(*c.store()->delete_key(records->front()));
  ASSERT_TRUE(c.store()->add(key(c[0], "version"), 1).ok());
  {
    MutexLock lock(&told->mutex);
    const absl::Time end = runtime_->now() + absl::Seconds(30);
    while (told->reasons.empty() && runtime_->now() < end) {
      told->changed.wait_until(&told->mutex, end).IgnoreError();
    }
    ASSERT_EQ(told->reasons.size(), 1u);
    EXPECT_NE(told->reasons[0].message().find("its record is gone"), std::string::npos)
        << told->reasons[0];
  }
  b->shutdown();
  MutexLock lock(&told->mutex);
  EXPECT_EQ(told->reasons.size(), 1u);
}

}  // namespace
}  // namespace weft::testing
