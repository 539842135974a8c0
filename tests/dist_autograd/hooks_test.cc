// Hooks, buffers, and many at once: DA-32 to DA-36, DA-40.

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch/autograd.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistHooks : public DistAutogradTest {};

// Each once, in LibTorch's order, on sums and not on parts of them.
TEST_P(DistHooks, DA_33_backward_verify_hooks) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  std::vector<std::string> calls;
  const auto note = [&calls](std::string name) {
    return [&calls, name](const at::Tensor& g) {
      calls.push_back(name + " " + std::to_string(g.sum().item<double>()));
    };
  };
  x.register_hook(note("leaf"));
  const auto run = [&](const std::function<at::Tensor(const at::Tensor&)>& there) {
    calls.clear();
    const at::Tensor y = x * 2;
    y.register_hook(note("y"));
    const at::Tensor z = there(y);
    z.register_hook(note("z"));
    const at::Tensor w = z + there(y);
    w.register_hook([&calls](const at::Tensor& g) {
      calls.emplace_back("w doubles");
      return g * 2;
    });
    return w.sum();
  };
  const auto grad = torch::autograd::grad({run([](const at::Tensor& t) { return t * t; })}, {x});
  const std::vector<std::string> want = calls;
  ASSERT_EQ(want.size(), 4U);
  {
    DistAutogradContext context((*c)[0]);
    context.backward(
        {run([&](const at::Tensor& t) { return rpc_sync((*c)[0], "worker1", &mul, t, t); })});
    EXPECT_EQ(calls, want);
    expect_equal(context.gradient(x), grad[0]);
  }
  expect_nothing_left(*c);
}

// Notes what `.grad` of the tensor that it is given is, and puts `leaves` in its place.
class PostAccumulate : public torch::autograd::PostAccumulateGradHook {
 public:
  PostAccumulate(std::vector<double>* seen, std::function<at::Tensor(const at::Tensor&)> leaves)
      : seen_(seen), leaves_(std::move(leaves)) {}
  void operator()(const at::Tensor& tensor) override {
    seen_->push_back(tensor.grad().sum().item<double>());
    tensor.mutable_grad() = leaves_(tensor);
  }

 private:
  std::vector<double>* const seen_;
  const std::function<at::Tensor(const at::Tensor&)> leaves_;
};

// As torch's, once for each backward, when all that the pass has for the leaf is added up; `.grad` of
// the leaf itself is not touched. What the hook leaves is the gradient, as in a local backward.
TEST_P(DistHooks, DEF_32_post_accumulate_hooks_run) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  std::vector<double> seen;
  torch::autograd::impl::set_post_acc_grad_hooks(
      x,
      std::make_unique<PostAccumulate>(&seen, [](const at::Tensor& t) { return t.grad() * 10; }));
  // A step in the hook, after which the gradient is let go.
  torch::autograd::impl::set_post_acc_grad_hooks(
      y, std::make_unique<PostAccumulate>(&seen, [](const at::Tensor& t) {
        t.detach().sub_(t.grad());
        return at::Tensor();
      }));
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor there =
        rpc_sync((*c)[0], "worker1", &mul, x, x) + rpc_sync((*c)[0], "worker2", &add, x, y);
    context.backward({there.sum()}, {.retain_graph = true});
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, (std::vector<double>{2, 8}));  // of y; of x: 2x + 1, as one sum
    expect_equal(context.gradient(x), (x.detach() * 2 + 1) * 10);
    EXPECT_FALSE(context.gradient(y).defined());
    expect_equal(y.detach(), torch::tensor({2.0, 3.0}, y.options()));
    EXPECT_FALSE(x.grad().defined());
    EXPECT_FALSE(y.grad().defined());
    context.backward({there.sum()});
    EXPECT_EQ(seen.size(), 4U);
    expect_equal(context.gradient(x), (x.detach() * 2 + 1) * 20);
  }
  expect_nothing_left(*c);
}

// What it throws is the pass's error.
TEST_P(DistHooks, DEF_32_a_post_accumulate_hook_that_throws_fails_the_pass) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  std::vector<double> seen;
  torch::autograd::impl::set_post_acc_grad_hooks(
      x, std::make_unique<PostAccumulate>(&seen, [](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("the hook does not want it");
      }));
  {
    DistAutogradContext context((*c)[0]);
    const Status failed = context.try_backward({rpc_sync((*c)[0], "worker1", &mul, x, x).sum()});
    EXPECT_NE(std::string(failed.message()).find("the hook does not want it"), std::string::npos)
        << failed;
    EXPECT_FALSE(context.gradient(x).defined());
  }
  expect_nothing_left(*c);
}

class Counter : public torch::autograd::FunctionPostHook {
 public:
  explicit Counter(int* count) : count_(count) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& out,
                                            const torch::autograd::variable_list& in) override {
    if (!in.empty() && in[0].defined()) ++*count_;
    return out;
  }

 private:
  int* const count_;
};

TEST_P(DistHooks, DA_34_post_hooks) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const auto accumulator = torch::autograd::impl::grad_accumulator(x);
  int count = 0;
  accumulator->add_post_hook(std::make_unique<Counter>(&count));
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = (rpc_sync((*c)[0], "worker1", &mul, x, x) + x).sum();
    context.backward({loss}, {.retain_graph = true});
    EXPECT_EQ(count, 1);
    context.backward({loss});
    EXPECT_EQ(count, 2);
  }
  expect_nothing_left(*c);
}

TEST_P(DistHooks, DA_36_embedding_bag_with_no_grad_tensors) {
  auto c = make();
  const at::Tensor table = torch::ones({10, 4}, torch::kFloat64).set_requires_grad(true);
  const at::Tensor ids = torch::tensor({1, 2, 2, 7}, torch::kLong);
  const auto lookup = [&] { return torch::embedding(table, ids, -1, false, /*sparse=*/true); };
  const auto want = local((lookup() * 2).sum(), {table});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &add, lookup(), lookup()).sum();
    context.backward({loss}, {.retain_graph = true});
    context.backward({loss});
    const at::Tensor got = context.gradient(table);
    ASSERT_TRUE(got.is_sparse());
    expect_equal(got.to_dense(), want[0].to_dense() * 2);
  }
  expect_nothing_left(*c);
}

// The gradient of a sparse tensor that has crossed is sparse, too.
TEST_P(DistHooks, ASparseTensorCrosses) {
  auto c = make();
  const at::Tensor indices = torch::tensor({{0, 2}}, torch::kLong);
  const at::Tensor values = leaf({3, 4});
  const auto make_sparse = [&] { return at::sparse_coo_tensor(indices, values, {4}); };
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor there = rpc_sync((*c)[0], "worker1", &add, make_sparse(), make_sparse());
    context.backward({there.to_dense().sum()});
    expect_equal(context.gradient(values), torch::full({2}, 2.0, torch::kFloat64));
  }
  expect_nothing_left(*c);
}

TEST_P(DistHooks, DA_40_backward_no_grad_on_tensor) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum();
    context.backward({loss}, {.retain_graph = true});
    EXPECT_FALSE(x.grad().defined());
    (x * 5).sum().backward();
    const at::Tensor before = x.grad().clone();
    context.backward({loss});
    expect_equal(x.grad(), before);
  }
  expect_nothing_left(*c);
}

// A buffer with no other holder becomes the gradient; one that a message holds as well is copied,
// so that a hook which writes to the gradient changes nothing elsewhere.
TEST_P(DistHooks, DA_35_no_grad_copy) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const void* made = nullptr;
  {
    DistAutogradContext context((*c)[0]);
    const unsigned hook = x.register_hook([&made](const at::Tensor& g) {
      at::Tensor own = g.clone();
      made = own.data_ptr();
      return own;
    });
    context.backward({(x * 1).sum()});
    EXPECT_EQ(context.gradient(x).data_ptr(), made);
    x.remove_hook(hook);
  }
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor v = x.view({2, 1});
    const at::Tensor there = rpc_sync((*c)[0], "worker1", &identity, v);
    context.backward({there.sum(), x.sum(), y.sum()});
    const at::Tensor gx = context.gradient(x);
    const at::Tensor gy = context.gradient(y);
    gx.mul_(10);
    expect_equal(gy, torch::ones({2}, torch::kFloat64));
    expect_equal(gx, torch::full({2}, 20.0, torch::kFloat64));
  }
  expect_nothing_left(*c);
}

// LIVE-7: passes of many contexts, from all workers against each other, and several at once in one.
TEST_P(DistHooks, DA_32_async_dist_autograd) {
  auto c = make();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      Worker& me = (*c)[static_cast<size_t>(t % 3)];
      for (int i = 0; i < 20; ++i) {
        const at::Tensor x = leaf({1.0 + t, 2.0 + i});
        DistAutogradContext context(me);
        const at::Tensor loss = rpc_sync(me, (t + 1 + i) % 3, &mul, x, x).sum();
        context.backward({loss});
        if (!torch::equal(context.gradient(x), (2 * x).detach())) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  expect_nothing_left(*c);
}

TEST_P(DistHooks, LIVE_7_passes_of_one_context_at_once) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss = rpc_sync((*c)[0], "worker1", &mul, x, x).sum();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 10; ++i) context.backward({loss}, {.retain_graph = true});
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect_equal(context.gradient(x), (2 * x * 40).detach());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistHooks, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
