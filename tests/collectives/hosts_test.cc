// Groups over several hosts, by what the ranks say where they are: all of them run on this one.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "weft/common/metrics.h"
#include "weft/common/sim.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

// The backend that ranks on these hosts choose; all of them the same.
std::string backend_of(const std::vector<std::string>& hosts) {
  std::vector<std::string> chosen(hosts.size());
  const World world(Backend::kAuto, static_cast<int>(hosts.size()));
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    o.host = hosts[static_cast<size_t>(rank)];
    StatusOr<ProcessGroup> group = try_init_process_group(o);
    ASSERT_TRUE(group.ok()) << group.status();
    chosen[static_cast<size_t>(rank)] = std::string(group->backend());
    const at::Tensor t = at::full({3}, rank + 1.0);
    group->all_reduce(t);
    const int n = group->size();
    EXPECT_EQ(t[2].item<double>(), n * (n + 1) / 2);
  });
  for (const std::string& one : chosen) EXPECT_EQ(one, chosen[0]);
  return chosen[0];
}

TEST(CollectiveHosts, TheBackendFollowsFromWhereTheRanksAre) {
  EXPECT_EQ(backend_of({"", "", ""}), "shm");
  EXPECT_EQ(backend_of({"a", "a"}), "shm");
  EXPECT_EQ(backend_of({"a", "b", "c"}), "tcp");
  EXPECT_EQ(backend_of({"a", "b", "a"}), "shm+tcp");
  EXPECT_EQ(backend_of({"a", "b", "b", "a", "c"}), "shm+tcp");
}

TEST(CollectiveHosts, BadInput_shm_over_several_hosts) {
  const World world(Backend::kShm, 2);
  world.run_ranks([&](int rank) {
    ProcessGroupOptions o = world.options(rank);
    o.host = rank == 0 ? "a" : "b";
    expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument,
                 {"several hosts"});
  });
}

// Tensors of every size, some above what is sent in pieces; the same bits at all ranks.
TEST(CollectiveHosts, AnAllReduceOfAnySizeOverHosts) {
  World(Setting::hosts(), 5).run([](ProcessGroup& group) {
    EXPECT_EQ(group.backend(), "shm+tcp");
    for (const int64_t n : {0, 1, 7, 20'000, 1'000'003}) {
      for (const Algorithm algorithm :
           {Algorithm::kAuto, Algorithm::kHierarchicalRing, Algorithm::kRing}) {
        const at::Tensor t = at::full({n}, group.rank() + 1.0);
        group.all_reduce(t, {.algorithm = algorithm});
        EXPECT_EQ(t.sum().item<double>(), 15.0 * static_cast<double>(n));
      }
    }
  });
}

// What goes from host to host: twice the tensor between the two leaders, where a ring of five ranks
// crosses at four of its links in each of its eight steps.
TEST(CollectiveHosts, CountsOfMessagesBetweenHosts) {
  struct Expected {
    Algorithm algorithm;
    double messages;
    double bytes;
  };
  constexpr int64_t kElements = 1000;  // of 4 bytes; each rank has a fifth of them
  for (const Expected& one : {Expected{Algorithm::kAuto, 4, 2 * 4000},
                              Expected{Algorithm::kHierarchicalRing, 4, 2 * 4000},
                              Expected{Algorithm::kRing, 32, 32 * 800}}) {
    const auto metrics = std::make_shared<Metrics>();
    World(Setting::hosts(), 5)
        .run([&](ProcessGroupOptions& o) { o.metrics = metrics; },
             [&](ProcessGroup& group) {
               const at::Tensor t = at::full({kElements}, 1.0);
               group.all_reduce(t, {.algorithm = one.algorithm});
               EXPECT_EQ(t[0].item<double>(), 5);
               // Inside a host.
               if (group.rank() == 0) group.send(t, 4);
               if (group.rank() == 4) group.recv(t, 0);
             });
    const auto value = [seen = metrics->snapshot()](const std::string& name) {
      return seen.at("weft_collectives_" + name + "_between_hosts_total");
    };
    EXPECT_EQ(value("messages"), one.messages);
    EXPECT_EQ(value("bytes"), one.bytes);
  }
}

TEST(CollectiveHosts, TheChosenAlgorithmIsHierarchical) {
  World(Setting::hosts(), 3).run([](ProcessGroup& group) {
    // The error of ranks that differ names the algorithm.
    const Status s = group.try_all_reduce(at::zeros({group.rank() == 1 ? 8 : 9}));
    expect_error(s, ErrorKind::kInvalidArgument, {"hierarchical ring"});
  });
}

// Simulated: the ring of leaders and the trees inside, with deaths, on hosts by seed.
TEST(CollectiveHosts, HierarchiesUnderTheScheduler) {
  for (uint64_t seed = 1; seed <= 200 && !::testing::Test::HasFailure(); ++seed) {
    SimRuntime sim({.seed = seed});
    const Status status = sim.run([&] {
      const int size = 2 + static_cast<int>(sim.random().below(5));
      const World world(Backend::kInproc, size, borrowed(&sim));
      std::vector<std::string> hosts;
      for (int r = 0; r < size; ++r) hosts.push_back(std::to_string(sim.random().below(3)));
      const bool dies = sim.random().below(4) == 0;
      const int victim = static_cast<int>(sim.random().below(static_cast<uint64_t>(size)));
      world.run_ranks([&](int rank) {
        ProcessGroupOptions o = world.options(rank);
        o.host = hosts[static_cast<size_t>(rank)];
        o.timeout = absl::Seconds(5);
        StatusOr<ProcessGroup> group = try_init_process_group(o);
        ASSERT_TRUE(group.ok()) << group.status();
        bool failed = false;
        for (int i = 0; i < 4; ++i) {
          if (dies && rank == victim && i == 2) world.fabric->kill(rank);
          const at::Tensor t = at::full({17}, rank + 1.0);
          const Status s = group->try_all_reduce(t, {.algorithm = Algorithm::kHierarchicalRing});
          EXPECT_FALSE(failed && s.ok()) << "seed " << seed;
          failed = failed || !s.ok();
          EXPECT_TRUE(s.ok() || dies) << "seed " << seed << ": " << s;
          if (s.ok()) {
            EXPECT_EQ(t[16].item<double>(), size * (size + 1) / 2) << "seed " << seed;
          }
        }
        EXPECT_EQ(failed, dies) << "seed " << seed;
      });
    });
    EXPECT_TRUE(status.ok()) << "seed " << seed << ": " << status;
  }
}

}  // namespace
}  // namespace weft::testing
