// Errors reach the root and all participants: DA-38 to DA-46, X10, X11.

#include <thread>

#include "torch/autograd.h"
#include "torch/types.h"
#include "weft/dist_autograd/internal/service.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/tests/dist_autograd/fixture.h"
#include "weft/tests/testing/sanitizers.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

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
    expect_error(error({x.sum()}, {.create_graph = true}), ErrorKind::kUnimplemented,
                 {"create_graph", "not supported"});
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
    const std::vector<std::string> path{"worker2"};
    const at::Tensor bad = rpc_sync((*c)[0], "worker1", &via_no_way_back, path, x);
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

// Through calls of the user that nest: the error names where it was, not whom it passed.
TEST_P(DistFailure, DA_42_backward_python_udf_error) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  const std::vector<std::string> paths[] = {
      {}, {"worker2"}, {"worker2", "worker0"}, {"worker2", "worker1", "worker2"}, {"worker1"}};
  for (const std::vector<std::string>& path : paths) {
    const std::string where = path.empty() ? "worker1" : path.back();
    DistAutogradContext context((*c)[0]);
    const at::Tensor bad = rpc_sync((*c)[0], "worker1", &via_no_way_back, path, x);
    const Status failed = error_of([&] { context.backward({(bad + x).sum()}); });
    expect_error(failed, ErrorKind::kUser, {"there is no way back", "on worker '" + where + "'"});
    EXPECT_EQ(error_details(failed).origin, where);
    expect_no_pass(*c);
    EXPECT_TRUE(context.gradients().empty());
  }
  expect_nothing_left(*c);
}

// No context, whichever side asks: the program by an id, or another worker by a message of a pass.
TEST_P(DistFailure, DA_38_backward_without_context) {
  auto c = make({.size = 2});
  const AutogradContextId unknown{key_of((*c)[0].info()), 100};
  const std::string text = "Could not find autograd context with id: " + to_string(unknown);
  for (size_t i : {0, 1}) {
    expect_error(error_of([&] { autograd_gradients((*c)[i], unknown); }), ErrorKind::kNotFound,
                 {text, (*c)[i].name()});
  }
  const internal::PassId pass{unknown, key_of((*c)[0].info()), 1};
  UntypedCall call;
  call.method = std::string(internal::kAdvanceMethod);
  call.signature = internal::kAdvanceSignature;
  call.arguments = value_or_throw(
      internal::pack_advance({pass, absl::Seconds(5), {.named = {{1, {0}}}}, {}, 0, {}}));
  Promise<void> answered;
  start_call((*c)[0], "worker1", std::move(call),
             [&answered](StatusOr<Payload> answer) { answered.try_set(answer.status()); });
  expect_error(answered.future().try_wait(), ErrorKind::kNotFound, {text, "worker1"});
  // Nor does the message make one.
  expect_nothing_left(*c);
}

TEST_P(DistFailure, BadInput_workers_without_the_service) {
  ClusterOptions o;
  o.size = 2;
  o.net = GetParam();
  o.library = library_;
  o.adjust = [](int i, JoinOptions* join) {
    join->services = {rref_service()};
    if (i == 0) join->services.push_back(dist_autograd_service());
  };
  Cluster c(o);
  expect_error(error_of([&] { DistAutogradContext context(c[1]); }), ErrorKind::kState,
               {"worker1", "dist_autograd_service()"});
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context(c[0]);
    expect_error(error_of([&] { (void)rpc_sync(c[0], "worker1", &mul, x, x); }),
                 ErrorKind::kUnimplemented, {"worker1", "@dist_autograd"});
    EXPECT_EQ(counter(c[0], "autograd_sends"), 0);
    context.release().wait();
  }
  EXPECT_EQ(counter(c[0], "num_autograd_contexts"), 0);
  // Out of a context it is an ordinary call.
  EXPECT_EQ(rpc_sync(c[0], "worker1", &mul, x, x).sizes(), x.sizes());
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

// X10: calls have a second; the backward may take longer.
TEST_P(DistFailure, X10_a_backward_that_takes_longer_than_a_call_may) {
  auto c = make({.rpc_timeout = 1s});
  const at::Tensor x = leaf({1, 2});
  const SlowWayBack slow_back([] {
    const auto runtime = make_system_runtime();
    runtime->make_parker()->park_until(runtime->now() + absl::Milliseconds(1500));
  });
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor slow = rpc_sync((*c)[0], "worker1", &slow_way_back, x);
    const at::Tensor far = rpc_sync((*c)[0], "worker2", &mul, slow, slow);
    context.backward({far.sum()}, {.deadline = 60s});
    expect_equal(context.gradient(x), (8 * x).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistFailure, ThePassHasTheTimeOfACallUnlessItIsGivenAnother) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  StuckWayBack stuck;
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor slow = rpc_sync((*c)[0], "worker1", &slow_way_back, x);
    (*c)[0].set_rpc_timeout(300ms);
    const Status failed = error_of([&] { context.backward({slow.sum()}); });
    expect_error(failed, ErrorKind::kDeadline, {"300ms", "backward 1 of", "waits for"});
    expect_no_pass(*c);
    stuck.open();
    (*c)[0].set_rpc_timeout(60s);
  }
  expect_nothing_left(*c);
}

// X10, the other way: the pass's own deadline ends it, at the root and at the participants.
TEST_P(DistFailure, X10_the_deadline_of_a_pass_ends_it_everywhere) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  StuckWayBack stuck;
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor slow = rpc_sync((*c)[0], "worker1", &slow_way_back, x);
    const at::Tensor far = rpc_sync((*c)[0], "worker2", &mul, slow, slow);
    const Status failed =
        error_of([&] { context.backward({far.sum()}, {.retain_graph = true, .deadline = 300ms}); });
    expect_error(failed, ErrorKind::kDeadline, {"300ms", "backward 1 of", "waits for"});
    expect_no_pass(*c);
    stuck.open();
    // What the slow one sends late is of the pass that has failed.
    context.backward({far.sum()}, {.retain_graph = true});
    expect_equal(context.gradient(x), (8 * x).detach());
  }
  expect_nothing_left(*c);
}

TEST_P(DistFailure, DA_43_backward_node_failure_and_DA_44_backward_node_failure_python_udf) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor direct = rpc_sync((*c)[0], "worker1", &mul, x, x);
    const std::vector<std::string> path{"worker2"};
    const at::Tensor far = rpc_sync((*c)[0], "worker1", &travel, path, x, x);
    (void)(*c)[2].shutdown({.graceful = false});
    expect_error(error_of([&] { context.backward({far.sum()}, {.retain_graph = true}); }),
                 ErrorKind::kPeerLost, {"worker2"});
    EXPECT_EQ(counter((*c)[0], "num_current_backward_passes"), 0);
    EXPECT_EQ(counter((*c)[1], "num_current_backward_passes"), 0);
    // What does not go there still works, and the release does not wait for the dead.
    context.backward({direct.sum()});
    expect_equal(context.gradient(x), (2 * x).detach());
    context.release().wait();
  }
  for (const size_t i : {0, 1}) EXPECT_EQ(counter((*c)[i], "num_autograd_contexts"), 0);
  c->forget();
}

// A worker dies in the middle of a pass, and then the one whose pass it is.
TEST_P(DistFailure, DA_43_a_worker_leaves_while_its_part_runs) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  StuckWayBack stuck;
  std::thread leaver([&] {
    stuck.wait_reached();
    std::thread([&c] { (void)(*c)[0].shutdown({.graceful = false}); }).join();
  });
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor slow = rpc_sync((*c)[0], "worker1", &slow_way_back, x);
    const Status failed = error_of([&] { context.backward({slow.sum()}); });
    EXPECT_FALSE(failed.ok());
  }
  leaver.join();
  // The others have nothing of it left, although its root told them nothing.
  for (const size_t i : {1, 2}) {
    eventually([&] { return counter((*c)[i], "num_current_backward_passes") == 0; }, "a pass");
    eventually([&] { return counter((*c)[i], "num_autograd_contexts") == 0; }, "a context");
  }
  stuck.open();
  c->forget();
}

TEST_P(DistFailure, DA_46_clean_context_during_backward) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  StuckWayBack stuck;
  DistAutogradContext context((*c)[0]);
  const at::Tensor loss = rpc_sync((*c)[0], "worker1", &slow_way_back, x).sum();
  Status failed;
  std::thread other([&] { failed = error_of([&] { context.backward({loss}); }); });
  stuck.wait_reached();
  const Future<void> released = context.release();
  other.join();
  released.wait();
  expect_error(failed, ErrorKind::kCancelled, {"released"});
  stuck.open();
  expect_nothing_left(*c);
}

// CTX-3.
TEST_P(DistFailure, X9_release_with_calls_in_flight) {
  auto c = make();
  const at::Tensor x = leaf({1, 2});
  for (int i = 0; i < fewer(500, 100); ++i) {
    DistAutogradContext context((*c)[0]);
    const std::vector<std::string> path{"worker2", "worker1"};
    auto first = rpc_async((*c)[0], "worker1", &travel, path, x, x);
    auto second = rpc_async((*c)[0], "worker2", &mul, x, x);
    for (int k = 0; k < i % 50; ++k) std::this_thread::yield();
    const Future<void> released = context.release();
    EXPECT_EQ(first.wait().sizes(), x.sizes());
    expect_equal(second.wait().detach(), (x * x).detach());
    released.wait();
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistFailure, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
