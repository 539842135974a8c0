// Backward is right: DA-17 to DA-30. Each case is compared with plain backward() of the same sum.

#include <memory>
#include <utility>

#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/utils.h"
#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistBackward : public DistAutogradTest {};

TEST_P(DistBackward, DA_17_backward_simple) {
  auto c = make();
  const at::Tensor x = leaf({1, 2, 3});
  const at::Tensor y = leaf({4, 5, 6});
  const auto want = local((x * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker1", &mul, x, y).sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
    EXPECT_EQ(context.gradients().size(), 2U);
    EXPECT_FALSE(x.grad().defined());
    // LIVE-6: there and back.
    EXPECT_EQ(counter((*c)[0], "autograd_discovers_sent"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_discovers_sent"), 1);
    EXPECT_EQ(counter((*c)[0], "autograd_gradients_sent"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_gradients_sent"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_dones_sent"), 1);
    EXPECT_EQ(counter((*c)[0], "autograd_closes_sent"), 0);
  }
  expect_nothing_left(*c);
}

// Up to 512 KiB they go with the names; a larger one follows.
TEST_P(DistBackward, AGradientGoesWithTheNamesUnlessItIsLarge) {
  auto c = make({.size = 2});
  for (const int64_t n : {60'000, 70'000}) {
    const at::Tensor x = torch::rand({n}, torch::kFloat64).set_requires_grad(true);
    {
      DistAutogradContext context((*c)[0]);
      const at::Tensor y = rpc_sync((*c)[0], "worker1", &mul, x, x);
      const auto before = counter((*c)[1], "requests_served");
      context.backward({y.sum()});
      expect_equal(context.gradient(x), 2 * x.detach());
      eventually(
          [&] { return counter((*c)[1], "requests_served") >= before + (n > 65536 ? 2 : 1); },
          "what was sent");
      EXPECT_EQ(counter((*c)[1], "requests_served"), before + (n > 65536 ? 2 : 1)) << n;
    }
    expect_nothing_left(*c);
  }
}

TEST_P(DistBackward, DA_17_backward_simple_self) {
  auto c = make({.size = 1});
  const at::Tensor x = leaf({1, 2, 3});
  const at::Tensor y = leaf({4, 5, 6});
  const auto want = local((x * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker0", &mul, x, y).sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
    EXPECT_EQ(counter((*c)[0], "autograd_discovers_sent"), 0);
    EXPECT_EQ(counter((*c)[0], "autograd_gradients_sent"), 0);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_18_backward_multiple_round_trips) {
  auto c = make();
  const at::Tensor a = leaf({1, 2});
  const at::Tensor b = leaf({3, 4});
  const auto want = local(((a * b) * (a + b) * b).sum(), {a, b});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor p = rpc_sync((*c)[0], "worker1", &mul, a, b);
    const at::Tensor q = rpc_sync((*c)[0], "worker2", &add, a, b);
    const at::Tensor r = rpc_sync((*c)[0], "worker1", &mul, p, q);
    context.backward({rpc_sync((*c)[0], "worker2", &mul, r, b).sum()});
    expect_equal(context.gradient(a), want[0]);
    expect_equal(context.gradient(b), want[1]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_20_backward_different_dtypes_and_DA_19_backward_different_tensor_dims) {
  auto c = make();
  const at::Tensor x = torch::rand({4, 6}, torch::kFloat32).set_requires_grad(true);
  const at::Tensor y = torch::rand({6}, torch::kFloat64).set_requires_grad(true);
  const auto want = local((x * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker1", &mul, x, y).sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_21_backward_multiple_roots) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const auto want = local((x * y).sum() + (x + y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor first = rpc_sync((*c)[0], "worker1", &mul, x, y).sum();
    const at::Tensor second = rpc_sync((*c)[0], "worker2", &add, x, y).sum();
    context.backward({first, second});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_22_backward_multiple_output_tensors) {
  auto c = make();
  const at::Tensor x = leaf({1, 2, 3, 4, 5, 6});
  const auto chunks = x.chunk(3);
  const auto want = local((chunks[0] * chunks[2]).sum(), {x});
  {
    DistAutogradContext context((*c)[0]);
    const auto got = rpc_sync((*c)[0], "worker1", &split, x, 3);
    context.backward({(got[0] * got[2]).sum()});
    expect_equal(context.gradient(x), want[0]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_24_mixed_requires_grad_and_DA_23_backward_unused_tensors) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const at::Tensor z = torch::tensor({5.0, 6.0}, torch::kFloat64);
  const auto want = local((x + 2 * z + 3 * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    const std::vector<at::Tensor> list{x, z, y};
    context.backward({rpc_sync((*c)[0], "worker1", &sum_all, list).sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
    EXPECT_FALSE(context.gradient(z).defined());
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_25_backward_without_rpc) {
  auto c = make({.size = 1});
  const at::Tensor x = leaf({1, 2});
  const auto want = local((x * x).sum(), {x});
  {
    DistAutogradContext context((*c)[0]);
    context.backward({(x * x).sum()});
    expect_equal(context.gradient(x), want[0]);
  }
  expect_nothing_left(*c);
}

// To others, back to where it came from, and to itself.
TEST_P(DistBackward, DA_26_backwards_nested_python_udf) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const at::Tensor there = x * y * y * y * y;
  const auto want = local((there * y * y * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    const std::vector<std::string> path{"worker2", "worker0", "worker0"};
    context.backward({rpc_sync((*c)[0], "worker1", &travel, path, x, y).sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_27_backward_rref) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const auto want = local(((x * y) + y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    auto product = remote((*c)[0], "worker1", &mul, x, y);
    auto sum = remote((*c)[0], "worker2", &add, product.to_here(), y);
    context.backward({sum.to_here().sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_28_trainer_ps) {
  auto c = make();
  const at::Tensor w = torch::tensor({2.0, 3.0}, torch::kFloat64);
  auto holder = remote<Holder>((*c)[2], "worker2", w);
  for (const size_t trainer : {0, 1}) {
    auto held = trainer == 0 ? remote<Holder>((*c)[0], "worker2", w)
                             : remote<Holder>((*c)[1], "worker2", w);
    const at::Tensor x = leaf({1.0 + static_cast<double>(trainer), 2});
    DistAutogradContext context((*c)[trainer]);
    context.backward({held.rpc_sync(&Holder::times, x).sum()});
    expect_equal(context.gradient(x), w);
    const auto there = held.rpc_sync(&Holder::gradient);
    ASSERT_EQ(there.size(), 1U);
    expect_equal(there[0], x.detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_11_grad_only_on_return_value) {
  auto c = make();
  const at::Tensor w = torch::tensor({2.0, 3.0}, torch::kFloat64);
  {
    auto held = remote<Holder>((*c)[0], "worker1", w);
    DistAutogradContext context((*c)[0]);
    context.backward({held.rpc_sync(&Holder::value).sum()});
    const auto there = held.rpc_sync(&Holder::gradient);
    ASSERT_EQ(there.size(), 1U);
    expect_equal(there[0], torch::ones({2}, torch::kFloat64));
    EXPECT_TRUE(context.gradients().empty());
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, DA_29_backward_accumulate_grads_and_DA_31_multiple_backward) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const auto want = local((x * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, y).sum();
    for (int pass = 1; pass <= 20; ++pass) {
      context.backward({loss}, {.retain_graph = true});
      expect_equal(context.gradient(x), want[0] * pass);
    }
    context.backward({loss});
    // Without it, what its nodes had saved is gone now.
    expect_error(error_of([&] { context.backward({loss}); }), ErrorKind::kUser, {"second time"});
    expect_equal(context.gradient(y), want[1] * 21);
  }
  expect_nothing_left(*c);
}

// A node that hears that its variables go gives away what it would copy for a second backward, as LSTMs on GPUs do.
TEST_P(DistBackward, DA_29_ANodeHearsThatItsVariablesGoFromTheLastBackward) {
  class Listening final : public torch::autograd::Node {
   public:
    torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override {
      return std::move(inputs);
    }
    void will_release_variables() override { ++told; }
    int told = 0;
  };
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const auto node = std::make_shared<Listening>();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    const at::Tensor y = x.detach().clone();
    torch::autograd::set_history(y, node);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, y, x).sum();
    for (int pass = 1; pass <= 3; ++pass) {
      context.backward({loss}, {.retain_graph = pass < 3});
      EXPECT_EQ(node->told, pass < 3 ? 0 : 1);
    }
    expect_equal(context.gradient(x), local((x * x).sum(), {x})[0] * 3);
  }
  expect_nothing_left(*c);
}

// Through workers in the middle, whose own leaves add up as well.
TEST_P(DistBackward, DA_30_nested_backward_accumulate_grads) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    DistAutogradContext context((*c)[0]);
    const std::vector<std::string> path{"worker2"};
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &travel, path, x, y).sum();
    for (int pass = 1; pass <= 10; ++pass) {
      context.backward({loss}, {.retain_graph = true});
      expect_equal(context.gradient(x), local((x * y * y * y).sum(), {x})[0] * pass);
    }
    context.backward({loss});
    expect_equal(context.gradient(y), local((x * y * y * y).sum(), {y})[0] * 11);
  }
  expect_nothing_left(*c);
}

TEST_P(DistBackward, AGradientOfALossThatIsNotAScalar) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const at::Tensor g = torch::tensor({10.0, 100.0}, torch::kFloat64);
  {
    DistAutogradContext context((*c)[0]);
    context.backward({rpc_sync((*c)[0], "worker1", &mul, x, y)}, {.gradients = {g}});
    expect_equal(context.gradient(x), (y * g).detach());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistBackward, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
