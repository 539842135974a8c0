// LibTorch's anomaly mode over several workers.

#include "torch/autograd.h"
#include "torch/csrc/autograd/anomaly_mode.h"
#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using ::torch::autograd::DetectAnomalyGuard;

// Its gradient at 0 is 0 times infinity.
at::Tensor root_of_nothing(const at::Tensor& x) { return (x * 0).sqrt(); }

class DistAnomaly : public DistAutogradTest {
 protected:
  DistAnomaly() { library_.def("root_of_nothing", &root_of_nothing); }
};

TEST_P(DistAnomaly, NanIsAnErrorThatNamesFunctionAndWorkerAndTheForwardCall) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  {
    const DetectAnomalyGuard guard;
    DistAutogradContext context((*c)[0]);
    const at::Tensor y = rpc_sync((*c)[0], "worker1", &root_of_nothing, x);
    const Status s = error_of([&] { context.backward({y.sum()}); });
    expect_error(s, ErrorKind::kUser,
                 {"on worker 'worker1'", "MulBackward", "returned nan values in its 0th output",
                  "Traceback of forward call", "mul_Scalar"});
    EXPECT_EQ(error_details(s).origin, "worker1");
  }
  // Off, it is a gradient like any other.
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker1", &root_of_nothing, x).sum()});
    EXPECT_TRUE(context.gradient(x).isnan().all().item<bool>());
  }
  expect_nothing_left(*c);
}

TEST_P(DistAnomaly, AnErrorCarriesTheForwardCallOfItsNode) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  for (const bool on : {true, false}) {
    std::optional<DetectAnomalyGuard> guard;
    if (on) guard.emplace(/*check_nan=*/false);
    DistAutogradContext context((*c)[0]);
    const at::Tensor bad = rpc_sync((*c)[0], "worker1", &no_way_back, x);
    const Status s = error_of([&] { context.backward({bad.sum()}); });
    expect_error(s, ErrorKind::kUser, {"there is no way back", "on worker 'worker1'"});
    EXPECT_EQ(std::string(s.message()).find("Traceback of forward call") != std::string::npos, on)
        << s;
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistAnomaly, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
