// DRAIN-1 under virtual time: what services have under way is waited for, what is live is swept, and
// which keys of the store are left.

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/call.h"
#include "weft/rpc/group.h"
#include "weft/rpc/worker.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

constexpr auto kHeartbeat = 200ms;
const FunctionRef<int64_t()> kCount{"drain.count"};

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

// The store as one worker sees it: what it writes about itself can be held up, or be lost on its way.
class Watched : public DelegatingStore {
 public:
  Watched(std::shared_ptr<Store> inner, Runtime* runtime)
      : DelegatingStore(std::move(inner)), runtime_(runtime) {}

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    if (key.find("/gate/") != key.npos && loses_gates) return absl::OkStatus();
    if (key.find("/drain/") != key.npos && key.find("/gate/") == key.npos) ++rounds;
    if (key.find("/done/") != key.npos) {
      if (done_takes > absl::ZeroDuration())
        runtime_->make_parker()->park_until(runtime_->now() + done_takes);
      records_at_done = records_of(key.substr(key.rfind('/') + 1));
    }
    return DelegatingStore::set(key, value, timeout);
  }

  // The last round, when nothing is under way.
  StatusOr<std::vector<StoreEntry>> list_entries(std::string_view prefix,
                                                 Timeout timeout) override {
    auto entries = DelegatingStore::list_entries(prefix, timeout);
    if (last_round_takes > absl::ZeroDuration() && prefix.find("/drain/1") != prefix.npos) {
      runtime_->make_parker()->park_until(runtime_->now() + last_round_takes);
    }
    return entries;
  }
  // Its record is about to go: it has drained.
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    if (key.find("/member/") != key.npos && on_leave != nullptr) {
      std::exchange(on_leave, nullptr)();
    }
    return DelegatingStore::delete_key(key, timeout);
  }

  std::function<void()> on_leave;
  absl::Duration last_round_takes;
  bool loses_gates = false;
  absl::Duration done_takes;
  int records_at_done = -1;
  int rounds = 0;

 private:
  // The record of this incarnation in the list of members.
  int records_of(std::string_view incarnation) {
    const std::vector<std::string> keys = *list_keys("", 1s);
    return static_cast<int>(std::count_if(keys.begin(), keys.end(), [&](const std::string& key) {
      return key.find("/member/") != key.npos && key.find(incarnation) != key.npos;
    }));
  }
  Runtime* const runtime_;
};

// When a shutdown has said for whom it waits.
class WaitsFor final : public LogSink {
 public:
  explicit WaitsFor(const Runtime* runtime) : runtime_(runtime) {}
  void write(Severity, std::string_view line) override {
    if (line.find("shutdown waits for 'w1'") != std::string_view::npos) {
      times.push_back(runtime_->now());
    }
  }
  std::vector<absl::Time> times;

 private:
  const Runtime* const runtime_;
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
          if (late_.count(i) > 0) sim_->make_parker()->park_until(sim_->now() + late_.at(i));
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
    for (int i = 0; i < n; ++i) {
      stores_.push_back(std::make_shared<Watched>(store_->new_client(), sim_.get()));
    }
    std::vector<std::unique_ptr<Thread>> threads;
    for (int i = 0; i < n; ++i) {
      threads.push_back(sim_->spawn("join", [this, i, n] {
        const auto at = static_cast<size_t>(i);
        JoinOptions o{.name = absl::StrCat("w", i),
                      .rank = world_size_ == 0 ? std::nullopt : std::optional<int>(i),
                      .world_size = world_size_ == 0 ? std::nullopt : std::optional<int>(n),
                      .dynamic = world_size_ == 0,
                      .store = stores_[at],
                      .transport = inproc_transport(network_),
                      .worker_threads = 1,
                      .heartbeat_interval = kHeartbeat,
                      .lease = 2s,
                      .runtime = sim_,
                      .log_level = Severity::kOff,
                      .environment = Environment{}};
        if (sink_ != nullptr) {
          o.log_level = Severity::kInfo;
          o.log_sink = sink_;
        }
        Library lib("drain");
        lib.def("count", [this] { return ++counted_; });
        o.library = std::move(lib);
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

  int64_t member_records() const {
    const std::vector<std::string> keys = *store_->list_keys("", 1s);
    return std::count_if(keys.begin(), keys.end(),
                         [](const std::string& key) { return key.find("/member/") != key.npos; });
  }

  int world_size_ = -1;  // of all who join; 0: a dynamic group
  std::shared_ptr<SimRuntime> sim_ = std::make_shared<SimRuntime>(SimOptions{.seed = 5});
  std::shared_ptr<InprocNetwork> network_ = std::make_shared<InprocNetwork>();
  std::shared_ptr<HashStore> store_;
  std::vector<std::shared_ptr<Watched>> stores_;
  std::vector<Worker> workers_;
  std::vector<std::shared_ptr<Busy>> busy_;
  std::set<size_t> away_;                  // of them nothing is heard in the drain
  std::map<size_t, absl::Duration> late_;  // they begin to leave so much later
  std::vector<std::string> left_;
  std::atomic<int64_t> counted_{0};  // calls of kCount
  std::shared_ptr<WaitsFor> sink_{};
};

TEST_F(DrainRounds, NothingUnderWayIsDrainedAtOnceAndSweptNever) {
  for (const Left& one : leave(3, [] {})) {
    EXPECT_TRUE(one.status.ok()) << one.status;
    EXPECT_EQ(one.outcomes, std::vector<std::string>({"w0 drained", "w1 drained", "w2 drained"}));
    EXPECT_LT(one.took, absl::FromChrono(kHeartbeat));
    EXPECT_EQ(one.sweeps, 0);
    EXPECT_EQ(one.asked, 1);
  }
  EXPECT_EQ(left("member"), std::vector<std::string>());
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
  // Two that say the same before each of the sweeps, and two after them.
  for (const auto& store : stores_) EXPECT_EQ(store->rounds, 6);
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
  EXPECT_EQ(all[1].outcomes, std::vector<std::string>({"w0 drained", "w1 aborted"}));
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

TEST_F(DrainRounds, DRAIN_4_a_record_goes_before_the_last_wait_which_is_for_all) {
  const auto all = leave(3, [&] { stores_[1]->done_takes = absl::Milliseconds(500); });
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(all[i].status.ok()) << all[i].status;
    EXPECT_GE(all[i].took, absl::Milliseconds(500));
    EXPECT_EQ(stores_[i]->records_at_done, 0);
  }
}

TEST_F(DrainRounds, DRAIN_4_a_worker_that_has_drained_takes_no_calls) {
  Status refused;
  const auto all = leave(2, [&] {
    EXPECT_EQ(rpc_sync(workers_[1], "w0", kCount), 1);
    stores_[1]->last_round_takes = absl::Milliseconds(500);  // it may still call meanwhile
    stores_[0]->on_leave = [&] {
      refused = try_rpc_sync(workers_[1], "w0", {.deadline = 1s}, kCount).status();
    };
  });
  EXPECT_EQ(error_kind(refused), ErrorKind::kPeerLost) << refused;
  EXPECT_NE(std::string(refused.message()).find("takes no new calls"), std::string::npos);
  EXPECT_EQ(counted_, 1);
  for (const Left& one : all) EXPECT_TRUE(one.status.ok()) << one.status;
}

TEST_F(DrainRounds, DRAIN_6_a_gate_that_is_lost_is_a_hint_that_is_lost) {
  const auto all = leave(3, [&] {
    for (const auto& store : stores_) store->loses_gates = true;
  });
  for (const Left& one : all) {
    EXPECT_TRUE(one.status.ok()) << one.status;
    // Four waits, each until the others are looked at although nothing speaks for it.
    EXPECT_GE(one.took, 4 * 4 * absl::FromChrono(kHeartbeat));
    EXPECT_LE(one.took, 4 * 7 * absl::FromChrono(kHeartbeat));
  }
}

TEST_F(DrainRounds, DRAIN_8_a_worker_of_a_dynamic_group_leaves_the_lists) {
  world_size_ = 0;
  leave(2, [&] {
    away_.insert(0);
    EXPECT_TRUE(workers_[1].shutdown().status.ok());
    EXPECT_EQ(member_records(), 1);
  });
  EXPECT_EQ(left("member").size(), 1U);
}

TEST_F(DrainRounds, DRAIN_3_who_is_late_is_waited_for_while_it_lives) {
  const absl::Duration late = 12 * absl::FromChrono(kHeartbeat);
  const auto all = leave(3, [&] { late_[1] = late; });
  for (const size_t i : {0, 2}) {
    EXPECT_TRUE(all[i].status.ok()) << all[i].status;
    EXPECT_EQ(all[i].outcomes,
              std::vector<std::string>({"w0 drained", "w1 drained", "w2 drained"}));
    EXPECT_GE(all[i].took, late);
  }
}

TEST_F(DrainRounds, DRAIN_3_what_is_waited_for_is_said_once_a_minute) {
  sink_ = std::make_shared<WaitsFor>(sim_.get());
  absl::Time begin;
  (void)leave(2, [&] {
    begin = sim_->now();
    late_[1] = absl::Seconds(150);
  });
  ASSERT_EQ(sink_->times.size(), 2U);
  for (int minute : {1, 2}) {
    const absl::Duration after =
        sink_->times[static_cast<size_t>(minute) - 1] - (begin + absl::Minutes(minute));
    EXPECT_GE(after, absl::ZeroDuration()) << minute;
    EXPECT_LT(after, absl::FromChrono(kHeartbeat)) << minute;
  }
}

TEST_F(DrainRounds, DRAIN_6_keys_without_readers_are_deleted) {
  leave(3, [&] { busy_[2]->live_sweeps = 3; });
  EXPECT_EQ(left("arrived").size(), 2U) << "the gate and its count";
  // All three have read the last round; no worker knows before that it was the last.
  std::vector<std::string> rounds = left("drain");
  const auto words = [](const std::string& key) {
    return key.find("/gate/") == key.npos && key.find("/count/") == key.npos;
  };
  EXPECT_EQ(std::count_if(rounds.begin(), rounds.end(), words), 3);
}

}  // namespace
}  // namespace weft::testing
