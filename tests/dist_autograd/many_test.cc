// Gradients by the ten thousand: what is said of them does not fit into a frame's header.

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

class AutogradMany : public DistAutogradTest {};

TEST_P(AutogradMany, DEF_22_backward_of_50000_scalar_results) {
  constexpr int64_t kMany = fewer(50'000, 9'000);
  auto c = make({.size = 2});
  const at::Tensor x = torch::rand({kMany}, torch::kFloat64).set_requires_grad(true);
  {
    DistAutogradContext context((*c)[0]);
    const auto there = rpc_sync((*c)[0], "worker1", &same_list, x.unbind());
    ASSERT_EQ(there.size(), static_cast<size_t>(kMany));
    const at::Tensor y = torch::stack(there);
    context.backward({(y * y).sum()});
    expect_equal(context.gradient(x), 2 * x.detach());
  }
  expect_nothing_left(*c);
}

// 6,000 gradients in one message.
TEST_P(AutogradMany, DEF_22_backward_of_24_calls_with_250_small_tensors_each) {
  auto c = make({.size = 2});
  const at::Tensor x = torch::rand({24, 250, 3, 3}, torch::kFloat64).set_requires_grad(true);
  {
    DistAutogradContext context((*c)[0]);
    at::Tensor sum = torch::zeros({}, torch::kFloat64);
    for (int64_t i = 0; i < 24; ++i) {
      const at::Tensor y = torch::stack(rpc_sync((*c)[0], "worker1", &same_list, x[i].unbind()));
      sum = sum + (y * y).sum();
    }
    context.backward({sum});
    expect_equal(context.gradient(x), 2 * x.detach());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, AutogradMany, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
