// DEF_27: how deep a graph may be.

#include <cstdlib>

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistDeep : public DistAutogradTest {};

// Each result is the argument of the next call, and nothing lies between them.
TEST_P(DistDeep, DEF_27_calls_to_oneself_one_after_another) {
  const char* const told = std::getenv("WEFT_AUTOGRAD_SELF_CALLS");
  const int calls = told == nullptr ? 50'000 : std::atoi(told);
  auto c = make({.size = 1});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor x = leaf({1, 2});
    at::Tensor y = x * 3;
    for (int i = 0; i < calls; ++i) y = rpc_sync((*c)[0], "worker0", &identity, y);
    context.backward({y.sum()});
    expect_equal(context.gradient(x), torch::full_like(x, 3).detach());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Inproc, DistDeep, ::testing::Values(nets()[0]), net_name);

}  // namespace
}  // namespace weft::testing
