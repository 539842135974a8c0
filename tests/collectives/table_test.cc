// The table by which an all_reduce gets its algorithm.
#include "weft/collectives/internal/algorithm_table.h"

#include <gtest/gtest.h>

#include <string>

#include "ATen/ops/zeros.h"
#include "weft/tests/collectives/world.h"

namespace weft::internal {
namespace {

using testing::expect_error;
using testing::World;

TEST(AlgorithmTable, TheFirstRuleThatFitsDecides) {
  const auto table = AlgorithmTable::parse(
      "# measured\n"
      "star:0-100 ranks=2-4; ring:0-100\n"
      "\n"
      "  hierarchical_ring:101-max hosts=some ;2d_mesh:101-max hosts=each # by far\n"
      "double_binary_tree:101-200 hosts=one ranks=8-max; all_reduce.star:500-600\n"
      "all_gather.bruck:0-50; broadcast.scatter_all_gather:51-max");
  ASSERT_TRUE(table.ok()) << table.status();
  const Topology one;
  const Topology some{{0, 0, 1}};
  const Topology each{{0, 1, 2}};
  EXPECT_EQ(table->find(OpKind::kAllReduce, 0, 2, one), Algorithm::kStar);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 100, 4, one), Algorithm::kStar);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 100, 5, one), Algorithm::kRing);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 101, 3, some), Algorithm::kHierarchicalRing);
  EXPECT_EQ(table->find(OpKind::kAllReduce, uint64_t{1} << 40, 3, each), Algorithm::kMesh);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 101, 3, one), Algorithm::kAuto);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 200, 8, one), Algorithm::kDoubleTree);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 201, 8, one), Algorithm::kAuto);
  EXPECT_EQ(table->find(OpKind::kAllReduce, 501, 2, one), Algorithm::kStar);
  EXPECT_EQ(table->find(OpKind::kAllGather, 50, 2, one), Algorithm::kBruck);
  EXPECT_EQ(table->find(OpKind::kAllGather, 51, 2, one), Algorithm::kAuto);
  EXPECT_EQ(table->find(OpKind::kBroadcast, 51, 2, one), Algorithm::kScatterAllGather);
  EXPECT_EQ(table->find(OpKind::kReduceScatter, 51, 2, one), Algorithm::kAuto);
  EXPECT_TRUE(AlgorithmTable::parse("# nothing\n;;\n")->empty());
  const auto on_tcp = AlgorithmTable::parse("star:0-9 on=shm; ring:0-9 on=tcp; naive:0-9", "tcp");
  ASSERT_TRUE(on_tcp.ok()) << on_tcp.status();
  EXPECT_EQ(on_tcp->find(OpKind::kAllReduce, 9, 2, one), Algorithm::kRing);
}

TEST(AlgorithmTable, EveryAlgorithmHasANameInIt) {
  for (uint8_t i = 1; i < kAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    EXPECT_EQ(algorithm_named(table_name(algorithm)), algorithm) << table_name(algorithm);
  }
  EXPECT_EQ(table_name(Algorithm::kReduceBroadcast), "reduce_broadcast");
}

TEST(AlgorithmTable, BadInput_rules) {
  const auto expect_refused = [](const std::string& text, const std::string& word) {
    expect_error(AlgorithmTable::parse(text).status(), ErrorKind::kInvalidArgument, {word});
  };
  expect_refused("rings:0-1", "'rings:0-1' of a table of algorithms names no algorithm");
  expect_refused("auto:0-1", "names no algorithm");
  expect_refused("bruck:0-1", "names an algorithm that all_reduce does not have");
  expect_refused("broadcast.ring:0-1", "names an algorithm that broadcast does not have");
  expect_refused("gather.binomial_tree:0-1", "an operation that tables do not decide about");
  expect_refused("all_gather.:0-1", "names no algorithm");
  expect_refused("ring", "no range of bytes");
  expect_refused("ring:1", "no range of bytes");
  expect_refused("ring:9-1", "no range of bytes");
  expect_refused("ring:0-99999999999999999999999", "no range of bytes");
  expect_refused("ring:0-1 ranks=2", "'ranks=2'");
  expect_refused("ring:0-1 hosts=two", "'hosts=two'");
  expect_refused("ring:0-1 moon=full", "'moon=full'");
  expect_refused("ring:0-1 on=gloo", "'on=gloo'");
  expect_refused(std::string(kMaxTableBytes + 1, ' '), "bytes; at most");
}

// The algorithm is in the fingerprint, which the error of ranks that differ shows.
std::string algorithm_of(ProcessGroup& group, int64_t floats) {
  const Status s = group.try_all_reduce(at::zeros({floats + (group.rank() == 1 ? 1 : 0)}));
  EXPECT_FALSE(s.ok());
  return std::string(s.message());
}

TEST(AlgorithmTable, RankZeroDecidesForAllRanks) {
  for (const Backend backend : {Backend::kInproc, Backend::kShm, Backend::kTcp}) {
    const World world(backend, 3);
    world.run(
        [](ProcessGroupOptions& o) {
          o.algorithms = *o.rank == 0 ? "star:0-1000; 3d_torus:1001-max" : "ring:0-max";
        },
        [](ProcessGroup& group) {
          ProcessGroup part = group.new_group({0, 1, 2});
          EXPECT_NE(algorithm_of(part, 8).find("star"), std::string::npos);
          EXPECT_NE(algorithm_of(group, 8).find("star"), std::string::npos);
        });
  }
}

TEST(AlgorithmTable, BadInput_a_table_of_rank_zero_that_is_none) {
  const World world(Backend::kInproc, 2);
  ProcessGroupOptions o = world.options(0);
  o.algorithms = "ring:";
  expect_error(try_init_process_group(o).status(), ErrorKind::kInvalidArgument, {"ring:"});
  o = world.options(0);
  o.environment = Environment{{"WEFT_COLLECTIVES_TABLE", "/nowhere/at/all"}};
  expect_error(try_init_process_group(o).status(), error_kind(try_init_process_group(o).status()),
               {"/nowhere/at/all"});
}

}  // namespace
}  // namespace weft::internal
