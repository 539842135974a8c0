// Workers beside LibTorch's own collectives (c10d's process group on gloo) in one program: RPC-8,
// RPC-9 and RPC-50 of the inventory. Each has its own connections and rendezvous; what the tests
// ask is that neither order of making them, nor the one in the midst of the other, breaks or
// blocks.

#include <memory>
#include <utility>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/full.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "weft/tests/rpc/library.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/gloo_group.h"

namespace weft::testing {
namespace {

using Group = c10::intrusive_ptr<c10d::Backend>;

class RpcBesideGloo : public ::testing::TestWithParam<Net> {
 protected:
  static constexpr int kSize = 3;

  ClusterOptions options() { return {.size = kSize, .net = GetParam(), .library = test_.library}; }

  // `f(rank)` on a thread per rank; collectives block until all ranks are in.
  template <class F>
  void on_every_rank(F f) {
    std::vector<std::unique_ptr<Thread>> threads;
    for (int rank = 0; rank < kSize; ++rank) {
      threads.push_back(runtime_->spawn("rank", [rank, f] {
        try {
          f(rank);
        } catch (const std::exception& e) {
          ADD_FAILURE() << "rank " << rank << ": " << e.what();
        }
      }));
    }
  }

  std::vector<Group> make_groups() {
    std::vector<Group> groups(kSize);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    on_every_rank(
        [&](int rank) { groups[static_cast<size_t>(rank)] = make_gloo_group(store, rank, kSize); });
    return groups;
  }

  // Sums rank + 1 over the ranks and checks the sum everywhere.
  void expect_all_reduce(const std::vector<Group>& groups) {
    on_every_rank([&](int rank) {
      const Group& group = groups[static_cast<size_t>(rank)];
      ASSERT_TRUE(group) << "rank " << rank;
      const at::Tensor sum = all_reduce(group, at::full({4}, rank + 1));
      EXPECT_EQ(sum.sum().item<int64_t>(), 4 * (1 + 2 + 3)) << "rank " << rank;
    });
  }

  // Every worker calls every worker.
  void expect_calls(Cluster& c) {
    std::vector<std::pair<int64_t, Future<at::Tensor>>> calls;
    for (int from = 0; from < kSize; ++from) {
      for (int to = 0; to < kSize; ++to) {
        const int64_t n = 10 * from + to;
        calls.emplace_back(n, rpc_async(c[static_cast<size_t>(from)], to, &add_tensors,
                                        at::arange(5), at::full({5}, n)));
      }
    }
    for (auto& [n, sum] : calls) EXPECT_EQ(sum.wait().sum().item<int64_t>(), 10 + 5 * n);
  }

  TestLibrary test_;
  std::shared_ptr<Runtime> runtime_ = make_system_runtime();
};

TEST_P(RpcBesideGloo, RPC_8_collectives_first_then_workers) {
  const std::vector<Group> groups = make_groups();
  expect_all_reduce(groups);
  Cluster c(options());
  expect_calls(c);
  expect_all_reduce(groups);
  expect_calls(c);
  c.shutdown();
  expect_all_reduce(groups);  // the workers took nothing of it along
}

TEST_P(RpcBesideGloo, RPC_9_workers_first_then_collectives) {
  Cluster c(options());
  expect_calls(c);
  {
    const std::vector<Group> groups = make_groups();
    expect_all_reduce(groups);
    expect_calls(c);
  }
  expect_calls(c);  // nor the collectives
  c.shutdown();
}

TEST_P(RpcBesideGloo, RPC_50_a_call_in_flight_while_a_group_is_made) {
  const FunctionRef<int64_t(int64_t)> wait_at_gate{"test.wait_at_gate"};
  Cluster c(options());
  Future<int64_t> held = rpc_async(c[0], 1, wait_at_gate, 7);
  test_.gate->wait_arrived(1);
  const std::vector<Group> groups = make_groups();
  expect_all_reduce(groups);
  EXPECT_FALSE(held.done());
  expect_calls(c);
  test_.gate->open();
  EXPECT_EQ(held.wait(), 7);
  c.shutdown();
}

// The group is made inside handlers: they wait for each other, as all its ranks must come.
TEST_P(RpcBesideGloo, RPC_50_handlers_that_make_the_group) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Library library("test");
  library.def("sum_over_group", [store](CallContext& context, int64_t n) {
    const Group group = make_gloo_group(store, context.worker().rank(), kSize);
    return all_reduce(group, at::full({1}, n)).item<int64_t>();
  });
  ClusterOptions o = options();
  o.library = library;
  Cluster c(std::move(o));
  const FunctionRef<int64_t(int64_t)> sum{"test.sum_over_group"};
  std::vector<Future<int64_t>> sums;
  for (int to = 0; to < kSize; ++to) sums.push_back(rpc_async(c[0], to, sum, to + 1));
  for (Future<int64_t>& s : sums) EXPECT_EQ(s.wait(), 6);
  c.shutdown();
}

INSTANTIATE_TEST_SUITE_P(Nets, RpcBesideGloo, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
