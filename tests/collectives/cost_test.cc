// The cost model: formulas against the simulation of the real schedules.
#include <gtest/gtest.h>

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
  const double slack = e.exact ? 1e-12 : 0.05;
  EXPECT_NEAR(e.simulated, e.formula, e.formula * slack) << e.name << ", " << ranks << " ranks";
}

TEST(CostModel, FormulasAgreeWithTheSchedules) {
  for (const int p : kRanks) {
    for (const uint64_t parts : {1u, 1000u}) {
      const uint64_t elements = elements_for(p, parts);
      const auto all = value_or_throw(try_estimate_all_reduce(p, elements, kCost));
      EXPECT_EQ(all.size(), 10u);
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
        expect_agreement(value_or_throw(try_estimate_operation(operation, p, elements, kCost)), p);
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
        if (e.exact || cost.gamma == 0) expect_agreement(e, p);
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
    EXPECT_NEAR(e.simulated, e.formula, e.formula * 0.05) << e.name;
  }
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
  expect_error(try_estimate_operation("rotate", 4, 1, kCost).status(), ErrorKind::kInvalidArgument,
               {"'rotate'", "all_to_all"});
}

}  // namespace
}  // namespace weft::testing
