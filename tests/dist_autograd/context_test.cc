// Contexts and what they record: DA-1 to DA-16.

#include <thread>

#include "torch/autograd.h"
#include "torch/types.h"
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
  expect_error(error_of([&] { autograd_gradients((*c)[0], *ids.begin()); }), ErrorKind::kState,
               {to_string(*ids.begin()), "has been released"});
  expect_nothing_left(*c);
}

TEST_P(DistContext, DA_2_nested_context) {
  auto c = make({.size = 2});
  {
    DistAutogradContext context((*c)[0]);
    expect_error(error_of([&] { DistAutogradContext second((*c)[0]); }), ErrorKind::kState,
                 {"this thread is in autograd context"});
    // The context of another worker in the same process is another matter.
    DistAutogradContext other((*c)[1]);
    EXPECT_NE(other.id(), context.id());
    EXPECT_EQ(current_autograd_context((*c)[0]), context.id());
  }
  expect_nothing_left(*c);
}

// Every callee is told of the release, by one message, whether or not a gradient could flow.
TEST_P(DistContext, DA_3_worker_ids_recorded) {
  for (const bool wanted : {false, true}) {
    auto c = make();
    const at::Tensor x = torch::ones({2}).set_requires_grad(wanted);
    DistAutogradContext context((*c)[0]);
    for (const int to : {1, 2, 1, 0}) (void)rpc_sync((*c)[0], to, &mul, x, x);
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), wanted ? 5 : 0);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 1);
    context.release().wait();
    EXPECT_EQ(counter((*c)[0], "autograd_releases_sent"), 2);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 0);
    expect_nothing_left(*c);
  }
}

TEST_P(DistContext, DA_4_error_in_context) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor before = rpc_sync((*c)[0], "worker1", &mul, x, x);
    expect_error(error_of([&] { rpc_sync((*c)[0], "worker1", &fail, before); }), ErrorKind::kUser,
                 {"on purpose"});
    using TensorFunction = FunctionRef<at::Tensor(at::Tensor)>;
    expect_error(
        error_of([&] { rpc_sync((*c)[0], "worker2", TensorFunction{"app.nobody"}, before); }),
        ErrorKind::kNotFound, {"app.nobody"});
    expect_error(
        error_of([&] { rpc_sync((*c)[0], "worker1", &mul, x, torch::ones({3}, x.options())); }),
        ErrorKind::kUser, {"size"});
    const at::Tensor after = rpc_sync((*c)[0], "worker2", &mul, before, x);
    context.backward({after.sum()});
    expect_equal(context.gradient(x), (3 * x * x).detach());
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

// The creation carries the arguments, each fetch the value.
TEST_P(DistContext, DA_6_graph_for_builtin_remote_call) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const auto there = remote((*c)[0], "worker1", &mul, x, x);
    const at::Tensor y = there.to_here();
    EXPECT_TRUE(y.requires_grad());
    EXPECT_EQ(y.grad_fn()->name(), "RecvRpcBackward");
    EXPECT_EQ(y.grad_fn()->num_outputs(), 0U);
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_sends"), 1);
    EXPECT_NE(there.to_here().grad_fn(), y.grad_fn());
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_sends"), 2);
  }
  expect_nothing_left(*c);
}

// There and back and there again, all in one context of each.
TEST_P(DistContext, DA_8_graph_for_py_nested_call_itself) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const std::vector<std::string> path{"worker0"};
    const at::Tensor y = rpc_sync((*c)[0], "worker1", &travel, path, x, x);
    for (size_t i : {0, 1}) {
      EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 1);
      EXPECT_EQ(counter((*c)[i], "autograd_sends"), 2);  // a request and an answer
    }
    context.backward({y.sum()});
    expect_equal(context.gradient(x), local((x * x * x * x).sum(), {x})[0]);
  }
  expect_nothing_left(*c);
}

// Those of ten tensors that require grad get an edge, in the order of the list.
TEST_P(DistContext, DA_10_rpc_complex_args) {
  auto c = make({.size = 2});
  std::vector<at::Tensor> list;
  for (int i = 0; i < 10; ++i) list.push_back(leaf({1.0 + i, 2}).set_requires_grad(i % 3 != 1));
  {
    DistAutogradContext context((*c)[0]);
    const auto there = rpc_sync((*c)[0], "worker1", &same_list, list);
    EXPECT_EQ(counter((*c)[0], "autograd_sends"), 1);
    EXPECT_EQ(counter((*c)[1], "autograd_sends"), 1);
    ASSERT_EQ(there.size(), list.size());
    uint32_t edge = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_TRUE(torch::equal(there[i], list[i])) << i;
      ASSERT_EQ(there[i].requires_grad(), list[i].requires_grad()) << i;
      if (!list[i].requires_grad()) continue;
      EXPECT_EQ(there[i].grad_fn(), there[0].grad_fn()) << i;
      EXPECT_EQ(there[i].output_nr(), edge++) << i;
    }
    context.backward({sum_all(there).sum()});
    for (size_t i = 0; i < list.size(); ++i) {
      const at::Tensor got = context.gradient(list[i]);
      ASSERT_EQ(got.defined(), list[i].requires_grad()) << i;
      if (got.defined()) expect_equal(got, torch::full({2}, 1.0 + i, torch::kFloat64));
    }
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

// A release is sent again until it has arrived, on every way that it takes.
TEST_P(DistContext, DA_14_context_cleanup_tensor_with_grad) {
  auto plan = std::make_shared<FaultPlan>(3);
  auto c = make({.plan = plan});
  const at::Tensor x = leaf({1, 2});
  DistAutogradContext context((*c)[0]);
  const std::vector<std::string> path{"worker2"};
  (void)rpc_sync((*c)[0], "worker1", &travel, path, x, x);
  std::vector<int> rules;
  for (const char* from : {"worker0", "worker1"}) {
    rules.push_back(plan->add(
        {.fault = Fault::kFailBefore, .kind = FrameKind::kRequest, .from = from, .times = 3}));
  }
  context.release().wait();
  for (const int rule : rules) EXPECT_GE(plan->hits(rule), 3);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 0);
  expect_nothing_left(*c);
}

TEST_P(DistContext, DA_16_debug_info) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  StuckWayBack stuck;
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor slow = rpc_sync((*c)[0], "worker1", &slow_way_back, x);
    const at::Tensor loss = rpc_sync((*c)[0], "worker2", &mul, slow, slow).sum();
    const auto info = (*c)[0].debug_info();
    EXPECT_EQ(info.at("num_autograd_contexts"), 1);
    EXPECT_EQ(info.at("num_current_backward_passes"), 0);
    std::thread other([&] { context.backward({loss}); });
    stuck.wait_reached();
    EXPECT_EQ(counter((*c)[0], "num_current_backward_passes"), 1);
    EXPECT_EQ(counter((*c)[1], "num_current_backward_passes"), 1);
    stuck.open();
    other.join();
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 1);
      EXPECT_EQ(counter((*c)[i], "num_current_backward_passes"), 0);
    }
    EXPECT_EQ(counter((*c)[0], "autograd_leaves"), 1);
  }
  expect_nothing_left(*c);
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

// The root is the worker that serves a call of the context's creator; the gradients are the same.
TEST_P(DistContext, DEF_32_backward_from_a_handler_on_its_callers_context) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    DistAutogradContext context((*c)[0]);
    rpc_sync((*c)[0], "worker1", &backward_here, x, y * 2);
    expect_equal(context.gradient(x), y.detach() * 2);
    expect_equal(context.gradient(y), x.detach() * 2);
    // Two more, of this worker and of the handler again: all are added up.
    context.backward({rpc_sync((*c)[0], "worker1", &mul, x, x).sum()});
    rpc_sync((*c)[0], "worker1", &backward_here, x, y);
    expect_equal(context.gradient(x), y.detach() * 3 + x.detach() * 2);
    const Status wrong = try_backward((*c)[0], context.id(), {});
    EXPECT_EQ(error_kind(wrong), ErrorKind::kInvalidArgument) << wrong;
    AutogradContextId unknown = context.id();
    unknown.counter += 100;
    const Status nowhere = try_backward((*c)[1], unknown, {x.sum()});
    EXPECT_EQ(error_kind(nowhere), ErrorKind::kNotFound) << nowhere;
    // The caller gets an error of its callee's backward as it gets any other.
    const Status failed = try_rpc_sync((*c)[0], "worker1", &backward_here, x.detach(), y.detach());
    EXPECT_NE(std::string(failed.message()).find("does not require grad"), std::string::npos)
        << failed;
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
