// Membership under virtual time: how long it takes to know who died, and what that costs the store.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/sim.h"
#include "weft/rpc/worker.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// Counts how often a worker looks at a beat; can be out of reach for a while.
struct StoreControl {
  int64_t looks = 0;
  bool away = false;
};
class ControlledStore : public DelegatingStore {
 public:
  ControlledStore(std::shared_ptr<Store> inner, StoreControl* control)
      : DelegatingStore(std::move(inner)), control_(control) {}
  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout) override {
    for (const std::string& key : keys) {
      if (key.find("/beat/") != std::string::npos) ++control_->looks;
    }
    if (control_->away) return away();
    return DelegatingStore::multi_get(keys, timeout);
  }
  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    return control_->away ? away() : DelegatingStore::set(key, value, timeout);
  }

 private:
  static Status away() { return make_error(ErrorKind::kUnavailable, "the store is away"); }
  StoreControl* const control_;
};

class MembershipSim : public ::testing::Test {
 protected:
  static constexpr absl::Duration kHeartbeat = absl::Milliseconds(200);
  static constexpr absl::Duration kLease = absl::Seconds(5);

  void join(int n) {
    store_ = std::make_shared<HashStore>(sim_);
    for (int i = 0; i < n; ++i) {
      clients_.push_back(std::make_shared<ControlledStore>(store_->new_client(), &control_));
      workers_.push_back(Worker::join({.name = absl::StrCat("w", i),
                                       .dynamic = true,
                                       .store = clients_.back(),
                                       .transport = inproc_transport(network_),
                                       .worker_threads = 1,
                                       .heartbeat_interval = absl::ToChronoMilliseconds(kHeartbeat),
                                       .lease = absl::ToChronoMilliseconds(kLease),
                                       .runtime = sim_,
                                       .log_level = Severity::kOff,
                                       .environment = Environment{}}));
    }
    wait_for_members(workers_[0], workers_.size());
  }
  // As if its process had died: nothing of it reaches the network or the store any more.
  void kill(size_t i) {
    clients_[i]->interrupt();
    network_->kill(workers_[i].name());
  }
  void pass(absl::Duration time) {
    Mutex mutex;
    weft::Condition never(sim_.get());
    const absl::Time end = sim_->now() + time;
    MutexLock lock(&mutex);
    while (sim_->now() < end) never.wait_until(&mutex, end).IgnoreError();
  }
  void wait_for_members(const Worker& w, size_t n) {
    const absl::Time end = sim_->now() + absl::Minutes(10);
    while (w.worker_infos().size() != n && sim_->now() < end) pass(kHeartbeat / 10);
    EXPECT_EQ(w.worker_infos().size(), n);
  }

  std::shared_ptr<SimRuntime> sim_ = std::make_shared<SimRuntime>(SimOptions{.seed = 7});
  std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::shared_ptr<HashStore> store_;
  std::vector<std::shared_ptr<Store>> clients_;
  std::vector<Worker> workers_;
  StoreControl control_;
};

TEST_F(MembershipSim, MEM_3_neighbours_that_die_together_are_known_almost_together) {
  constexpr size_t kWorkers = 24;
  const Status ended = sim_->run([&] {
    join(kWorkers);
    for (size_t i = 2; i < 22; ++i) kill(i);
    const absl::Time begin = sim_->now();
    wait_for_members(workers_[0], 4);
    const absl::Duration took = sim_->now() - begin;
    EXPECT_GT(took, kLease - kHeartbeat);
    EXPECT_LT(took, 2 * kLease);
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST_F(MembershipSim, MEM_3_each_worker_looks_at_one_other_per_heartbeat_unless_some_stand_still) {
  constexpr size_t kWorkers = 12;
  constexpr int kBeats = 50;
  const Status ended = sim_->run([&] {
    join(kWorkers);
    const auto looks_in_a_while = [&] {
      control_.looks = 0;
      pass(kBeats * kHeartbeat);
      return control_.looks;
    };
    EXPECT_NEAR(looks_in_a_while(), kBeats * kWorkers, kWorkers);
    for (size_t i = 3; i < 9; ++i) kill(i);
    wait_for_members(workers_[0], 6);
    pass(3 * kHeartbeat);
    EXPECT_NEAR(looks_in_a_while(), kBeats * 6, 6) << "those that are watched are alive again";
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

// All stand still while the store is away, and the first to come back must not judge the others.
TEST_F(MembershipSim, MEM_4_an_outage_of_the_store_that_is_longer_than_a_lease_kills_nobody) {
  constexpr size_t kWorkers = 8;
  const Status ended = sim_->run([&] {
    join(kWorkers);
    pass(3 * kHeartbeat);
    control_.away = true;
    pass(3 * kLease);
    control_.away = false;
    pass(3 * kLease);
    for (const Worker& w : workers_) EXPECT_EQ(w.worker_infos().size(), kWorkers);
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

}  // namespace
}  // namespace weft::testing
