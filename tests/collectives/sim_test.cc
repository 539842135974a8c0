// Groups on inproc under the seeded scheduler: random operations, deaths, aborts, late ranks.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/common/sim.h"
#include "weft/store/delegating_store.h"
#include "weft/tests/collectives/world.h"
#include "weft/tests/testing/environment.h"

namespace weft::testing {
namespace {

// One life of a group of 2 to 5 ranks by seed. COLL-1, COLL-3: every operation ends, right or with
// an error; when one fails, every later one of every rank does. COLL-6: what a rank has finished
// before it left is right everywhere.
uint64_t life(uint64_t seed, int* failed) {
  SimRuntime sim({.seed = seed, .keep_events = 40});
  const auto runtime = borrowed(&sim);
  const Status status = sim.run([&] {
    const int size = 2 + static_cast<int>(sim.random().below(4));
    const World world(Backend::kInproc, size, runtime);
    const int operations = 1 + static_cast<int>(sim.random().below(8));
    // What goes wrong, where, and before which operation; often nothing.
    const uint64_t fault = sim.random().below(6);
    const int at_rank = static_cast<int>(sim.random().below(static_cast<uint64_t>(size)));
    const int at_operation =
        static_cast<int>(sim.random().below(static_cast<uint64_t>(operations)));
    const uint64_t plan = sim.random().next();
    std::vector<bool> bad(static_cast<size_t>(size));
    world.run_ranks([&](int rank) {
      ProcessGroupOptions o = world.options(rank);
      o.timeout = absl::Seconds(5);
      StatusOr<ProcessGroup> made = try_init_process_group(o);
      ASSERT_TRUE(made.ok()) << made.status();
      ProcessGroup group = *std::move(made);
      bool broken = false;
      int i = 0;
      const auto check = [&](const Status& s, const at::Tensor& t, double sum) {
        if (fault == 2) {
          EXPECT_EQ(s.ok(), i < at_operation)
              << "seed " << seed << ", rank " << rank << " in step " << i << ", and rank "
              << at_rank << " leaves before step " << at_operation << ": " << s;
        }
        if (broken) {
          EXPECT_FALSE(s.ok()) << "an operation after a failure";
        }
        broken = broken || !s.ok();
        if (!s.ok()) {
          EXPECT_LT(fault, 4u) << "seed " << seed << ", nothing went wrong: " << s;
          bad[static_cast<size_t>(rank)] = true;
          return;
        }
        EXPECT_TRUE(at::equal(t, at::full({t.numel()}, sum))) << "seed " << seed;
      };
      for (i = 0; i < operations; ++i) {
        const uint64_t what = (plan >> (i * 4)) & 15;
        if (i == at_operation && rank == at_rank) {
          if (fault == 0) world.fabric->kill(rank);
          if (fault == 1) group.abort("by the plan");
          if (fault == 2) {
            group = ProcessGroup();
            return;
          }
        }
        sim.sleep(absl::Microseconds(static_cast<int64_t>(sim.random().below(300))));
        const int64_t n = 1 + static_cast<int64_t>(what * what);
        // At fault 3 one rank brings another number of elements.
        const int64_t wrong = fault == 3 && i == at_operation && rank == at_rank ? 1 : 0;
        at::Tensor t = at::full({n + wrong}, rank + 1.0);
        const double sum = size * (size + 1) / 2.0;
        if (what < 6) {
          check(group.try_all_reduce(t, {.algorithm = static_cast<Algorithm>(what)}), t, sum);
        } else if (what < 9) {
          const Work work = group.all_reduce_async(t);
          const Work behind = group.barrier_async();
          check(work.try_wait(), t, sum);
          check(behind.try_wait(), t, sum);
        } else if (what < 12) {
          const int root = static_cast<int>(what) % size;
          check(group.try_broadcast(t, {.root = root}), t, root + 1.0);
        } else {
          at::Tensor all = at::zeros({size * (n + wrong)});
          const Status s = group.try_all_gather_into_tensor(all, t);
          check(s, all.slice(0, 0, n), 1);
        }
      }
      sim.trace("rank", static_cast<uint64_t>(rank), broken ? 1 : 0);
    });
    for (const bool one : bad) *failed += one ? 1 : 0;
    EXPECT_EQ(*world.store->num_keys(), 0);
    EXPECT_EQ(world.fabric->members(), 0);
  });
  EXPECT_TRUE(status.ok()) << "seed " << seed << ": " << status;
  if (!status.ok()) {
    for (const std::string& event : sim.last_events()) ADD_FAILURE() << event;
  }
  return sim.trace_hash();
}

TEST(CollectivesSim, CL_24_random_schedules) {
  const auto schedules =
      weft::testing::environment_number<uint64_t>("WEFT_COLLECTIVES_SIM_SCHEDULES", 10000);
  int failed = 0;
  for (uint64_t seed = 1; seed <= schedules && !HasFailure(); ++seed) life(seed, &failed);
  EXPECT_GT(failed, 0);
  RecordProperty("schedules", static_cast<int>(schedules));
}

TEST(CollectivesSim, CL_24_the_same_seed_gives_the_same_trace) {
  int failed = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(life(seed, &failed), life(seed, &failed)) << "seed " << seed;
  }
}

// A client of the store whose owner dies at one of its uses.
class FatalStore : public DelegatingStore {
 public:
  FatalStore(std::shared_ptr<Store> inner, std::function<void()> die)
      : DelegatingStore(std::move(inner)), die_(std::move(die)) {}
  // At the use after `uses` more.
  void arm(int uses) { left_ = uses; }

  Status set(std::string_view key, std::string_view value, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::set(key, value, timeout);
  }
  StatusOr<std::optional<std::string>> try_get(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::try_get(key, timeout);
  }
  StatusOr<std::string> get(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::get(key, timeout);
  }
  StatusOr<int64_t> add(std::string_view key, int64_t delta, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::add(key, delta, timeout);
  }
  StatusOr<std::string> compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::compare_set(key, expected, desired, timeout);
  }
  StatusOr<bool> delete_key(std::string_view key, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::delete_key(key, timeout);
  }
  StatusOr<bool> check(const std::vector<std::string>& keys, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::check(keys, timeout);
  }
  Status wait(const std::vector<std::string>& keys, Timeout timeout) override {
    WEFT_RETURN_IF_ERROR(use());
    return DelegatingStore::wait(keys, timeout);
  }

 private:
  Status use() {
    if (left_ > 0) --left_;
    if (left_ != 0) return absl::OkStatus();
    die_();
    return make_error(ErrorKind::kUnavailable, "dead");
  }

  const std::function<void()> die_;
  int left_ = -1;  // below 0: it lives
};

// CL-23, COLL-4: rank 3 dies in an operation, rank 2 at each moment of its rebuild in turn. Ranks 0
// and 1 get a group of two, in time that is bounded.
TEST(CollectivesSim, CL_23_and_CL_24_a_rank_that_dies_inside_rebuild) {
  int refused = 0;
  for (uint64_t moment = 1; moment <= 30 && !HasFailure(); ++moment) {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      SCOPED_TRACE("moment " + std::to_string(moment) + ", seed " + std::to_string(seed));
      SimRuntime sim({.seed = seed * 1000 + moment});
      const Status status = sim.run([&] {
        const World world(Backend::kInproc, 4, borrowed(&sim));
        const absl::Time begin = sim.now();
        world.run_ranks([&](int rank) {
          ProcessGroupOptions o = world.options(rank);
          o.timeout = absl::Seconds(5);
          const auto store =
              std::make_shared<FatalStore>(o.store, [&] { world.fabric->kill(rank); });
          o.store = store;
          StatusOr<ProcessGroup> made = try_init_process_group(o);
          ASSERT_TRUE(made.ok()) << made.status();
          ProcessGroup group = *std::move(made);
          if (rank == 3) {
            world.fabric->kill(rank);
            return;
          }
          EXPECT_FALSE(group.try_all_reduce(at::zeros({8})).ok());
          if (rank == 2) {
            store->arm(static_cast<int>(moment));
            const bool lives = group.try_rebuild({.timeout = absl::Seconds(10)}).ok();
            if (lives) world.fabric->kill(rank);
            return;
          }
          double sum = 0;
          for (int i = 0; i < 6 && sum == 0; ++i) {
            StatusOr<ProcessGroup> next = group.try_rebuild({.timeout = absl::Seconds(10)});
            refused += next.ok() ? 0 : 1;
            if (!next.ok()) continue;
            group = *std::move(next);
            const at::Tensor t = at::full({3}, rank + 1.0);
            if (group.try_all_reduce(t).ok()) sum = t[2].item<double>();
          }
          EXPECT_EQ(group.size(), 2);
          EXPECT_EQ(sum, 3);
        });
        EXPECT_LT(sim.now() - begin, absl::Minutes(3));
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  RecordProperty("refused", refused);
}

// A rank that is stopped: the others name it at the deadline, in virtual time.
TEST(CollectivesSim, AStoppedRankIsNamedAtTheDeadline) {
  SimRuntime sim({.seed = 7});
  const Status status = sim.run([&] {
    const World world(Backend::kInproc, 3, borrowed(&sim));
    const absl::Time begin = sim.now();
    world.run([&](ProcessGroup& group) {
      group.barrier();
      if (group.rank() == 2) sim.sleep(absl::Minutes(3));
      const Status s = group.try_all_reduce(at::zeros({8}), {.timeout = absl::Minutes(1)});
      expect_error(s, ErrorKind::kDeadline, {"all_reduce #2", "rank 2", "barrier #1"});
    });
    EXPECT_LT(sim.now() - begin, absl::Minutes(4));
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace weft::testing
