// clip_grad_norm over workers, and gradients written to `.grad`.

#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <thread>

#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

using DistClip = DistAutogradTest;

// Leaves at three workers, the third reached through the second only.
struct Three {
  at::Tensor x;
  std::vector<RRef<Holder>> holders;
  std::vector<at::Tensor> local;
};

Three make_three(Cluster& c) {
  Three t;
  t.x = torch::tensor({3.0, -4.0}, torch::kFloat64).set_requires_grad(true);
  t.local.push_back(t.x.detach().clone().set_requires_grad(true));
  for (int i = 1; i < 3; ++i) {
    const at::Tensor w = torch::tensor({1.0 + i, 2.0}, torch::kFloat64);
    t.holders.push_back(remote<Holder>(c[0], i, w));
    t.local.push_back(w.clone().set_requires_grad(true));
  }
  return t;
}

class DistClipNorms : public DistClip {
 protected:
  void compare(double max_norm, double p) {
    auto c = make();
    Three t = make_three(*c);
    const at::Tensor local_loss = (t.local[0] * t.local[1] * t.local[2]).sum();
    local_loss.backward();
    const double want =
        torch::nn::utils::clip_grad_norm_(t.local, max_norm, p, /*error_if_nonfinite=*/true);
    {
      DistAutogradContext context((*c)[0]);
      const at::Tensor y = t.holders[0].rpc_sync(&Holder::times, t.x);
      const at::Tensor z = t.holders[1].rpc_sync(&Holder::times, y);
      context.backward({z.sum()});
      const at::Tensor before = context.gradient(t.x);
      const at::Tensor copy = before.clone();
      const double norm = context.clip_grad_norm(max_norm, {.norm_type = p});
      EXPECT_NEAR(norm, want, 1e-12 * want);
      expect_equal(before, copy);
      expect_close(context.gradient(t.x), t.local[0].grad());
      for (size_t i = 0; i < 2; ++i) {
        expect_close(t.holders[i].rpc_sync(&Holder::gradient).at(0), t.local[i + 1].grad());
      }
      // What comes afterwards is not scaled.
      context.backward({(t.x * 2).sum()});
      expect_close(context.gradient(t.x), t.local[0].grad() + 2);
    }
    expect_nothing_left(*c);
  }
  static void expect_close(const at::Tensor& got, const at::Tensor& want) {
    EXPECT_TRUE(torch::allclose(got, want, 1e-12, 1e-12)) << got << "\n" << want;
  }
};

TEST_P(DistClipNorms, EqualsTheLocalResult) {
  compare(1.5, 2);
  compare(1000, 2);  // nothing to do
  compare(1.5, 1);
  compare(1.5, 3);
  compare(1.5, std::numeric_limits<double>::infinity());
}

TEST_P(DistClip, OneMessageToEachWorkerAndOneMoreWhenItScales) {
  auto c = make();
  Three t = make_three(*c);
  DistAutogradContext context((*c)[0]);
  const at::Tensor y = t.holders[0].rpc_sync(&Holder::times, t.x);
  context.backward({t.holders[1].rpc_sync(&Holder::times, y).sum()});
  const auto sent = [&](const char* name) { return counter((*c)[0], name); };
  context.clip_grad_norm(1e9);
  EXPECT_EQ(sent("autograd_norms_sent"), 2);
  EXPECT_EQ(sent("autograd_scales_sent"), 0);
  context.clip_grad_norm(1);
  EXPECT_EQ(sent("autograd_norms_sent"), 4);
  EXPECT_EQ(sent("autograd_scales_sent"), 2);
}

// While an earlier pass runs, the gradients of one that has ended lie apart from the others.
TEST_P(DistClip, ScalesWhatHasEndedBesideAPassThatRuns) {
  auto c = make();
  Three t = make_three(*c);
  StuckWayBack stuck;
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor slow = rpc_sync((*c)[0], "worker2", &slow_way_back, leaf({1, 2})).sum();
    const at::Tensor loss = t.holders[0].rpc_sync(&Holder::times, t.x).sum();
    std::thread other([&] { context.backward({slow}); });
    stuck.wait_reached();
    context.backward({loss});
    const double norm = context.clip_grad_norm(1);
    EXPECT_NEAR(norm, std::sqrt(33.0), 1e-9);
    const auto there = t.holders[0].rpc_sync(&Holder::gradient);
    stuck.open();
    other.join();
    EXPECT_TRUE(torch::allclose(context.gradient(t.x), t.local[1].detach() / norm, 1e-6, 1e-6));
    ASSERT_EQ(there.size(), 1U);
    EXPECT_TRUE(torch::allclose(there[0], t.x.detach() / norm, 1e-6, 1e-6)) << there[0];
  }
  expect_nothing_left(*c);
}

TEST_P(DistClip, Errors) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  DistAutogradContext context((*c)[0]);
  context.backward(
      {(rpc_sync((*c)[0], "worker1", &mul, x, x) * std::numeric_limits<double>::infinity()).sum()});
  expect_error(error_of([&] { context.clip_grad_norm(1, {.error_if_nonfinite = true}); }),
               ErrorKind::kInvalidArgument, {"norm of order 2", "2 workers", "inf"});
  expect_error(error_of([&] { context.clip_grad_norm(0); }), ErrorKind::kInvalidArgument,
               {"max_norm is 0"});
  expect_error(error_of([&] { context.clip_grad_norm(1, {.norm_type = -1}); }),
               ErrorKind::kInvalidArgument, {"norm_type is -1"});
  context.release().wait();
  expect_error(error_of([&] { context.clip_grad_norm(1); }), ErrorKind::kState, {"released"});
}

TEST_P(DistClip, WriteToGrad) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor other = leaf({5});
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker1", &mul, x, x).sum()});
    EXPECT_FALSE(x.grad().defined());
    context.write_to_grad();
    expect_equal(x.grad(), torch::tensor({2.0, 4.0}, torch::kFloat64));
    EXPECT_FALSE(other.grad().defined());
    // Added, as by backward(), and no alias of what the context has.
    context.write_to_grad();
    expect_equal(x.grad(), torch::tensor({4.0, 8.0}, torch::kFloat64));
    expect_equal(context.gradient(x), torch::tensor({2.0, 4.0}, torch::kFloat64));
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistClip, ::testing::ValuesIn(nets()), net_name);
INSTANTIATE_TEST_SUITE_P(Nets, DistClipNorms, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
