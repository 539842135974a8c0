// The members of a job: RPC-1 to RPC-23 of the inventory, names (X4) and joining again (X3).

#include <latch>
#include <map>
#include <set>

#include "ATen/ops/equal.h"
#include "ATen/ops/ones.h"
#include "absl/container/flat_hash_set.h"
#include "gtest/gtest.h"
#include "weft/rpc/group.h"
#include "weft/store/delegating_store.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/mortal_store.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

class RpcMembership : public ::testing::TestWithParam<Net> {
 protected:
  ClusterOptions options(int size) {
    return {.size = size, .net = GetParam(), .library = test_.library};
  }
  ClusterOptions dynamic(std::vector<std::string> names) {
    ClusterOptions o = options(static_cast<int>(names.size()));
    o.names = std::move(names);
    o.dynamic = true;
    return o;
  }
  // Joins these at once and gives the outcomes.
  static std::vector<StatusOr<Worker>> join_all(std::vector<JoinOptions> all) {
    std::vector<StatusOr<Worker>> out;
    for (size_t i = 0; i < all.size(); ++i)
      out.emplace_back(make_error(ErrorKind::kInternal, "no"));
    auto runtime = make_system_runtime();
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < all.size(); ++i) {
      threads.push_back(
          runtime->spawn("join", [&out, &all, i] { out[i] = Worker::try_join(all[i]); }));
    }
    threads.clear();
    return out;
  }
  // Waits for `n` living workers, as seen by `w`.
  static void wait_for_members(const Worker& w, size_t n) {
    auto runtime = make_system_runtime();
    Mutex mutex;
    Condition changed(runtime.get());
    const auto subscription =
        w.subscribe([&changed](const MembershipChange&) { changed.notify_all(); });
    MutexLock lock(&mutex);
    const absl::Time end = runtime->now() + absl::Seconds(30);
    while (w.worker_infos().size() != n && runtime->now() < end) {
      changed.wait_until(&mutex, std::min(end, runtime->now() + absl::Milliseconds(20)))
          .IgnoreError();
    }
    EXPECT_EQ(w.worker_infos().size(), n);
  }
  TestLibrary test_;
};

// Where a worker of this process must die, or many fit.
class RpcMembershipInproc : public RpcMembership {};

int64_t call_back(CallContext& context, int64_t x) {
  return rpc_sync(context.worker(), context.caller(), &add, x, 1);
}

// Once its own record is there, reading what others wrote waits.
class SlowReader : public DelegatingStore {
 public:
  SlowReader(std::shared_ptr<Store> inner, std::shared_ptr<Gate> gate)
      : DelegatingStore(std::move(inner)), gate_(std::move(gate)) {}
  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    if (key.find("/member/") != std::string_view::npos) published_ = true;
    return DelegatingStore::set(key, value, timeout);
  }
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override {
    if (published_) gate_->arrive_and_wait();
    return DelegatingStore::list_keys(prefix, timeout);
  }
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout) override {
    if (published_) gate_->arrive_and_wait();
    return DelegatingStore::list_entries(prefix, timeout);
  }

 private:
  const std::shared_ptr<Gate> gate_;
  std::atomic<bool> published_{false};
};

// A worker that sees the group complete first may call the others, and they call back: they know
// that it is complete, too, before they serve.
TEST_P(RpcMembership, AHandlerMayCallBackWhoeverJoinedFirst) {
  Library more("more");
  more.def("call_back", &call_back);
  test_.library.merge(more);
  auto runtime = make_system_runtime();
  auto gate = std::make_shared<Gate>(runtime);
  ClusterOptions o = options(2);
  std::shared_ptr<HashStore> store = std::make_shared<HashStore>(runtime);
  o.size = 0;
  Cluster c(o);
  const auto joining = [&](int rank) {
    JoinOptions j = c.join_options(rank, "worker" + std::to_string(rank));
    j.rank = rank;
    j.world_size = 2;
    j.store = store->new_client();
    if (rank == 1) j.store = std::make_shared<SlowReader>(j.store, gate);
    return j;
  };
  std::optional<Worker> second;
  auto thread = runtime->spawn("join", [&] { second = Worker::join(joining(1)); });
  Worker first = Worker::join(joining(0));
  auto back = rpc_async(first, "worker1", &call_back, 41);
  EXPECT_FALSE(back.try_wait(200ms).ok());
  EXPECT_FALSE(back.done()) << back.try_wait().status();
  gate->open();
  EXPECT_EQ(back.wait(), 42);
  thread->join();
  auto other = runtime->spawn("leave", [&] { second->shutdown(); });
  EXPECT_TRUE(first.shutdown().status.ok());
  other->join();
}

TEST_P(RpcMembership, RPC_1_worker_id) {
  Cluster c(options(3));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(c[i].id(), i);
    EXPECT_EQ(c[i].get_worker_info("worker1"), c[1].info());
    EXPECT_EQ(c[i].get_worker_info(2), c[2].info());
    EXPECT_EQ(c[i].get_worker_info(c[i].name()), c[i].info());
  }
}

TEST_P(RpcMembership, RPC_2_get_worker_infos) {
  Cluster c(options(3));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(c[i].worker_infos(),
              (std::vector<WorkerInfo>{c[0].info(), c[1].info(), c[2].info()}));
  }
  const StatusOr<WorkerInfo> unknown = c[0].try_get_worker_info("worker9");
  EXPECT_EQ(error_kind(unknown.status()), ErrorKind::kNotFound);
}

TEST_P(RpcMembership, RPC_3_duplicate_name_and_RPC_4_duplicate_name_2) {
  Cluster c(options(0));
  ClusterOptions o = options(2);
  Cluster shape(ClusterOptions{.size = 0, .net = GetParam(), .library = test_.library});
  std::vector<JoinOptions> all;
  for (int rank : {0, 1}) {
    JoinOptions j = shape.join_options(rank, "same");
    j.rank = rank;
    j.world_size = 2;
    j.store = shape.store()->new_client();
    all.push_back(std::move(j));
  }
  const auto joined = join_all(std::move(all));
  for (const auto& w : joined) {
    ASSERT_FALSE(w.ok());
    EXPECT_EQ(w.status().code(), absl::StatusCode::kAlreadyExists) << w.status();
    EXPECT_NE(std::string(w.status().message()).find("is not unique"), std::string::npos)
        << w.status();
  }
}

TEST_P(RpcMembership, RPC_5_reinit) {
  Cluster c(dynamic({"a"}));
  JoinOptions again = c.join_options(1, "a");
  again.join_timeout = 10s;
  const StatusOr<Worker> second = Worker::try_join(again);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(std::string(second.status().message()).find("is not unique"), std::string::npos);
  // Another worker in the same process is fine.
  Worker& other = c.add("b");
  EXPECT_EQ(rpc_sync(other, "a", &add, 1, 2), 3);
}

TEST_P(RpcMembership, RPC_6_init_rpc_twice_and_X3_three_cycles) {
  auto store = std::make_shared<HashStore>(make_system_runtime());
  for (int cycle = 0; cycle < 3; ++cycle) {
    ClusterOptions o = options(3);
    o.adjust = [&store](int, JoinOptions* j) { j->store = store->new_client(); };
    Cluster c(o);
    for (size_t i = 0; i < 3; ++i) {
      for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc_sync(c[i], to, &add, cycle, to), cycle + to);
    }
    c.shutdown();
  }
}

TEST_P(RpcMembership, X3_two_workers_side_by_side_one_leaves) {
  Cluster c(dynamic({"a", "b", "c"}));
  for (size_t i = 0; i < 3; ++i) wait_for_members(c[i], 3);
  EXPECT_TRUE(c[0].shutdown().status.ok());
  EXPECT_EQ(rpc_sync(c[1], "c", &add, 1, 2), 3);
  const Status after = try_rpc_sync(c[0], "b", &add, 1, 2).status();
  EXPECT_EQ(error_kind(after), ErrorKind::kState) << after;
}

TEST_P(RpcMembership, RPC_10_world_size_one) {
  Cluster c(options(1));
  EXPECT_EQ(rpc_sync(c[0], "worker0", &add, 1, 2), 3);
  barrier(c[0]);
}

TEST_P(RpcMembership, RPC_11_invalid_names) {
  for (const std::string& name : {std::string("a b"), std::string(128, 'x'), std::string("a/b"),
                                  std::string("a\0b", 3), std::string("\xc3\xa9")}) {
    Cluster shape(ClusterOptions{.size = 0, .net = GetParam()});
    JoinOptions j = shape.join_options(0, name);
    j.rank = 0;
    j.world_size = 1;
    const StatusOr<Worker> w = Worker::try_join(j);
    ASSERT_FALSE(w.ok()) << name;
    EXPECT_EQ(error_kind(w.status()), ErrorKind::kInvalidArgument) << w.status();
    EXPECT_NE(std::string(w.status().message()).find("is not legal"), std::string::npos)
        << w.status();
  }
}

TEST_P(RpcMembership, RPC_12_worker_info_pickle) {
  Cluster c(options(2));
  EXPECT_EQ(rpc_sync(c[0], 1, &echo_info, c[0].info()), c[0].info());
}

TEST_P(RpcMembership, RPC_13_owner_equality) {
  Cluster c(options(2));
  EXPECT_EQ(c[0].get_worker_info(1), c[1].info());
  EXPECT_NE(c[0].info(), c[1].info());
  absl::flat_hash_set<WorkerInfo> set = {c[0].info(), c[1].info(), c[0].get_worker_info("worker0")};
  EXPECT_EQ(set.size(), 2u);
  WorkerInfo other = c[0].info();
  ++other.incarnation;
  EXPECT_NE(other, c[0].info());
}

TEST_P(RpcMembership, RPC_14_wrong_types) {
  Cluster shape(ClusterOptions{.size = 0, .net = GetParam()});
  JoinOptions j = shape.join_options(0, "bad name");
  j.rank = 5;
  j.world_size = 2;
  j.lease = 1ms;
  j.heartbeat_interval = 1s;
  j.rpc_timeout = 0s;
  const StatusOr<Worker> w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  // Everything that is wrong is said at once.
  for (const char* part : {"rank is 5", "is not legal", "lease", "rpc_timeout"}) {
    EXPECT_NE(std::string(w.status().message()).find(part), std::string::npos)
        << part << ": " << w.status();
  }
}

TEST_P(RpcMembership, RPC_15_mismatched_type_for_options) {
  // Options of one transport cannot be given to another: they are the factory's own parameters.
  EXPECT_FALSE((std::is_convertible_v<GrpcTransportOptions, InprocOptions>));
  EXPECT_FALSE((std::is_constructible_v<TransportFactory, GrpcTransportOptions>));
}

TEST_P(RpcMembership, RPC_16_cannot_infer_backend_from_options) {
  Cluster shape(ClusterOptions{.size = 0, .net = GetParam()});
  JoinOptions j = shape.join_options(0, "a");
  j.rank = 0;
  j.world_size = 1;
  j.store = nullptr;
  j.rendezvous = "gopher://nowhere";
  const StatusOr<Worker> w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  EXPECT_NE(std::string(w.status().message()).find("gopher"), std::string::npos) << w.status();
}

TEST_P(RpcMembership, RPC_17_set_and_get_num_worker_threads) {
  ClusterOptions o = options(1);
  o.worker_threads = 3;
  Cluster c(o);
  EXPECT_EQ(c[0].worker_threads(), 3);
  // Three handlers run at once, and it takes all of them to open the gate.
  std::vector<Future<int64_t>> waiting;
  const FunctionRef<int64_t(int64_t)> wait{"test.wait_at_gate"};
  for (int64_t i = 0; i < 3; ++i) waiting.push_back(rpc_async(c[0], 0, wait, i));
  test_.gate->wait_arrived(3);
  test_.gate->open();
  for (auto& f : waiting) f.wait();
}

TEST_P(RpcMembership, RPC_18_tensorpipe_set_default_timeout) {
  ClusterOptions o = options(1);
  o.rpc_timeout = 7s;
  Cluster c(o);
  EXPECT_EQ(c[0].rpc_timeout(), absl::Seconds(7));
}

TEST_P(RpcMembership, RPC_19_dynamic_rpc_init_rpc) {
  Cluster c(dynamic({"a", "b"}));
  wait_for_members(c[0], 2);
  EXPECT_EQ(rpc_sync(c[0], c[1].info(), &add, 1, 2), 3);
}

TEST_P(RpcMembership,
       RPC_20_dynamic_rpc_new_rank_can_communicate_with_existing_rank_and_RPC_21_the_other_way) {
  Cluster c(dynamic({"a"}));
  c.add("b");
  EXPECT_EQ(rpc_sync(c[1], "a", &add, 1, 2), 3);
  wait_for_members(c[0], 2);
  EXPECT_EQ(rpc_sync(c[0], "b", &add, 1, 2), 3);
}

TEST_P(RpcMembership, RPC_21_dynamic_rpc_existing_rank_can_communicate_with_new_rank) {
  Cluster c(dynamic({"a"}));
  c.add("b");
  wait_for_members(c[0], 2);
  EXPECT_EQ(rpc_sync(c[0], "b", &who_calls), "a");
}

TEST_P(RpcMembership, RPC_22_dynamic_rpc_init_rpc_without_rank) {
  Cluster shape(ClusterOptions{.size = 0, .net = GetParam()});
  JoinOptions j = shape.join_options(0, "a");
  j.rank = std::nullopt;
  j.world_size = 2;
  StatusOr<Worker> w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  EXPECT_NE(std::string(w.status().message()).find("rank and world_size"), std::string::npos);
  j.dynamic = true;
  j.rank = 0;
  w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  EXPECT_NE(std::string(w.status().message()).find("dynamic group has neither"), std::string::npos);
  // env:// without its variables names the one that is missing.
  j = shape.join_options(0, "a");
  j.rank = 0;
  j.world_size = 2;
  j.store = nullptr;
  j.rendezvous = "env://";
  w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  EXPECT_NE(std::string(w.status().message()).find("MASTER_ADDR"), std::string::npos) << w.status();
}

TEST_P(RpcMembership, RPC_23_dynamic_and_static_init_rpc_together) {
  Cluster c(options(1));
  JoinOptions j = c.join_options(1, "b");
  j.rank = std::nullopt;
  j.world_size = std::nullopt;
  j.dynamic = true;
  const StatusOr<Worker> w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  EXPECT_NE(std::string(w.status().message()).find("static 1"), std::string::npos) << w.status();
  EXPECT_NE(std::string(w.status().message()).find("dynamic"), std::string::npos) << w.status();
}

TEST_P(RpcMembership, X4_names_with_every_legal_character_and_prefixes) {
  const std::string all = "abcXYZ0189-_:.";
  Cluster c(dynamic({"trainer-0", "trainer-1", "trainer", "trainer-", all, std::string(127, 'n')}));
  for (size_t i = 0; i < c.size(); ++i) wait_for_members(c[i], c.size());
  for (size_t i = 0; i < c.size(); ++i) {
    for (size_t k = 0; k < c.size(); ++k) {
      EXPECT_EQ(rpc_sync(c[i], c[k].name(), &my_name), c[k].name());
    }
  }
}

TEST_P(RpcMembership, X4_join_leave_and_lookup_from_several_threads) {
  Cluster c(dynamic({"a"}));
  auto runtime = make_system_runtime();
  std::vector<std::unique_ptr<Thread>> threads;
  for (int t = 0; t < 3; ++t) {
    threads.push_back(runtime->spawn("churn", [&c, t] {
      for (int i = 0; i < 3; ++i) {
        StatusOr<Worker> w = Worker::try_join(c.join_options(10, "churn" + std::to_string(t)));
        ASSERT_TRUE(w.ok()) << w.status();
        EXPECT_EQ(rpc_sync(*w, "a", &add, i, t), i + t);
        EXPECT_TRUE(w->shutdown().status.ok());
      }
    }));
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(c[0].get_worker_info("a"), c[0].info());
    EXPECT_GE(c[0].worker_infos().size(), 1u);
  }
  threads.clear();
  wait_for_members(c[0], 1);
}

TEST_P(RpcMembershipInproc, X4_a_killed_member_disappears_from_every_list_and_raises_one_event) {
  ClusterOptions o = dynamic({"a", "b", "c"});
  o.lease = 1s;
  o.heartbeat = 100ms;
  std::vector<std::shared_ptr<Store>> stores(3);
  o.adjust = [&stores](int i, JoinOptions* j) {
    stores[static_cast<size_t>(i)] = hear_interrupts(j);
  };
  Cluster c(o);
  for (size_t i = 0; i < 3; ++i) wait_for_members(c[i], 3);
  std::atomic<int> died{0};
  const auto subscription = c[0].subscribe([&died](const MembershipChange& change) {
    if (change.kind == MembershipChange::Kind::kDied && change.worker.name == "b") ++died;
  });
  // As if its process had died: nothing of it reaches network or store any more.
  Future<int64_t> pending =
      rpc_async(c[0], "b", FunctionRef<int64_t(int64_t)>{"test.wait_at_gate"}, 1);
  test_.gate->wait_arrived(1);
  stores[1]->interrupt();
  c.network()->kill("b");
  EXPECT_EQ(error_kind(pending.try_wait(20s).status()), ErrorKind::kMaybeExecuted);
  wait_for_members(c[0], 2);
  wait_for_members(c[2], 2);
  eventually([&] { return died.load() > 0; }, "a subscriber hears of the death");
  EXPECT_EQ(died.load(), 1);
  EXPECT_EQ(error_kind(try_rpc_sync(c[0], "b", &add, 1, 2).status()), ErrorKind::kPeerLost);
  EXPECT_EQ(rpc_sync(c[0], "c", &add, 1, 2), 3);
  test_.gate->open();
  c.shutdown_all({.deadline = 10s});
}

// SUB-1 of rpc/internal/membership/subscribers.h.
TEST_P(RpcMembership, SUB_1_a_subscription_that_is_gone_does_not_run) {
  Cluster c(dynamic({"a"}));
  std::atomic<int> begun{0};
  std::atomic<int> ended{0};
  auto subscription = c[0].subscribe([&](const MembershipChange&) {
    ++begun;
    test_.gate->arrive_and_wait();
    ++ended;
  });
  // Dropped by its own function: that must not wait for itself.
  std::shared_ptr<void> own;
  std::atomic<int> own_calls{0};
  std::latch own_dropped(1);
  own = c[0].subscribe([&](const MembershipChange&) {
    ++own_calls;
    own = nullptr;
    own_dropped.count_down();
  });
  c.add("b");
  test_.gate->wait_arrived(1);
  auto dropper = make_system_runtime()->spawn("drop", [&] {
    subscription = nullptr;
    EXPECT_EQ(ended.load(), begun.load()) << "it was still running";
  });
  test_.gate->open();
  dropper->join();
  own_dropped.wait();
  EXPECT_EQ(begun.load(), 1);
  c.add("d");
  wait_for_members(c[0], 3);
  EXPECT_EQ(begun.load(), 1);
  EXPECT_EQ(own_calls.load(), 1);
}

TEST_P(RpcMembership, AMissingWorkerIsNamedWhenTheDeadlinePasses) {
  Cluster shape(ClusterOptions{.size = 0, .net = GetParam()});
  JoinOptions j = shape.join_options(0, "a");
  j.rank = 0;
  j.world_size = 3;
  j.join_timeout = 300ms;
  const StatusOr<Worker> w = Worker::try_join(j);
  ASSERT_FALSE(w.ok());
  EXPECT_EQ(error_kind(w.status()), ErrorKind::kDeadline);
  EXPECT_NE(std::string(w.status().message()).find("missing ranks: 1, 2"), std::string::npos)
      << w.status();
}

TEST_P(RpcMembershipInproc, SixtyFourWorkersWithOneThreadEach) {
  constexpr int kWorkers = fewer(64, 24);
  ClusterOptions o = options(kWorkers);
  o.worker_threads = 1;
  o.heartbeat = 1s;
  Cluster c(o);
  for (int i = 0; i < kWorkers; ++i)
    EXPECT_EQ(rpc_sync(c[static_cast<size_t>(i)], (i + 1) % kWorkers, &add, i, 1), i + 1);
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcMembershipInproc, ::testing::Values(Net::kInproc), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, RpcMembership, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
