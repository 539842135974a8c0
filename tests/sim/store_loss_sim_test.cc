// Leaving when the store's host is gone: operations neither succeed nor fail until their deadlines,
// as those of a client that tries again and again.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/sim.h"
#include "weft/rpc/call.h"
#include "weft/rpc/worker.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// What the clients of one worker share: whether its store can be reached.
struct Loss {
  explicit Loss(std::shared_ptr<Runtime> r) : runtime(std::move(r)), changed(runtime.get()) {}
  const std::shared_ptr<Runtime> runtime;
  Mutex mutex;
  Condition changed;
  bool gone ABSL_GUARDED_BY(mutex) = false;
  // With this key written, the store goes.
  std::string goes_after ABSL_GUARDED_BY(mutex);

  void go() {
    MutexLock lock(&mutex);
    gone = true;
  }
  void come_back() {
    {
      MutexLock lock(&mutex);
      gone = false;
    }
    changed.notify_all();
  }
};

class LostStore : public DelegatingStore, public ForkableStore {
 public:
  LostStore(std::shared_ptr<HashStore> inner, std::shared_ptr<Loss> loss)
      : DelegatingStore(inner), hash_(std::move(inner)), loss_(std::move(loss)) {}
  std::shared_ptr<Store> new_client() override {
    return std::make_shared<LostStore>(std::dynamic_pointer_cast<HashStore>(hash_->new_client()),
                                       loss_);
  }
  void interrupt() override {
    {
      MutexLock lock(&loss_->mutex);
      interrupted_ = true;
    }
    loss_->changed.notify_all();
    DelegatingStore::interrupt();
  }

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    const Status status = DelegatingStore::set(key, value, timeout);
    MutexLock lock(&loss_->mutex);
    if (!loss_->goes_after.empty() && key.find(loss_->goes_after) != std::string_view::npos) {
      loss_->gone = true;
    }
    return status;
  }
  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::try_get(key, timeout);
  }
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::add(key, delta, timeout);
  }
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::compare_set(key, expected, desired, timeout);
  }
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::delete_key(key, timeout);
  }
  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::check(keys, timeout);
  }
  Status wait(const std::vector<std::string>& keys, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::wait(keys, timeout);
  }
  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::wait_change(key, seen, timeout);
  }
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(reach(timeout));
    return DelegatingStore::list_keys(prefix, timeout);
  }

 private:
  // As TcpStore: a server that is away is tried until the deadline.
  Status reach(Timeout timeout) {
    const absl::Time deadline =
        deadline_after(loss_->runtime->now(), timeout.value_or(absl::Seconds(60)));
    MutexLock lock(&loss_->mutex);
    while (loss_->gone && !interrupted_) {
      if (!loss_->changed.wait_until(&loss_->mutex, deadline).ok()) {
        return make_error(ErrorKind::kUnavailable, "the store's host is gone");
      }
    }
    return interrupted_ ? make_error(ErrorKind::kCancelled, "interrupted") : absl::OkStatus();
  }

  const std::shared_ptr<HashStore> hash_;
  const std::shared_ptr<Loss> loss_;
  bool interrupted_ ABSL_GUARDED_BY(loss_->mutex) = false;
};

constexpr absl::Duration kLease = absl::Seconds(15);  // as every worker has it that was given none

int64_t add(int64_t a, int64_t b) { return a + b; }

class StoreLossSim : public ::testing::Test {
 protected:
  // A static group of two, each with a way of its own to the store; `forkable`: whether the store
  // gives out clients.
  void join(bool forkable = true) {
    store_ = std::make_shared<HashStore>(sim_);
    workers_.resize(2);
    std::vector<std::unique_ptr<Thread>> joins;
    for (size_t i = 0; i < 2; ++i) {
      losses_.push_back(std::make_shared<Loss>(sim_));
      std::shared_ptr<Store> client = std::make_shared<LostStore>(
          std::dynamic_pointer_cast<HashStore>(store_->new_client()), losses_[i]);
      if (!forkable) client = std::make_shared<DelegatingStore>(std::move(client));
      joins.push_back(sim_->spawn("join", [this, i, client] {
        workers_[i] =
            Worker::join({.name = absl::StrCat("w", i),
                          .rank = static_cast<int>(i),
                          .world_size = 2,
                          .library = library(),
                          .store = client,
                          .transport = faulty_transport(inproc_transport(network_), plan_),
                          .worker_threads = 1,
                          .runtime = sim_,
                          .log_level = Severity::kOff,
                          .environment = Environment{}});
      }));
    }
  }
  static Library library() {
    Library lib("test");
    lib.def("add", &add);
    return lib;
  }
  StatusOr<int64_t> call(Timeout deadline) {
    return try_rpc_sync(workers_[0], "w1", {.deadline = deadline}, &add, 1, 2);
  }
  // The time that shutdown() of the first worker took; its result is in `left_`.
  absl::Duration leave(const ShutdownOptions& options) {
    const absl::Time begin = sim_->now();
    left_ = workers_[0].shutdown(options).status;
    return sim_->now() - begin;
  }

  std::shared_ptr<SimRuntime> sim_ = std::make_shared<SimRuntime>(SimOptions{.seed = 16});
  std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>(16);
  std::shared_ptr<HashStore> store_;
  std::vector<std::shared_ptr<Loss>> losses_;
  std::vector<Worker> workers_;
  Status left_;
};

TEST_F(StoreLossSim, DEF_16_leaving_at_once_keeps_its_deadline_without_the_store) {
  const Status ended = sim_->run([&] {
    join();
    losses_[0]->go();
    sim_->sleep(absl::Seconds(5));  // the membership is in the middle of an operation
    EXPECT_LE(leave({.graceful = false, .deadline = 1s}), absl::Milliseconds(1100)) << left_;
    losses_[1]->go();
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST_F(StoreLossSim, DEF_16_a_drain_keeps_its_deadline_without_the_store) {
  const Status ended = sim_->run([&] {
    join();
    losses_[0]->go();
    sim_->sleep(absl::Seconds(5));
    EXPECT_LE(leave({.graceful = true, .deadline = 1s}), absl::Milliseconds(1100)) << left_;
    EXPECT_FALSE(left_.ok()) << "nothing was drained together";
    losses_[1]->go();
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// In the middle of the rounds, where values of others are read.
TEST_F(StoreLossSim, DEF_16_a_drain_that_loses_the_store_on_its_way_keeps_its_deadline) {
  for (const char* last : {"/arrived/", "/drain/0/", "/drain/1/"}) {
    const Status ended = sim_->run([&] {
      join();
      {
        MutexLock lock(&losses_[0]->mutex);
        losses_[0]->goes_after = last;
      }
      auto other =
          sim_->spawn("other", [&] { workers_[1].shutdown({.graceful = true, .deadline = 2s}); });
      EXPECT_LE(leave({.graceful = true, .deadline = 2s}), absl::Milliseconds(2100))
          << last << left_;
      EXPECT_FALSE(left_.ok()) << last;
      other->join();
      workers_.clear();
      losses_.clear();
    });
    EXPECT_TRUE(ended.ok()) << ended;
  }
}

TEST_F(StoreLossSim, DEF_16_a_worker_that_is_dropped_does_not_wait_for_the_store) {
  const Status ended = sim_->run([&] {
    join();
    losses_[0]->go();
    losses_[1]->go();
    sim_->sleep(absl::Seconds(5));
    const absl::Time begin = sim_->now();
    workers_.clear();
    EXPECT_LE(sim_->now() - begin, absl::Milliseconds(2200)) << "a second for each";
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// A store of the user's own that gives out no clients cannot be interrupted on the worker's behalf:
// others may use it. Then operations are short.
TEST_F(StoreLossSim, DEF_16_a_store_without_clients_delays_leaving_by_an_operation_at_most) {
  const Status ended = sim_->run([&] {
    join(false);
    losses_[0]->go();
    sim_->sleep(absl::Seconds(5));
    EXPECT_LE(leave({.graceful = false, .deadline = 1s}), absl::Milliseconds(2100)) << left_;
    losses_[1]->go();
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// The worker that hosts the store leaves when all have written "done"; one that reads this late
// finds no store to read it from.
TEST_F(StoreLossSim, DEF_16_who_is_late_after_done_has_drained) {
  const Status ended = sim_->run([&] {
    join();
    {
      MutexLock lock(&losses_[0]->mutex);
      losses_[0]->goes_after = "/done/";
    }
    Status other_left;
    auto other = sim_->spawn("other", [&] { other_left = workers_[1].shutdown().status; });
    EXPECT_LE(leave({}), absl::Seconds(30));
    EXPECT_TRUE(left_.ok()) << left_;
    other->join();
    EXPECT_TRUE(other_left.ok()) << other_left;
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// A dial that failed long ago says nothing about a worker that was not dialled since.
TEST_F(StoreLossSim, DEF_5_a_short_outage_of_the_store_parts_nobody) {
  const Status ended = sim_->run([&] {
    join();
    network_->refuse_connects("w1", true);
    EXPECT_EQ(error_kind(call(200ms).status()), ErrorKind::kDeadline);
    network_->refuse_connects("w1", false);
    sim_->sleep(absl::Minutes(10));
    for (const auto& loss : losses_) loss->go();
    sim_->sleep(absl::Seconds(20));
    for (const auto& loss : losses_) loss->come_back();
    sim_->sleep(absl::Seconds(5));
    const StatusOr<int64_t> sum = call(10s);
    EXPECT_TRUE(sum.ok()) << sum.status();
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// A dial that failed long ago, for a call that is over, is no part of the lease for which a peer could not be reached.
TEST_F(StoreLossSim, DEF_5_a_dial_that_failed_long_ago_does_not_count) {
  const Status ended = sim_->run([&] {
    join();
    network_->refuse_connects("w1", true);
    EXPECT_EQ(error_kind(call(200ms).status()), ErrorKind::kDeadline);
    for (const auto& loss : losses_) loss->go();
    sim_->sleep(absl::Minutes(10));
    const absl::Time begun = sim_->now();
    EXPECT_EQ(error_kind(call(5min).status()), ErrorKind::kPeerLost);
    EXPECT_GE(sim_->now() - begun, kLease);
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// Then no membership says that a silent peer lives.
TEST_F(StoreLossSim, SILENT_1_without_the_store_a_connection_may_be_silent_for_two_leases) {
  const Status ended = sim_->run([&] {
    join();
    EXPECT_EQ(*call(10s), 3);
    for (const auto& loss : losses_) loss->go();
    plan_->add({.fault = Fault::kDrop, .from = "w1"});
    const absl::Time begun = sim_->now();
    const Status lost = call(5min).status();
    EXPECT_EQ(error_kind(lost), ErrorKind::kMaybeExecuted) << lost;
    EXPECT_NE(std::string(lost.message()).find("no sign of life for 30s"), std::string::npos)
        << lost;
    EXPECT_LE(sim_->now() - begun, 2.2 * kLease);
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST_F(StoreLossSim, SILENT_1_without_the_store_a_dial_may_have_no_answer_for_a_lease) {
  const Status ended = sim_->run([&] {
    join();
    for (const auto& loss : losses_) loss->go();
    plan_->add({.fault = Fault::kDrop, .kind = FrameKind::kHello});
    const absl::Time begun = sim_->now();
    const Status lost = call(5min).status();
    EXPECT_EQ(error_kind(lost), ErrorKind::kPeerLost) << lost;
    EXPECT_NE(std::string(lost.message()).find("no answer so far"), std::string::npos) << lost;
    EXPECT_LE(sim_->now() - begun, 3 * kLease);
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// Without the store and without a connection there is no worker to ask; but a worker that was alive
// all the time is reached again.
TEST_F(StoreLossSim, DEF_5_a_worker_that_could_not_be_reached_for_a_lease_is_not_parted_from) {
  const Status ended = sim_->run([&] {
    join();
    for (const auto& loss : losses_) loss->go();
    network_->refuse_connects("w1", true);
    const StatusOr<int64_t> lost = call(5min);
    EXPECT_EQ(error_kind(lost.status()), ErrorKind::kPeerLost) << lost.status();
    EXPECT_NE(std::string(lost.status().message()).find("the store cannot be asked"),
              std::string::npos)
        << lost.status();
    network_->refuse_connects("w1", false);
    for (const auto& loss : losses_) loss->come_back();
    sim_->sleep(absl::Seconds(5));
    const StatusOr<int64_t> sum = call(10s);
    EXPECT_TRUE(sum.ok()) << sum.status();
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

}  // namespace
}  // namespace weft::testing
