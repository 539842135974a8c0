// DRAIN-1 under virtual time: what services have under way is waited for, what is live is swept, and
// which keys of the store are left.

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/call.h"
#include "weft/rpc/group.h"
#include "weft/rpc/worker.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

constexpr auto kHeartbeat = 200ms;

// Has something under way until a time, and something live until so many sweeps.
class Busy : public Service {
 public:
  explicit Busy(Runtime* runtime) : runtime_(runtime) {}
  std::vector<Method> methods() override { return {}; }
  Load load() const override {
    return {runtime_->now() < pending_until ? 1U : 0U, sweeps < live_sweeps ? 1U : 0U};
  }
  void sweep() override { ++sweeps; }
  Status drained() override {
    ++asked;
    return last_word;
  }

  absl::Time pending_until = absl::InfinitePast();
  int live_sweeps = 0;
  Status last_word;
  int sweeps = 0;
  int asked = 0;

 private:
  Runtime* const runtime_;
};

class DrainRounds : public ::testing::Test {
 protected:
  struct Left {
    Status status;
    absl::Duration took;
    std::vector<std::string> outcomes;  // "w0 drained", ...
    int sweeps = 0;
    int asked = 0;
  };

  // Joins so many, lets `before` prepare them, and lets those it has left over leave at once.
  std::vector<Left> leave(int n, const std::function<void()>& before,
                          ShutdownOptions options = {}) {
    std::vector<Left> out(static_cast<size_t>(n));
    const Status ended = sim_->run([&] {
      store_ = std::make_shared<HashStore>(sim_);
      join(n);
      before();
      std::vector<std::unique_ptr<Thread>> threads;
      for (size_t i = 0; i < workers_.size(); ++i) {
        threads.push_back(sim_->spawn("leave", [&, i] {
          if (away_.count(i) > 0) return;
          const absl::Time begin = sim_->now();
          const ShutdownResult result = workers_[i].shutdown(options);
          out[i].status = result.status;
          out[i].took = sim_->now() - begin;
          for (const auto& w : result.workers) {
            const char* what = w.outcome == ShutdownResult::Outcome::kDrained   ? "drained"
                               : w.outcome == ShutdownResult::Outcome::kMissing ? "missing"
                                                                                : "aborted";
            out[i].outcomes.push_back(absl::StrCat(w.worker.name, " ", what));
          }
        }));
      }
      for (auto& thread : threads) thread->join();
      for (size_t i = 0; i < workers_.size(); ++i) {
        out[i].sweeps = busy_[i]->sweeps;
        out[i].asked = busy_[i]->asked;
      }
      left_ = *store_->list_keys("", 1s);
      workers_.clear();
    });
    EXPECT_TRUE(ended.ok()) << ended;
    return out;
  }

  void join(int n) {
    workers_.resize(static_cast<size_t>(n));
    busy_.resize(static_cast<size_t>(n));
    std::vector<std::unique_ptr<Thread>> threads;
    for (int i = 0; i < n; ++i) {
      threads.push_back(sim_->spawn("join", [this, i, n] {
        const auto at = static_cast<size_t>(i);
        JoinOptions o{.name = absl::StrCat("w", i),
                      .rank = i,
                      .world_size = n,
                      .store = store_->new_client(),
                      .transport = inproc_transport(network_),
                      .worker_threads = 1,
                      .heartbeat_interval = kHeartbeat,
                      .lease = 2s,
                      .runtime = sim_,
                      .log_level = Severity::kOff,
                      .environment = Environment{}};
        o.services.push_back([this, at](const ServiceContext&) {
          return busy_[at] = std::make_shared<Busy>(sim_.get());
        });
        workers_[at] = Worker::join(std::move(o));
      }));
    }
    for (auto& thread : threads) thread->join();
  }

  // Left in the store of what this drain writes.
  std::vector<std::string> left(const std::string& what) const {
    std::vector<std::string> out;
    for (const std::string& key : left_) {
      const std::vector<std::string> parts = absl::StrSplit(key, '/');
      if (std::find(parts.begin(), parts.end(), what) != parts.end()) out.push_back(key);
    }
    return out;
  }

  std::shared_ptr<SimRuntime> sim_ = std::make_shared<SimRuntime>(SimOptions{.seed = 5});
  std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::shared_ptr<HashStore> store_;
  std::vector<Worker> workers_;
  std::vector<std::shared_ptr<Busy>> busy_;
  std::set<size_t> away_;  // of them nothing is heard in the drain
  std::vector<std::string> left_;
};

TEST_F(DrainRounds, NothingUnderWayIsDrainedAtOnceAndSweptNever) {
  for (const Left& one : leave(3, [] {})) {
    EXPECT_TRUE(one.status.ok()) << one.status;
    EXPECT_EQ(one.outcomes, std::vector<std::string>({"w0 drained", "w1 drained", "w2 drained"}));
    EXPECT_LT(one.took, absl::FromChrono(kHeartbeat));
    EXPECT_EQ(one.sweeps, 0);
    EXPECT_EQ(one.asked, 1);
  }
  EXPECT_EQ(left("members"), std::vector<std::string>());
}

TEST_F(DrainRounds, DRAIN_1_what_services_have_under_way_is_waited_for_everywhere) {
  const absl::Duration busy = 5 * absl::FromChrono(kHeartbeat) + absl::Milliseconds(50);
  const auto all = leave(3, [&] { busy_[1]->pending_until = sim_->now() + busy; });
  for (const Left& one : all) {
    EXPECT_TRUE(one.status.ok()) << one.status;
    EXPECT_GE(one.took, busy);
    EXPECT_LE(one.took, busy + 2 * absl::FromChrono(kHeartbeat));
  }
}

TEST_F(DrainRounds, DRAIN_1_what_is_live_anywhere_is_swept_everywhere_until_it_is_gone) {
  for (const Left& one : leave(3, [&] { busy_[2]->live_sweeps = 2; })) {
    EXPECT_TRUE(one.status.ok()) << one.status;
    EXPECT_EQ(one.sweeps, 2);
  }
}

TEST_F(DrainRounds, DRAIN_1_three_sweeps_are_the_most) {
  for (const Left& one : leave(2, [&] { busy_[0]->live_sweeps = 100; })) {
    EXPECT_TRUE(one.status.ok()) << one.status;
    EXPECT_EQ(one.sweeps, 3);
    EXPECT_EQ(one.asked, 1);
  }
}

TEST_F(DrainRounds, DRAIN_3_what_stays_under_way_is_named_when_the_time_is_over) {
  const auto all = leave(2, [&] { busy_[1]->pending_until = absl::InfiniteFuture(); },
                         {.graceful = true, .deadline = 3s});
  EXPECT_EQ(error_kind(all[1].status), ErrorKind::kDeadline) << all[1].status;
  for (const Left& one : all) {
    EXPECT_FALSE(one.status.ok());
    EXPECT_GE(one.took, absl::Seconds(3));
    EXPECT_LE(one.took, absl::Seconds(3) + 3 * absl::FromChrono(kHeartbeat));
  }
}

TEST_F(DrainRounds, TheLastWordOfAServiceIsTheShutdowns) {
  const auto all = leave(2, [&] {
    busy_[1]->last_word = make_error(ErrorKind::kState, "two of them were never given back");
  });
  EXPECT_TRUE(all[0].status.ok()) << all[0].status;
  EXPECT_EQ(error_kind(all[1].status), ErrorKind::kState) << all[1].status;
  EXPECT_NE(std::string(all[1].status.message()).find("never given back"), std::string::npos);
  EXPECT_EQ(all[0].outcomes, std::vector<std::string>({"w0 drained", "w1 drained"}));
}

TEST_F(DrainRounds, DRAIN_2_one_that_never_arrives_and_whose_lease_lapses_is_named) {
  const auto all = leave(3, [&] {
    away_.insert(1);
    workers_[1] = Worker();  // it leaves without a word to the others
  });
  for (const size_t i : {0, 2}) {
    EXPECT_EQ(error_kind(all[i].status), ErrorKind::kPeerLost) << all[i].status;
    EXPECT_NE(std::string(all[i].status.message()).find("went on without 'w1'"), std::string::npos)
        << all[i].status;
    EXPECT_EQ(all[i].outcomes,
              std::vector<std::string>({"w0 drained", "w1 missing", "w2 drained"}));
    EXPECT_EQ(all[i].asked, 1);
  }
}

TEST_F(DrainRounds, DRAIN_6_keys_without_readers_are_deleted) {
  leave(3, [&] { busy_[2]->live_sweeps = 3; });
  EXPECT_EQ(left("arrived").size(), 2U) << "the gate and its count";
  // Of the last round all three have read; nobody knows that it was the last before.
  std::vector<std::string> rounds = left("drain");
  const auto words = [](const std::string& key) {
    return key.find("/gate/") == key.npos && key.find("/count/") == key.npos;
  };
  EXPECT_EQ(std::count_if(rounds.begin(), rounds.end(), words), 3);
}

}  // namespace
}  // namespace weft::testing
