// Groups on inproc under the seeded scheduler: random operations, deaths, aborts, late ranks.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/common/sim.h"
#include "weft/tests/collectives/world.h"

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
  const char* const asked = std::getenv("WEFT_COLLECTIVES_SIM_SCHEDULES");
  const uint64_t schedules = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 1000;
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
