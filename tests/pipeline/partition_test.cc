// The partitioner against every partition there is, and what it refuses.
#include "weft/pipeline/partition.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/pipeline/schedule.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

PartitionRequest random_request(std::mt19937_64* random) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n));
  };
  PartitionRequest r;
  const int64_t layers = 1 + below(14);
  r.stages = static_cast<int>(1 + below(std::min<int64_t>(layers, 4)));
  // Few values: many partitions are equally fast, and the bytes decide.
  const int64_t most = 1 + below(20);
  for (int64_t i = 0; i < layers; ++i) {
    LayerCost l;
    l.name = absl::StrCat("l", i);
    l.forward = below(most);
    l.input_grad = below(most);
    l.weight_grad = below(most);
    l.parameters = below(30);
    l.activation = below(10);
    l.output = below(50);
    r.layers.push_back(l);
  }
  const auto per_stage = [&](auto draw) {
    std::vector<int64_t> out;
    const int64_t n = below(3) == 0 ? 1 : r.stages;
    for (int64_t s = 0; s < n; ++s) out.push_back(draw());
    return out;
  };
  if (below(2) == 0) r.memory_caps = per_stage([&] { return 20 + below(300); });
  if (below(2) == 0) r.live = per_stage([&] { return 1 + below(4); });
  if (below(2) == 0) r.bytes_per_kilotick = 500 + below(2000);
  if (below(4) == 0) r.edge_cap = 10 + below(40);
  return r;
}

// Written without the code under test: every cut, and the sums by hand.
struct Best {
  bool any = false;
  int64_t slowest = 0;
  int64_t bytes = 0;
};
Best try_all(const PartitionRequest& r) {
  Best best;
  std::vector<int> begins{0};
  const int n = static_cast<int>(r.layers.size());
  const auto at = [](const std::vector<int64_t>& list, int s, int64_t otherwise) {
    return list.empty() ? otherwise : list[list.size() == 1 ? 0 : s];
  };
  const std::function<void()> go = [&] {
    const int s = static_cast<int>(begins.size()) - 1;
    if (s == r.stages) {
      if (begins.back() != n) return;
      int64_t slowest = 0;
      int64_t bytes = 0;
      for (int k = 0; k < r.stages; ++k) {
        int64_t time = 0;
        int64_t memory = 0;
        for (int i = begins[k]; i < begins[k + 1]; ++i) {
          const LayerCost& l = r.layers[i];
          time += l.forward + l.input_grad + l.weight_grad;
          memory += l.parameters + l.activation * at(r.live, k, 1);
        }
        if (memory > at(r.memory_caps, k, std::numeric_limits<int64_t>::max())) return;
        if (k + 1 < r.stages) {
          const int64_t out = r.layers[begins[k + 1] - 1].output;
          if (r.edge_cap > 0 && out > r.edge_cap) return;
          bytes += out;
          if (r.bytes_per_kilotick > 0) {
            time = std::max(time, (out * 1000 + r.bytes_per_kilotick - 1) / r.bytes_per_kilotick);
          }
        }
        slowest = std::max(slowest, time);
      }
      if (!best.any || std::pair(slowest, bytes) < std::pair(best.slowest, best.bytes)) {
        best = {true, slowest, bytes};
      }
      return;
    }
    for (int next = begins.back() + 1; next <= n; ++next) {
      begins.push_back(next);
      go();
      begins.pop_back();
    }
  };
  go();
  return best;
}

TEST(Partition, PP_7_EqualsEveryPartitionTried) {
  std::mt19937_64 random(1);
  int none = 0;
  for (int k = 0; k < 500; ++k) {
    const PartitionRequest r = random_request(&random);
    SCOPED_TRACE(absl::StrCat("case ", k, ": ", r.layers.size(), " layers, ", r.stages, " stages"));
    const Best best = try_all(r);
    const auto got = partition(r);
    ASSERT_EQ(got.ok(), best.any) << got.status();
    if (!best.any) {
      ++none;
      EXPECT_EQ(error_kind(got.status()), ErrorKind::kResource) << got.status();
      continue;
    }
    EXPECT_EQ(got->slowest, best.slowest);
    EXPECT_EQ(got->edge_bytes, best.bytes);
    // PART-1.
    ASSERT_EQ(got->begins.front(), 0);
    ASSERT_EQ(got->begins.back(), static_cast<int>(r.layers.size()));
    ASSERT_EQ(got->stages(), r.stages);
    for (int s = 0; s < r.stages; ++s) ASSERT_LT(got->begins[s], got->begins[s + 1]);
  }
  EXPECT_GT(none, 20);
  EXPECT_LT(none, 250);
}

// On uneven layers equal counts are 1.2 times as slow as need be, in the median.
TEST(Partition, PP_7_UniformIsWorse) {
  std::mt19937_64 random(3);
  std::lognormal_distribution<double> draw(0, 1);
  std::vector<double> ratios;
  for (int k = 0; k < 200; ++k) {
    PartitionRequest r;
    r.stages = 4;
    for (int i = 0; i < 24; ++i) {
      r.layers.push_back({.forward = 1 + static_cast<Ticks>(1e6 * draw(random))});
    }
    ratios.push_back(static_cast<double>(partition_by("uniform", r)->slowest) /
                     static_cast<double>(partition_by("auto", r)->slowest));
    EXPECT_GE(ratios.back(), 1);
  }
  std::sort(ratios.begin(), ratios.end());
  EXPECT_GT(ratios[100], 1.15);
}

PartitionRequest named(std::vector<std::string> names, int stages) {
  PartitionRequest r;
  r.stages = stages;
  for (std::string& name : names) {
    r.layers.push_back({.name = std::move(name), .forward = 1, .output = 8});
  }
  return r;
}

TEST(Partition, PP_7_ListsAndPatterns) {
  const PartitionRequest r =
      named({"embed", "block.0", "norm", "block.1", "block.2", "norm", "block.3", "head"}, 2);
  EXPECT_THAT(partition_by("uniform", r)->begins, ElementsAre(0, 4, 8));
  EXPECT_THAT(partition_by("auto", r)->begins, ElementsAre(0, 4, 8));
  EXPECT_THAT(partition_by("5,3", r)->begins, ElementsAre(0, 5, 8));
  EXPECT_EQ(partition_by("5,3", r)->slowest, 5);
  // Two blocks each, wherever the others are.
  const auto blocks = partition_by("match:block.?", r);
  ASSERT_TRUE(blocks.ok()) << blocks.status();
  EXPECT_EQ(blocks->begins[1], 4);
  EXPECT_THAT(partition_by("match:*norm", r)->begins[1], AllOf(::testing::Ge(3), ::testing::Le(5)));
  // Uneven: the first stages have one more.
  EXPECT_THAT(partition_by("uniform", named({"a", "b", "c", "d", "e"}, 3))->begins,
              ElementsAre(0, 2, 4, 5));
}

TEST(Partition, PP_7_CostsOfStagesAreSums) {
  PartitionRequest r;
  r.stages = 2;
  for (int i = 1; i <= 3; ++i) {
    r.layers.push_back({.forward = i, .input_grad = 2 * i, .weight_grad = 3 * i, .activation = i});
  }
  const Partition p = *partition(r);
  ASSERT_THAT(p.begins, ElementsAre(0, 2, 3));
  const auto costs = stage_costs(r.layers, p);
  ASSERT_EQ(costs.size(), 2u);
  EXPECT_EQ(costs[0].forward, 3);
  EXPECT_EQ(costs[0].input_grad, 6);
  EXPECT_EQ(costs[0].weight_grad, 9);
  EXPECT_EQ(costs[0].activation, 3);
  EXPECT_EQ(costs[1].forward, 3);
  // They are what the simulator takes.
  Costs all;
  all.stages = costs;
  all.edges.resize(1);
  EXPECT_EQ(simulate(one_f_one_b(2, 1), all).makespan, 2 * 18);
}

// The largest that is taken, in a time that does not count.
TEST(Partition, PP_7_LargeModels) {
  PartitionRequest r;
  r.stages = 64;
  const int layers = testing::fewer(kMaxLayers, kMaxLayers / 4);
  for (int i = 0; i < layers; ++i) {
    r.layers.push_back({.forward = 1 + i % 7, .output = 1 + i % 3});
  }
  const auto p = partition(r);
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->begins.back(), layers);
  r.stages = layers;
  EXPECT_EQ(partition(r)->slowest, 7);
}

TEST(Partition, BadInput_PartitionsThatCannotBe) {
  const auto refused = [](const StatusOr<Partition>& p, ErrorKind kind) {
    EXPECT_FALSE(p.ok());
    EXPECT_EQ(error_kind(p.status()), kind) << p.status();
    return std::string(p.status().message());
  };
  PartitionRequest r = named({"a", "b", "c"}, 4);
  EXPECT_THAT(refused(partition(r), ErrorKind::kInvalidArgument),
              HasSubstr("3 layers for 4 stages"));
  r.stages = 0;
  EXPECT_THAT(refused(partition(r), ErrorKind::kInvalidArgument),
              HasSubstr("3 layers for 0 stages"));
  r.stages = 2;
  r.layers[1].forward = -1;
  EXPECT_THAT(refused(partition(r), ErrorKind::kInvalidArgument),
              HasSubstr("layer 1 'b' has a cost of -1"));
  r.layers[1].forward = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(refused(partition(r), ErrorKind::kInvalidArgument), HasSubstr("layer 1 'b'"));
  r.layers[1].forward = 1;
  r.memory_caps = {1, 2, 3};
  EXPECT_THAT(refused(partition(r), ErrorKind::kInvalidArgument),
              HasSubstr("3 memory caps for 2 stages"));
  r.memory_caps = {};
  r.live = {1, -1};
  EXPECT_THAT(refused(partition(r), ErrorKind::kInvalidArgument), HasSubstr("one is -1"));
  r.live = {};
  // Lists: a model of which two layers would be lost, one that has none of them.
  for (const auto& [how, what] : std::vector<std::pair<std::string, std::string>>{
           {"1,1", "a list of 2 layers for a model of 3"},
           {"2,2", "a list of 4 layers for a model of 3"},
           {"3", "a list of 1 stages for a plan of 2"},
           {"3,0", "got '0'"},
           {"1,,2", "got ''"},
           {"-1,4", "got '-1'"},
           {"1,2x", "got '2x'"},
           {"", "got ''"},
           {"evenly", "got 'evenly'"},
           {"match:z*", "no layer's name is like 'z*'"},
           {"99999999999999999999,1", "got '99999999999999999999'"}}) {
    EXPECT_THAT(refused(partition_by(how, r), ErrorKind::kInvalidArgument), HasSubstr(what)) << how;
  }
  for (const std::vector<int>& begins : std::vector<std::vector<int>>{
           {}, {0, 3}, {0, 1, 2}, {1, 2, 3}, {0, 0, 3}, {0, 3, 3}, {0, 4, 3}, {0, -1, 3}}) {
    refused(evaluate_partition(r, begins), ErrorKind::kInvalidArgument);
  }
  // Caps.
  r.layers[2].parameters = 100;
  r.memory_caps = {50};
  EXPECT_THAT(refused(partition(r), ErrorKind::kResource),
              HasSubstr("layer 2 'c' needs 100 bytes, and no stage may hold more than 50"));
  EXPECT_THAT(refused(partition_by("2,1", r), ErrorKind::kResource),
              HasSubstr("stage 1 with the layers 2 to 2 needs 100 bytes, and may hold 50"));
  r.memory_caps = {};
  r.edge_cap = 7;
  EXPECT_THAT(refused(partition(r), ErrorKind::kResource), HasSubstr("no partition of 3 layers"));
  EXPECT_THAT(refused(partition_by("2,1", r), ErrorKind::kResource),
              HasSubstr("the edge after layer 1 carries 8 bytes, and may carry 7"));
  // Sums that would not fit into a number are above every cap.
  r.edge_cap = 0;
  r.memory_caps = {1};
  r.live = {kMaxMicroBatches};
  for (LayerCost& l : r.layers) l.activation = int64_t{1} << 48;
  EXPECT_THAT(refused(partition(r), ErrorKind::kResource), HasSubstr("layer 0 'a'"));
}

}  // namespace
}  // namespace weft::pipeline
