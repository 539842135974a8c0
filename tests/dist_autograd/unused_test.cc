// Calls that no loss needs: X5, DA-37.

#include "torch/types.h"
#include "weft/dist_autograd/internal/service.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistUnused : public DistAutogradTest {};

TEST_P(DistUnused, DA_37_backward_unused_send_function_and_X5_unused_calls) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    // The loss does not cross at all.
    DistAutogradContext context((*c)[0]);
    (void)rpc_sync((*c)[0], "worker1", &mul, x, y);
    context.backward({(x * y).sum()});
    expect_equal(context.gradient(x), y.detach());
    // LIVE-8
    EXPECT_EQ(counter((*c)[0], "autograd_discovers_sent"), 0);
    EXPECT_EQ(counter((*c)[1], "autograd_gradients_sent"), 0);
  }
  {
    // One of two calls, the other to another worker; then of two to the same.
    DistAutogradContext context((*c)[0]);
    const at::Tensor used = rpc_sync((*c)[0], "worker1", &mul, x, y);
    (void)rpc_sync((*c)[0], "worker2", &add, x, y);
    (void)rpc_sync((*c)[0], "worker1", &add, x, y);
    context.backward({used.sum()});
    expect_equal(context.gradient(x), y.detach());
    expect_equal(context.gradient(y), x.detach());
    EXPECT_EQ(counter((*c)[2], "autograd_gradients_sent"), 0);
    EXPECT_EQ(counter((*c)[1], "autograd_gradients_sent"), 1);
  }
  expect_nothing_left(*c);
}

// A message that no loss needs shares nodes with one that they do: what goes out there must wait
// for the one and not for the other.
TEST_P(DistUnused, X5_an_unused_call_that_shares_nodes_with_a_used_one) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor shared = x * y;
    const at::Tensor used = rpc_sync((*c)[0], "worker1", &mul, shared, y);
    (void)rpc_sync((*c)[0], "worker2", &mul, shared, x);
    const auto want = local(((x * y) * y).sum(), {x, y});
    context.backward({used.sum()});
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
  }
  expect_nothing_left(*c);
}

TEST_P(DistUnused, X5_two_losses_over_different_calls_one_after_the_other) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor first = rpc_sync((*c)[0], "worker1", &mul, x, y).sum();
    const at::Tensor second = rpc_sync((*c)[0], "worker2", &add, x, y).sum();
    context.backward({first});
    expect_equal(context.gradient(x), y.detach());
    context.backward({second});
    expect_equal(context.gradient(x), (y + 1).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistUnused, X5_a_hundred_calls_of_which_one_is_used) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    DistAutogradContext context((*c)[0]);
    std::vector<at::Tensor> results;
    for (int i = 0; i < 100; ++i) {
      results.push_back(rpc_sync((*c)[0], 1 + i % 2, &mul, x, y * (i + 1)));
    }
    context.backward({results[41].sum()});
    expect_equal(context.gradient(x), (y * 42).detach());
    EXPECT_EQ(counter((*c)[1], "autograd_gradients_sent"), 0);
    EXPECT_EQ(counter((*c)[2], "autograd_gradients_sent"), 1);
  }
  expect_nothing_left(*c);
}

// What an unused call cannot reach runs at once, and its gradients go with the names: besides that
// message worker1 gets `close` alone.
TEST_P(DistUnused, LIVE_3_what_an_unused_call_cannot_reach_does_not_wait) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor used = rpc_sync((*c)[0], "worker1", &mul, x, y);
    (void)rpc_sync((*c)[0], "worker1", &add, x, y);
    const int64_t before = counter((*c)[1], "requests_served");
    context.backward({used.sum()});
    expect_equal(context.gradient(x), y.detach());
    EXPECT_EQ(counter((*c)[0], "autograd_gradients_sent"), 1);
    EXPECT_EQ(counter((*c)[0], "autograd_closes_sent"), 1);
    eventually([&] { return counter((*c)[1], "requests_served") == before + 2; }, "two messages");
  }
  expect_nothing_left(*c);
}

TEST_P(DistUnused, FastModeGivesTheSameGradientsWhenAllIsUsed) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const at::Tensor y = leaf({3, 4});
  const auto want = local(((x * y) * (x + y) * y).sum(), {x, y});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor p = rpc_sync((*c)[0], "worker1", &mul, x, y);
    const at::Tensor q = rpc_sync((*c)[0], "worker2", &add, x, y);
    const at::Tensor r = rpc_sync((*c)[0], "worker0", &mul, p, q);
    const BackwardOptions fast{.retain_graph = true, .mode = BackwardMode::kFast};
    context.backward({rpc_sync((*c)[0], "worker2", &mul, r, y).sum()}, fast);
    expect_equal(context.gradient(x), want[0]);
    expect_equal(context.gradient(y), want[1]);
    EXPECT_EQ(counter((*c)[0], "autograd_closes_sent"), 0);
  }
  expect_nothing_left(*c);
}

// LIVE-4: names that were overtaken by the gradients which they announce come when the root's part
// is done, but not the pass. To one in exact mode no correct peer says such a thing.
TEST_P(DistUnused, NamesOfTheFastModeThatComeLate) {
  library_.def("own", [](int64_t n) {
    return slow_way_back(torch::ones({n}, torch::kFloat64).set_requires_grad(true));
  });
  auto c = make({.size = 2});
  for (const BackwardMode mode : {BackwardMode::kFast, BackwardMode::kExact}) {
    StuckWayBack stuck;
    DistAutogradContext context((*c)[0]);
    const at::Tensor loss =
        rpc_sync((*c)[0], "worker1", FunctionRef<at::Tensor(int64_t)>{"app.own"}, 2).sum();
    Status ended;
    const auto root = make_system_runtime()->spawn(
        "root", [&] { ended = context.try_backward({loss}, {.mode = mode}); });
    stuck.wait_reached();
    const internal::PassId pass{context.id(), key_of((*c)[0].info()), 1};
    UntypedCall call;
    call.method = std::string(internal::kAdvanceMethod);
    call.signature = internal::kAdvanceSignature;
    call.arguments = value_or_throw(internal::pack_advance(
        {pass, absl::Seconds(5), {.fast = true, .named = {{1, {0}}}}, {}, 0, {}}));
    Promise<void> answered;
    start_call((*c)[1], "worker0", std::move(call),
               [&answered](StatusOr<Payload> answer) { answered.try_set(answer.status()); });
    const Status answer = answered.future().try_wait();
    stuck.open();
    root->join();
    if (mode == BackwardMode::kFast) {
      EXPECT_TRUE(answer.ok()) << answer;
      EXPECT_TRUE(ended.ok()) << ended;
    } else {
      expect_error(answer, ErrorKind::kProtocol, {"has all that it needs"});
      expect_error(ended, ErrorKind::kProtocol, {"has all that it needs"});
    }
  }
  expect_nothing_left(*c);
}

// As the peer's only mode, but bounded, and it says what it waited for.
TEST_P(DistUnused, FastModeWaitsForAnUnusedCallUntilItsDeadline) {
  auto c = make({.size = 2});
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor used = rpc_sync((*c)[0], "worker1", &mul, x, x);
    (void)rpc_sync((*c)[0], "worker1", &add, x, x);
    const Status status =
        context.try_backward({used.sum()}, {.retain_graph = true,
                                            .deadline = std::chrono::milliseconds(200),
                                            .mode = BackwardMode::kFast});
    expect_error(status, ErrorKind::kDeadline, {"worker1"});
    for (size_t i : {0, 1}) {
      eventually([&] { return counter((*c)[i], "num_current_backward_passes") == 0; }, "no pass");
    }
    context.backward({used.sum()});
    expect_equal(context.gradient(x), (2 * x).detach());
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistUnused, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
