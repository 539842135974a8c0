// Contexts: DA-1 to DA-16.

#include "torch/torch.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistContext : public DistAutogradTest {};

TEST_P(DistContext, DA_1_autograd_context) {
  auto c = make({.size = 1});
  std::set<AutogradContextId> ids;
  for (int i = 0; i < 200; ++i) {
    DistAutogradContext context((*c)[0]);
    EXPECT_EQ(context.id().creator, key_of((*c)[0].info()));
    EXPECT_TRUE(ids.insert(context.id()).second);
    EXPECT_EQ(current_autograd_context((*c)[0]), context.id());
    EXPECT_TRUE(autograd_gradients((*c)[0], context.id()).empty());
  }
  EXPECT_FALSE(current_autograd_context((*c)[0]).has_value());
  expect_error(error_of([&] { autograd_gradients((*c)[0], *ids.begin()); }), ErrorKind::kNotFound,
               {"Could not find autograd context with id", "worker0"});
  expect_nothing_left(*c);
}

TEST_P(DistContext, DA_2_nested_context) {
  auto c = make({.size = 2});
  {
    DistAutogradContext context((*c)[0]);
    expect_error(error_of([&] { DistAutogradContext second((*c)[0]); }), ErrorKind::kState,
                 {"this thread is in autograd context"});
    // Of another worker in the same process it is another matter.
    DistAutogradContext other((*c)[1]);
    EXPECT_NE(other.id(), context.id());
    EXPECT_EQ(current_autograd_context((*c)[0]), context.id());
  }
  expect_nothing_left(*c);
}

TEST_P(DistContext, DA_9_no_graph_with_tensors_not_require_grad) {
  auto c = make();
  const at::Tensor x = torch::ones({2});
  {
    DistAutogradContext context((*c)[0]);
    EXPECT_FALSE(rpc_sync((*c)[0], "worker1", &mul, x, x).requires_grad());
    EXPECT_TRUE(rpc_sync((*c)[0], "worker1", &in_context));
    EXPECT_EQ(counter((*c)[1], "num_autograd_contexts"), 1);
    EXPECT_EQ(counter((*c)[2], "num_autograd_contexts"), 0);
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 0);
    EXPECT_EQ(counter((*c)[1], "autograd_sends"), 0);
  }
  expect_nothing_left(*c);
}

TEST_P(DistContext, DA_5_graph_for_builtin_call_and_DA_7_graph_for_py_nested_call) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const std::vector<std::string> path{"worker2"};
    const at::Tensor y = rpc_sync((*c)[0], "worker1", &travel, path, x, x);
    EXPECT_TRUE(y.requires_grad());
    EXPECT_EQ(y.grad_fn()->name(), "RecvRpcBackward");
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_sends"), 2);
    EXPECT_EQ(counter((*c)[2], "autograd_sends"), 1);
  }
  expect_nothing_left(*c);
}

TEST_P(DistContext, ALocalBackwardOfAReceivedTensorSaysWhatToDo) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor y = rpc_sync((*c)[0], "worker1", &mul, x, x);
    expect_error(error_of([&] { y.sum().backward(); }), ErrorKind::kState,
                 {"received from", "call backward() of the context"});
  }
  expect_nothing_left(*c);
}

TEST_P(DistContext, DA_13_context_cleanup_nested_rpc_and_DA_12_context_cleanup_no_tensors) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  DistAutogradContext context((*c)[0]);
  const std::vector<std::string> path{"worker2"};
  (void)rpc_sync((*c)[0], "worker1", &travel, path, x, x);
  EXPECT_EQ(counter((*c)[2], "num_autograd_contexts"), 1);
  context.release().wait();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 0);
  // Afterwards calls are ordinary ones.
  EXPECT_FALSE(rpc_sync((*c)[0], "worker1", &in_context));
  expect_error(error_of([&] { context.backward({x.sum()}); }), ErrorKind::kState, {"released"});
}

TEST_P(DistContext, DA_15_thread_local_context_id) {
  auto c = make();
  {
    DistAutogradContext context((*c)[0]);
    auto first = rpc_async((*c)[0], "worker1", &in_context);
    auto second =
        first.then([&c](bool was) { return was && rpc_sync((*c)[0], "worker2", &in_context); });
    EXPECT_TRUE(second.wait());
    bool joined = false;
    bool outside = true;
    std::thread other([&] {
      outside = rpc_sync((*c)[0], "worker1", &in_context);
      const AutogradContextGuard guard(context);
      joined = rpc_sync((*c)[0], "worker1", &in_context);
    });
    other.join();
    EXPECT_TRUE(joined);
    EXPECT_FALSE(outside);
  }
  expect_nothing_left(*c);
}

TEST_P(DistContext, NothingIsRecordedWithoutGradMode) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(rpc_sync((*c)[0], "worker1", &mul, x, x).requires_grad());
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 0);
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistContext, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
