// What a large group costs the store: counted per worker, with WEFT_SIM_WORKERS of them.

#include <algorithm>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/worker.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/tests/testing/environment.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// Operations of one worker, and bytes of their answers.
struct Cost {
  int64_t operations = 0;
  int64_t bytes = 0;
};

class CountingStore : public DelegatingStore, public ForkableStore {
 public:
  CountingStore(std::shared_ptr<Store> inner, std::shared_ptr<Cost> cost)
      : DelegatingStore(std::move(inner)), cost_(std::move(cost)) {}
  std::shared_ptr<Store> new_client() override {
    return std::make_shared<CountingStore>(dynamic_cast<ForkableStore&>(*inner()).new_client(),
                                           cost_);
  }

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    ++cost_->operations;
    return DelegatingStore::set(key, value, timeout);
  }
  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override {
    return count(DelegatingStore::try_get(key, timeout));
  }
  StatusOr<std::string> get(std::string_view key, Timeout timeout) override {
    return count(DelegatingStore::get(key, timeout));
  }
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override {
    ++cost_->operations;
    return DelegatingStore::add(key, delta, timeout);
  }
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    return count(DelegatingStore::compare_set(key, expected, desired, timeout));
  }
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    ++cost_->operations;
    return DelegatingStore::delete_key(key, timeout);
  }
  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout) override {
    ++cost_->operations;
    return DelegatingStore::check(keys, timeout);
  }
  Status wait(const std::vector<std::string>& keys, Timeout timeout) override {
    ++cost_->operations;
    return DelegatingStore::wait(keys, timeout);
  }
  StatusOr<std::optional<std::string>> wait_change(std::string_view key,
                                                   const std::optional<std::string>& seen,
                                                   Timeout timeout) override {
    return count(DelegatingStore::wait_change(key, seen, timeout));
  }
  StatusOr<std::vector<std::string>> list_keys(std::string_view prefix, Timeout timeout) override {
    return count(DelegatingStore::list_keys(prefix, timeout));
  }
  StatusOr<std::vector<std::optional<std::string>>> multi_get(const std::vector<std::string>& keys,
                                                              Timeout timeout) override {
    return count(DelegatingStore::multi_get(keys, timeout));
  }
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout) override {
    return count(DelegatingStore::list_entries(prefix, timeout));
  }

 private:
  static int64_t size(const std::string& s) { return static_cast<int64_t>(s.size()); }
  static int64_t size(const std::optional<std::string>& s) { return s.has_value() ? size(*s) : 0; }
  static int64_t size(const StoreEntry& e) { return size(e.key) + size(e.value); }
  template <class T>
  static int64_t size(const std::vector<T>& all) {
    int64_t sum = 0;
    for (const T& one : all) sum += size(one);
    return sum;
  }
  template <class T>
  T count(T answer) {
    ++cost_->operations;
    if (answer.ok()) cost_->bytes += size(*answer);
    return answer;
  }

  const std::shared_ptr<Cost> cost_;
};

size_t number_of_workers() {
  return weft::testing::environment_number<size_t>("WEFT_SIM_WORKERS", 128);
}

class ScaleSim : public ::testing::Test {
 protected:
  static constexpr absl::Duration kHeartbeat = absl::Seconds(1);
  static constexpr int64_t kMostOperations = 200;
  static constexpr int64_t kMostBytes = 4 << 20;

  std::shared_ptr<Store> client(size_t i) {
    return std::make_shared<CountingStore>(store_->new_client(), costs_[i]);
  }
  JoinOptions options(size_t i) {
    return {.name = absl::StrCat("worker", i),
            .store = client(i),
            .transport = inproc_transport(network_),
            .worker_threads = 1,
            .runtime = sim_,
            .log_level = Severity::kOff,
            .environment = Environment{}};
  }
  // All at once, spread over `spread` of time.
  void join(absl::Duration spread, bool dynamic) {
    store_ = std::make_shared<HashStore>(sim_);
    for (size_t i = 0; i < kWorkers; ++i) costs_.push_back(std::make_shared<Cost>());
    workers_.resize(kWorkers);
    for_all([this, spread, dynamic](size_t i) {
      sim_->sleep(spread * static_cast<int64_t>(i) / static_cast<int64_t>(kWorkers));
      JoinOptions o = options(i);
      o.dynamic = dynamic;
      if (!dynamic) {
        o.rank = static_cast<int>(i);
        o.world_size = static_cast<int>(kWorkers);
      }
      workers_[i] = Worker::join(std::move(o));
    });
  }
  void for_all(const std::function<void(size_t)>& act) {
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < kWorkers; ++i) {
      threads.push_back(sim_->spawn("act", [&act, i] { act(i); }));
    }
  }
  // The most that one worker needed since the last time.
  Cost most(const char* what) {
    Cost out;
    for (const auto& cost : costs_) {
      out.operations = std::max(out.operations, cost->operations);
      out.bytes = std::max(out.bytes, cost->bytes);
      *cost = Cost();
    }
    std::cout << kWorkers << " workers, " << what << ": at most " << out.operations
              << " operations and " << out.bytes << " bytes\n";
    return out;
  }
  void expect_cheap(const char* what) {
    const Cost cost = most(what);
    EXPECT_LE(cost.operations, kMostOperations) << what;
    EXPECT_LE(cost.bytes, kMostBytes) << what;
  }

  const size_t kWorkers = number_of_workers();
  std::shared_ptr<SimRuntime> sim_ =
      std::make_shared<SimRuntime>(SimOptions{.seed = 11, .max_steps = 1'000'000'000});
  std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::shared_ptr<HashStore> store_;
  std::vector<std::shared_ptr<Cost>> costs_;
  std::vector<Worker> workers_;
};

TEST_F(ScaleSim, DEF_11_a_static_group_joins_rests_and_drains) {
  const Status ended = sim_->run([&] {
    join(absl::Seconds(10), false);
    expect_cheap("join");
    sim_->sleep(3 * kHeartbeat);
    most("settle");
    constexpr int kBeats = 20;
    sim_->sleep(kBeats * kHeartbeat);
    EXPECT_LE(most("20 s of rest").operations, 3 * (kBeats + 2));
    std::vector<Status> left(kWorkers);
    for_all([&](size_t i) { left[i] = workers_[i].shutdown().status; });
    expect_cheap("drain");
    for (size_t i = 0; i < kWorkers; ++i) EXPECT_TRUE(left[i].ok()) << i << ": " << left[i];
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST_F(ScaleSim, DEF_11_a_group_in_which_a_tenth_dies_drains) {
  const Status ended = sim_->run([&] {
    join(absl::Seconds(1), false);
    most("join");
    std::set<size_t> dead;
    for (size_t i = 5; i < kWorkers; i += 10) {
      // As if its process had died: nothing of it reaches the network or the store any more.
      network_->kill(workers_[i].name());
      dead.insert(i);
    }
    for (size_t i : dead) workers_[i].shutdown({.graceful = false, .deadline = 0s});
    const size_t living = kWorkers - dead.size();
    const absl::Time end = sim_->now() + absl::Minutes(2);
    while (workers_[0].worker_infos().size() != living && sim_->now() < end) {
      sim_->sleep(kHeartbeat);
    }
    EXPECT_EQ(workers_[0].worker_infos().size(), living);
    most("until the deaths are known");
    for_all([&](size_t i) {
      if (dead.count(i) == 0) workers_[i].shutdown();
    });
    expect_cheap("drain");
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST_F(ScaleSim, DEF_11_workers_of_a_dynamic_group_come_all_at_once) {
  const Status ended = sim_->run([&] {
    join(absl::Seconds(5), true);
    sim_->sleep(3 * kHeartbeat);
    for (const Worker& w : workers_) EXPECT_EQ(w.worker_infos().size(), kWorkers);
    expect_cheap("join");
    for_all([&](size_t i) { workers_[i].shutdown(); });
    expect_cheap("leaving");
    workers_.clear();
  });
  EXPECT_TRUE(ended.ok()) << ended;
}

}  // namespace
}  // namespace weft::testing
