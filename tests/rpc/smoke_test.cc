// The smallest thing that works end to end, on each transport.

#include "ATen/TensorOperators.h"
#include "ATen/ops/ones.h"
#include "gtest/gtest.h"
#include "weft/rpc/call.h"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

at::Tensor twice(at::Tensor x) { return x + x; }

class RpcSmoke : public ::testing::TestWithParam<Net> {};

TEST_P(RpcSmoke, TwoWorkersCallEachOther) {
  Library lib("app");
  lib.def("add", &add).def("twice", &twice);
  Cluster c({.size = 2, .net = GetParam(), .library = lib});
  EXPECT_EQ(rpc_sync(c[0], "worker1", &add, 2, 3), 5);
  EXPECT_EQ(rpc_sync(c[1], "worker0", &add, 20, 3), 23);
  EXPECT_EQ(rpc_sync(c[1], "worker1", &add, 20, 4), 24);
  at::Tensor y = rpc_sync(c[0], 1, &twice, at::ones({3, 4}));
  EXPECT_EQ(y.sum().item<float>(), 24);
  at::Tensor z = rpc_sync(c[0], 1, &twice, at::ones({3 << 18}));
  EXPECT_EQ(z.sum().item<float>(), 6 << 18);
  c.shutdown();
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcSmoke, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
