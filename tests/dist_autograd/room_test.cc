// DEF_21: gradients that exceed what may be on its way wait for room, and go in order.

#include "torch/types.h"
#include "weft/tests/dist_autograd/fixture.h"

namespace weft::testing {
namespace {

class DistRoom : public DistAutogradTest {
 protected:
  // 768 KiB each.
  static at::Tensor large() { return torch::ones({96 << 10}, torch::kFloat64); }
  std::unique_ptr<Cluster> make_with(int size, const Environment& environment,
                                     std::shared_ptr<FaultPlan> plan = nullptr) {
    ClusterOptions o{.size = size, .net = GetParam(), .library = library_};
    o.adjust = [environment, plan](int, JoinOptions* join) {
      join->services = {rref_service(), dist_autograd_service()};
      join->environment = environment;
      if (plan != nullptr) join->transport = faulty_transport(join->transport, plan);
    };
    return std::make_unique<Cluster>(o);
  }
};

// Each result has passed alone; their gradients are there at once.
TEST_P(DistRoom, DEF_21_gradients_wait_for_room) {
  auto c = make_with(2, {{"WEFT_PEER_SEND_BUDGET", "2MiB"}});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor x = large().set_requires_grad(true);
    at::Tensor sum = torch::zeros({1}, torch::kFloat64);
    constexpr int kCalls = 12;
    for (int i = 0; i < kCalls; ++i) {
      sum = sum + rpc_sync((*c)[0], "worker1", &identity, x * (i + 1)).sum();
    }
    context.backward({sum});
    expect_equal(context.gradient(x), torch::full_like(x, kCalls * (kCalls + 1) / 2).detach());
  }
  expect_nothing_left(*c);
}

// Both ways at once, each worker with more for the other than may be on its way.
TEST_P(DistRoom, DEF_21_two_workers_that_wait_for_each_other) {
  auto c = make_with(2, {{"WEFT_PEER_SEND_BUDGET", "5MiB"}});
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor x = large().set_requires_grad(true);
    const at::Tensor y = large().mul(2);
    at::Tensor sum = torch::zeros({1}, torch::kFloat64);
    constexpr int kCalls = 6;
    // To worker1, from there back to worker0, and the results the same way.
    const std::vector<std::string> path{"worker0", "worker1", "worker0"};
    for (int i = 0; i < kCalls; ++i) {
      sum = sum + rpc_sync((*c)[0], "worker1", &travel, path, x * 1, y).sum();
    }
    context.backward({sum});
    // y four times on the way there, three times on the way back.
    expect_equal(context.gradient(x), torch::full_like(x, kCalls * 128).detach());
  }
  expect_nothing_left(*c);
}

// The receiver has no room for a moment: half of another message takes it.
TEST_P(DistRoom, DEF_21_what_a_receiver_refuses_is_asked_again) {
  auto plan = std::make_shared<FaultPlan>(1);
  auto c = make_with(3, {{"WEFT_RECEIVE_BUDGET", "1MiB"}}, plan);
  {
    DistAutogradContext context((*c)[0]);
    const at::Tensor x = large().set_requires_grad(true);
    const at::Tensor l = rpc_sync((*c)[0], "worker1", &identity, x * 1).sum();
    plan->add({.fault = Fault::kDelay,
               .kind = FrameKind::kChunk,
               .from = "worker2",
               .to = "worker1",
               .delay = absl::Milliseconds(300)});
    const Future<at::Tensor> other = rpc_async((*c)[2], "worker1", &identity, large());
    eventually([&] { return counter((*c)[1], "receive_bytes") > 0; }, "half a message");
    context.backward({l});
    expect_equal(context.gradient(x), torch::ones_like(x).detach());
    plan->clear();
    other.wait();
  }
  expect_nothing_left(*c);
}

INSTANTIATE_TEST_SUITE_P(Nets, DistRoom, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
