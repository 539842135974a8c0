// Contexts over a worker's life: joined again and again (X3), and with connections cut (X1).

#include <array>

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistAgain : public DistAutogradTest {};

TEST_P(DistAgain, RPC_6_and_X3_three_cycles_with_references_and_contexts) {
  const at::Tensor x = leaf({1, 2});
  at::Tensor old;  // of the cycle before
  for (int cycle = 0; cycle < 3; ++cycle) {
    SCOPED_TRACE(cycle);
    auto c = make();
    {
      const auto holder = remote<Holder>((*c)[0], "worker1", leaf({3, 4}));
      DistAutogradContext context((*c)[0]);
      const at::Tensor y = holder.rpc_sync(&Holder::times, x);
      const at::Tensor z = rpc_sync((*c)[0], "worker2", &mul, y, y);
      context.backward({z.sum()});
      const at::Tensor w = leaf({3, 4}).detach();
      expect_equal(context.gradient(x), (2 * w * w * x).detach());
      expect_equal(holder.rpc_sync(&Holder::gradient).at(0), (2 * w * x * x).detach());
      if (old.defined()) {
        expect_error(error_of([&] { context.backward({(old * x).sum()}); }),
                     ErrorKind::kInvalidArgument, {"received from", "one context"});
      }
      old = y;
    }
    expect_nothing_left(*c);
    for (const ShutdownResult& result : c->shutdown_all()) EXPECT_TRUE(result.status.ok());
  }
}

// d: what was recorded before a cut takes part in what comes after it, and so do references.
TEST_P(DistAgain, X1_d_a_context_that_was_made_before_a_cut_works_after_it) {
  auto plan = std::make_shared<FaultPlan>(1);
  auto c = make({.size = 2, .plan = plan});
  const at::Tensor x = leaf({1, 2});
  const auto holder = remote<Holder>((*c)[0], "worker1", leaf({3, 4}));
  const at::Tensor w = leaf({3, 4}).detach();
  const uint64_t before = (*c)[0].get_worker_info("worker1").incarnation;
  const auto cut = [&](const char* from, const char* to) {
    return plan->add({.fault = Fault::kCut, .from = from, .to = to, .times = 1});
  };
  const CallOptions kAgain{.retry = Retry::kAtMostOnce};
  std::array<int64_t, 2> cuts{};
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(i);
    const char* const from = i % 2 == 0 ? "worker0" : "worker1";
    const char* const to = i % 2 == 0 ? "worker1" : "worker0";
    DistAutogradContext context((*c)[0]);
    const at::Tensor y = holder.rpc_sync(&Holder::times, x);
    const int first = cut(from, to);
    const at::Tensor z = rpc_sync((*c)[0], "worker1", kAgain, &mul, y, y);
    const int second = cut(from, to);
    context.backward({z.sum()});
    expect_equal(context.gradient(x), (2 * w * w * x).detach());
    expect_equal(holder.rpc_sync(&Holder::gradient).at(0), (2 * w * x * x).detach());
    cuts[0] += plan->hits(first);
    cuts[1] += plan->hits(second);
    plan->clear();
  }
  EXPECT_EQ(cuts[0], 20);
  EXPECT_EQ(cuts[1], 20);
  EXPECT_EQ((*c)[0].get_worker_info("worker1").incarnation, before);
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistAgain, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
