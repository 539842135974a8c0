// Errors reach the root and everybody else: DA-38 to DA-46, X10, X11.

#include "torch/torch.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistFailure : public DistAutogradTest {
 protected:
  static void expect_no_pass(Cluster& c) {
    for (size_t i = 0; i < c.size(); ++i) {
      EXPECT_EQ(counter(c[i], "num_current_backward_passes"), 0) << "worker" << i;
    }
  }
};

TEST_P(DistFailure, DA_39_backward_invalid_args) {
  auto c = make({.size = 1});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor x = leaf({1, 2});
    const auto error = [&](const std::vector<at::Tensor>& losses,
                           const BackwardOptions& options = {}) {
      return error_of([&] { context.backward(losses, options); });
    };
    const ErrorKind kind = ErrorKind::kInvalidArgument;
    expect_error(error({}), kind, {"no losses"});
    expect_error(error({torch::ones({1})}), kind, {"loss 0", "does not require grad"});
    expect_error(error({x.sum(), x}), kind, {"loss 1", "[2]", "single element"});
    expect_error(error({at::Tensor()}), kind, {"loss 0", "undefined"});
    expect_error(error({x}, {.gradients = {torch::ones({3}, torch::kFloat64)}}), kind,
                 {"[2]", "[3]"});
    expect_error(error({x}, {.gradients = {torch::ones({2}, torch::kFloat32)}}), kind,
                 {"CPUDoubleType", "CPUFloatType"});
    expect_error(error({x}, {.gradients = {x, x}}), kind, {"1 losses", "2 gradients"});
  }
  expect_nothing_left(*c);
}

TEST_P(DistFailure, DA_41_backward_autograd_engine_error_and_X11_failure_tells_everyone) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor direct = rpc_sync((*c)[0], "worker2", &mul, x, x);
    const at::Tensor bad =
        rpc_sync((*c)[0], "worker1", &via_no_way_back, "worker2", x);
    const Status failed =
        error_of([&] { context.backward({(direct + bad).sum()}, {.retain_graph = true}); });
    expect_error(failed, ErrorKind::kUser, {"there is no way back", "on worker 'worker2'"});
    EXPECT_EQ(error_details(failed).origin, "worker2");
    expect_no_pass(*c);
    EXPECT_TRUE(context.gradients().empty());
    // The same context, with the fault gone: nothing of the failed pass is left.
    context.backward({direct.sum()}, {.retain_graph = true});
    expect_equal(context.gradient(x), (2 * x).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistFailure, DA_45_multiple_backward_with_errors) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor good = rpc_sync((*c)[0], "worker1", &mul, x, x);
    const at::Tensor bad = rpc_sync((*c)[0], "worker1", &no_way_back, good);
    for (int i = 0; i < 50; ++i) {
      expect_error(error_of([&] { context.backward({bad.sum()}, {.retain_graph = true}); }),
                   ErrorKind::kUser, {"there is no way back"});
    }
    expect_no_pass(*c);
    context.backward({good.sum()});
    expect_equal(context.gradient(x), (2 * x).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistFailure, ATensorOfAnotherContextIsRefused) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  at::Tensor old;
  {
    DistAutogradContext first((*c)[0]);
    old = rpc_sync((*c)[0], "worker1", &mul, x, x);
  }
  {
    DistAutogradContext context((*c)[0]);
    expect_error(error_of([&] { context.backward({(old * x).sum()}); }),
                 ErrorKind::kInvalidArgument, {"received from", "one context"});
    expect_no_pass(*c);
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistFailure, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
