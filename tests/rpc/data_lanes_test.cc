// Large messages between workers over data connections.

#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "gtest/gtest.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/tls_files.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

at::Tensor doubled(const at::Tensor& x) { return at::add(x, x); }

Library data_library() {
  Library lib("data");
  lib.def("add", &add, {.inline_ok = true});
  lib.def("doubled", &doubled);
  return lib;
}

class DataLanes : public ::testing::TestWithParam<bool> {
 protected:
  ClusterOptions options(GrpcTransportOptions transport = {}) {
    ClusterOptions o{.net = Net::kGrpc, .library = data_library()};
    o.adjust = [this, transport](int rank, JoinOptions* j) mutable {
      transport.local_sockets = false;
      if (GetParam()) {
        j->credentials = files_.make("worker" + std::to_string(rank), {.rank = rank});
      }
      j->transport = grpc_transport(transport);
    };
    return o;
  }
  // Both ends use their data connections.
  static void wait_up(Cluster& c) {
    const absl::Time limit = c[0].now() + absl::Seconds(30);
    for (const size_t at : {size_t{0}, size_t{1}}) {
      while (c[at].peer_stats().empty() || c[at].peer_stats()[0].connections.empty() ||
             c[at].peer_stats()[0].connections[0].data.find("2 connections") != 0) {
        ASSERT_LT(c[0].now(), limit);
        ASSERT_EQ(rpc_sync(c[0], 1, &add, 1, 2), 3);
      }
    }
  }
  static int64_t sum(Cluster& c, size_t at, const std::string& what, std::vector<int> lanes) {
    int64_t out = 0;
    for (const int lane : lanes) {
      out += counter(c[at], "lane" + std::to_string(lane) + "_" + what);
    }
    return out;
  }

  TlsFiles files_;
};

TEST_P(DataLanes, LargeTensorsTravelOnThemInChunksOfAMebibyte) {
  Cluster c(options());
  wait_up(c);
  const at::Tensor x = at::arange(8 * kMiB / 4, at::kFloat);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(rpc_sync(c[0], 1, &doubled, x), at::add(x, x)));
  EXPECT_EQ(sum(c, 0, "chunks_sent", {3, 4}), 4 * 8);
  EXPECT_EQ(sum(c, 1, "chunks_sent", {3, 4}), 4 * 8);
  EXPECT_EQ(sum(c, 0, "chunks_sent", {0, 1, 2}), 0);
  EXPECT_EQ(sum(c, 1, "chunks_sent", {0, 1, 2}), 0);
}

TEST_P(DataLanes, MessagesOfAllSizesSideBySideBothWays) {
  Cluster c(options());
  wait_up(c);
  std::vector<Future<at::Tensor>> calls;
  std::vector<at::Tensor> sent;
  for (int i = 0; i < 60; ++i) {
    const int64_t bytes = int64_t{1} << (6 + i % 17);  // 64 B to 4 MiB
    sent.push_back(at::full({bytes / 4 + i}, i, at::kFloat));
    calls.push_back(rpc_async(c[i % 2], 1 - i % 2, &doubled, sent.back()));
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_TRUE(at::equal(calls[i].wait(), at::add(sent[i], sent[i]))) << i;
  }
}

TEST_P(DataLanes, ASparseTensorAndAnEmptyOneAmongLargeOnes) {
  Cluster c(options());
  wait_up(c);
  const at::Tensor dense = at::ones({kMiB}, at::kFloat);
  const at::Tensor sparse = at::eye(3000, at::kFloat).to_sparse();
  EXPECT_TRUE(at::equal(rpc_sync(c[0], 1, &doubled, sparse).to_dense(), at::mul(at::eye(3000), 2)));
  EXPECT_EQ(rpc_sync(c[0], 1, &doubled, at::ones({0})).numel(), 0);
  EXPECT_TRUE(at::equal(rpc_sync(c[0], 1, &doubled, dense), at::mul(dense, 2)));
}

// Both sides dial at once, so one connection is retired, by a goodbye on every lane.
TEST_P(DataLanes, AConnectionIsRetiredWhenBothSidesDialled) {
  for (int round = 0; round < 5; ++round) {
    Cluster c(options());
    const at::Tensor x = at::ones({kMiB / 4});
    std::vector<Future<at::Tensor>> calls;
    for (int i = 0; i < 20; ++i) calls.push_back(rpc_async(c[i % 2], 1 - i % 2, &doubled, x));
    for (auto& call : calls) EXPECT_EQ(call.wait().numel(), x.numel());
    const absl::Time limit = c[0].now() + absl::Seconds(20);
    while (counter(c[0], "connections") + counter(c[1], "connections") > 2) {
      ASSERT_LT(c[0].now(), limit);
      rpc_sync(c[0], 1, &add, 1, 2);
    }
    EXPECT_EQ(counter(c[0], "connections_lost"), counter(c[0], "connections_opened") - 1);
  }
}

INSTANTIATE_TEST_SUITE_P(, DataLanes, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "tls" : "plain"; });

}  // namespace
}  // namespace weft::testing
