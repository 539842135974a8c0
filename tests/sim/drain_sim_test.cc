// DRAIN-5 under virtual time: leaving while the store does not answer.

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/rpc/worker.h"
#include "weft/store/delegating_store.h"
#include "weft/store/hash_store.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

// Refuses waits for a while, from the first one that is refused.
class Refusing : public DelegatingStore {
 public:
  Refusing(std::shared_ptr<Store> inner, Runtime* runtime)
      : DelegatingStore(std::move(inner)), runtime_(runtime) {}
  Status wait(const std::vector<std::string>& keys, Timeout timeout) override {
    const absl::Time now = runtime_->now();
    if (outage > absl::ZeroDuration() && refused == 0) until_ = now + outage;
    if (now >= until_) return DelegatingStore::wait(keys, timeout);
    ++refused;
    return make_error(kind, "the store is away");
  }

  absl::Duration outage;
  ErrorKind kind = ErrorKind::kUnavailable;
  int64_t refused = 0;

 private:
  Runtime* const runtime_;
  absl::Time until_ = absl::InfinitePast();
};

struct Left {
  Status status;
  absl::Duration took;
  int64_t refused = 0;
};

// Two workers leave; the store of the first is away for a while.
Left leave(absl::Duration outage, ErrorKind kind = ErrorKind::kUnavailable) {
  Left out;
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = 3});
  auto network = std::make_shared<InprocNetwork>();
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<std::shared_ptr<Refusing>> clients;
    std::vector<Worker> workers(2);
    for (int i = 0; i < 2; ++i) {
      clients.push_back(std::make_shared<Refusing>(store->new_client(), sim.get()));
    }
    {
      std::vector<std::unique_ptr<Thread>> joins;
      for (size_t i = 0; i < 2; ++i) {
        joins.push_back(sim->spawn("join", [&, i] {
          workers[i] = Worker::join({.name = absl::StrCat("w", i),
                                     .rank = static_cast<int>(i),
                                     .world_size = 2,
                                     .store = clients[i],
                                     .transport = inproc_transport(network),
                                     .worker_threads = 1,
                                     .heartbeat_interval = 200ms,
                                     .lease = 60s,
                                     .runtime = sim,
                                     .log_level = Severity::kOff,
                                     .environment = Environment{}});
        }));
      }
    }
    clients[0]->outage = outage;
    clients[0]->kind = kind;
    const absl::Time begin = sim->now();
    auto other = sim->spawn("leave", [&] { workers[1].shutdown(); });
    out.status = workers[0].shutdown().status;
    out.took = sim->now() - begin;
    out.refused = clients[0]->refused;
    other->join();
  });
  EXPECT_TRUE(ended.ok()) << ended;
  return out;
}

TEST(DrainSim, DRAIN_5_a_store_that_is_away_for_a_moment_ends_no_shutdown) {
  const Left left = leave(absl::Seconds(3));
  EXPECT_TRUE(left.status.ok()) << left.status;
  EXPECT_GE(left.took, absl::Seconds(3));
  EXPECT_LE(left.refused, 3 * 5 + 1) << "it is asked once a heartbeat";
}

TEST(DrainSim, DRAIN_5_a_store_that_stays_away_does) {
  const Left left = leave(absl::Minutes(10));
  EXPECT_EQ(error_kind(left.status), ErrorKind::kUnavailable) << left.status;
  EXPECT_NE(std::string(left.status.message()).find("waiting for 'arrived'"), std::string::npos)
      << left.status;
  EXPECT_GE(left.took, absl::Seconds(5));
  EXPECT_LT(left.took, absl::Seconds(5) + absl::Milliseconds(200)) << "a heartbeat more";
}

TEST(DrainSim, DRAIN_5_a_store_that_says_no_is_not_asked_again) {
  const Left left = leave(absl::Seconds(3), ErrorKind::kState);
  EXPECT_EQ(error_kind(left.status), ErrorKind::kState) << left.status;
  EXPECT_EQ(left.refused, 1);
  EXPECT_LT(left.took, absl::Milliseconds(200));
}

}  // namespace
}  // namespace weft::testing
