// The cost model: formulas against the simulation of the real schedules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "weft/collectives/cost_model.h"
#include "weft/collectives/internal/schedule_sim.h"
#include "weft/tests/collectives/world.h"

namespace weft::testing {
namespace {

// A network and a processor that reduces ten times as fast.
constexpr CostParameters kCost{2e-6, 1e-10, 1e-11};
constexpr int kRanks[] = {2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 36, 64, 100};

// Divided without a rest by ranks, powers of two and segments.
uint64_t elements_for(int ranks, uint64_t parts) {
  return static_cast<uint64_t>(ranks) * 256 * parts;
}

void expect_agreement(const CostEstimate& e, int ranks) {
  const double slack = e.agreement == Agreement::kExact ? 1e-12 : e.within;
  EXPECT_NEAR(e.simulated, e.formula, e.formula * slack) << e.name << ", " << ranks << " ranks";
}

TEST(CostModel, FormulasAgreeWithTheSchedules) {
  for (const int p : kRanks) {
    for (const uint64_t parts : {1u, 1000u}) {
      const uint64_t elements = elements_for(p, parts);
      const auto all = value_or_throw(try_estimate_all_reduce(p, elements, kCost));
      EXPECT_EQ(all.size(), 11u);
      for (const CostEstimate& e : all) {
        expect_agreement(e, p);
        const bool moves_all =
            e.algorithm == Algorithm::kNaive || e.algorithm == Algorithm::kRecursiveDoubling;
        if (!moves_all) {
          EXPECT_EQ(e.bytes, 2 * (static_cast<uint64_t>(p) - 1) * elements * 4) << e.name;
        }
      }
      for (const char* operation : {"broadcast", "reduce", "all_gather", "reduce_scatter",
                                    "all_to_all", "gather", "scatter", "barrier"}) {
        SCOPED_TRACE(operation);
        for (const CostEstimate& e :
             value_or_throw(try_estimate_operation(operation, p, elements, kCost))) {
          EXPECT_EQ(e.agreement, Agreement::kExact);
          expect_agreement(e, p);
        }
      }
    }
  }
}

// Each parameter alone, so that no term hides behind another one.
TEST(CostModel, EveryTermAgrees) {
  for (const CostParameters& cost :
       {CostParameters{1e-6, 0, 0}, CostParameters{0, 1e-10, 0}, CostParameters{0, 0, 1e-10}}) {
    for (const int p : kRanks) {
      for (const CostEstimate& e :
           value_or_throw(try_estimate_all_reduce(p, elements_for(p, 10), cost))) {
        if (e.agreement == Agreement::kExact || cost.gamma == 0) expect_agreement(e, p);
      }
    }
  }
}

const CostEstimate& of(const std::vector<CostEstimate>& all, Algorithm algorithm) {
  for (const CostEstimate& e : all) {
    if (e.algorithm == algorithm) return e;
  }
  throw std::logic_error("there is no such algorithm");
}

TEST(CostModel, RecommendsByTheSize) {
  // Few bytes: few messages behind each other. Many bytes: each byte twice.
  const auto small = value_or_throw(try_estimate_all_reduce(64, 64, kCost));
  EXPECT_EQ(fastest(small).algorithm, Algorithm::kRecursiveDoubling);
  const auto large = value_or_throw(try_estimate_all_reduce(64, 64 << 20, kCost));
  EXPECT_LT(fastest(large).simulated, of(large, Algorithm::kRecursiveDoubling).simulated / 2);
  EXPECT_LE(fastest(large).simulated, of(large, Algorithm::kRing).simulated);
}

// Sizes that nothing divides: the schedules send uneven blocks, which cost a little more.
TEST(CostModel, UnevenBlocksCostLittleMore) {
  for (const CostEstimate& e : value_or_throw(try_estimate_all_reduce(7, 1'000'003, kCost))) {
    EXPECT_NEAR(e.simulated, e.formula, e.formula * std::max(0.05, e.within)) << e.name;
  }
}

// Inside a host messages cost a tenth. The hierarchical ring's formula knows that; the others' are of
// a network without hosts, and bound their simulations.
TEST(CostModel, HostsWithSeveralRanks) {
  for (const auto& [ranks, per_host] :
       {std::pair{4, 2}, {6, 3}, {16, 4}, {24, 8}, {60, 5}, {8, 8}}) {
    CostParameters cost = kCost;
    cost.ranks_per_host = per_host;
    cost.local_alpha = kCost.alpha / 10;
    cost.local_beta = kCost.beta / 10;
    for (const uint64_t parts : {1u, 1000u}) {
      const uint64_t elements = elements_for(ranks, parts);
      const auto all = value_or_throw(try_estimate_all_reduce(ranks, elements, cost));
      ASSERT_EQ(all.size(), 12u);
      for (const CostEstimate& e : all) {
        SCOPED_TRACE(std::string(e.name) + ", " + std::to_string(ranks) + " ranks, " +
                     std::to_string(per_host) + " on each host");
        if (e.algorithm == Algorithm::kHierarchicalRing) {
          EXPECT_EQ(e.agreement, Agreement::kExact);
          expect_agreement(e, ranks);
        } else {
          EXPECT_EQ(e.agreement, Agreement::kAtMost);
          // Where a formula is about, so is the bound; and the halves of a mesh that no longer go in
          // step wait for each other at times.
          const bool about =
              e.algorithm == Algorithm::kDoubleTree || e.algorithm == Algorithm::kSegmentedRing;
          const bool is_mesh = e.algorithm == Algorithm::kMesh;
          EXPECT_LE(e.simulated, e.formula * (about ? 1.25 : is_mesh ? 1.03 : 1 + 1e-12));
        }
      }
      for (const char* operation : {"broadcast", "all_gather", "all_to_all", "barrier"}) {
        for (const CostEstimate& e :
             value_or_throw(try_estimate_operation(operation, ranks, elements, cost))) {
          EXPECT_LE(e.simulated, e.formula * (1 + 1e-12)) << operation << ", " << e.name;
        }
      }
    }
  }
}

// Few messages behind each other for few bytes, few bytes for many.
TEST(CostModel, RecommendsForTheOtherOperations) {
  const auto best = [](const char* operation, uint64_t elements) {
    return fastest(value_or_throw(try_estimate_operation(operation, 64, elements, kCost)))
        .algorithm;
  };
  EXPECT_EQ(best("broadcast", 64), Algorithm::kBinomialTree);
  EXPECT_EQ(best("broadcast", 64 << 20), Algorithm::kScatterAllGather);
  EXPECT_EQ(best("all_gather", 64), Algorithm::kRecursiveDoubling);
  EXPECT_EQ(best("reduce_scatter", 64), Algorithm::kRecursiveHalving);
  EXPECT_EQ(best("all_to_all", 64), Algorithm::kBruck);
  EXPECT_EQ(best("all_to_all", 64 << 20), Algorithm::kPairwise);
  EXPECT_EQ(best("gather", 64), Algorithm::kBinomialTree);
}

TEST(CostModel, RanksThatWaitForEachOtherAreAnError) {
  internal::ScheduleSim sim(2, 4, {1, 1, 1});
  using internal::Step;
  const internal::Round receives{{Step{Step::Kind::kStore, 1, internal::Buffer::kWork, 0, 1, 0}}};
  const internal::Round theirs{{Step{Step::Kind::kStore, 0, internal::Buffer::kWork, 0, 1, 0}}};
  EXPECT_TRUE(sim.add({{receives}}).ok());
  EXPECT_TRUE(sim.add({{theirs}}).ok());
  expect_error(sim.run().status(), ErrorKind::kInternal, {"wait for each other", "0 in round 0"});
}

TEST(CostModel, BadInput_cost_model) {
  const auto refused = [](int ranks, uint64_t elements, const CostParameters& cost,
                          const std::string& word) {
    expect_error(try_estimate_all_reduce(ranks, elements, cost).status(),
                 ErrorKind::kInvalidArgument, {word});
  };
  refused(1, 1, kCost, "1 ranks");
  refused(1 << 20, 1, kCost, "1048576 ranks");
  refused(4, 0, kCost, "0 elements");
  refused(4, 1, {-1, 0, 0}, "alpha is -1");
  refused(4, 1, {0, std::nan(""), 0}, "beta is nan");
  refused(4, uint64_t{1} << 40, {0, 1, 0}, "up to an hour");
  CostParameters hosts = kCost;
  hosts.ranks_per_host = 3;
  refused(4, 1, hosts, "3 on each host");
  hosts.ranks_per_host = 2;
  hosts.local_alpha = 1;
  refused(4, 1, hosts, "costs more than one between hosts");
  hosts.local_alpha = -1;
  refused(4, 1, hosts, "local_alpha is -1");
  expect_error(try_estimate_operation("rotate", 4, 1, kCost).status(), ErrorKind::kInvalidArgument,
               {"'rotate'", "all_to_all"});
}

}  // namespace
}  // namespace weft::testing
