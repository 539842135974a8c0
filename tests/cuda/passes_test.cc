// A backward over tensors on GPUs that are made of host memory (fake_runtime.h): where gradients
// go, and what waits for what. What LibTorch computes with is missing there; gradients are made by
// the place-holders of kernels.

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"
#include "weft/tests/cuda/fake_backward.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/gate.h"

namespace weft::testing {
namespace {

class Passes : public ::testing::TestWithParam<Net> {
 protected:
  using Maps = std::vector<std::map<std::string, DeviceMap>>;

  void start(Maps maps) {
    Library lib("passes");
    lib.def("same", &same).def("where", &where);
    // Its gradient is 5, made late, on the device of x, from one that is read first.
    lib.def("late", [this](const at::Tensor& x) {
      return with_backward(x, [this](const at::Tensor& gradient) {
        read_ = queue_read(gradient);
        at::Tensor out = with_bytes(at::zeros(gradient.sizes()), gradient.device());
        queue_fill(out, 5, gate_);
        reached_->arrive_and_wait();
        return out;
      });
    });
    ClusterOptions options{.net = GetParam(), .library = std::move(lib)};
    options.adjust = [maps](int i, JoinOptions* o) {
      o->devices = {gpu(0), gpu(1)};
      o->device_maps = maps[static_cast<size_t>(i)];
      o->services = {rref_service(), dist_autograd_service()};
    };
    cluster_ = std::make_unique<Cluster>(std::move(options));
  }
  Worker& caller() { return (*cluster_)[0]; }
  void expect_nothing_left() {
    for (size_t i = 0; i < cluster_->size(); ++i) {
      eventually([&] { return counter((*cluster_)[i], "num_autograd_contexts") == 0; }, "contexts");
    }
  }

  const OpenFlag gate_ = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<Gate> reached_ = std::make_shared<Gate>(make_system_runtime());
  std::shared_ptr<std::vector<float>> read_;
  std::unique_ptr<Cluster> cluster_;
};

using LateOf = FunctionRef<at::Tensor(const at::Tensor&)>;

// Gradients of arguments go back against the caller's map, those of results against the way in
// which they came; neither worker needs a map of its own for that.
TEST_P(Passes, DA_50_device_maps_backward_pass) {
  start({{{"worker1", {{gpu(0), gpu(1)}, {gpu(1), gpu(0)}}}}, {}});
  for (const int device : {0, 1}) {
    const at::Tensor x = gpu_leaf(6, device);
    DistAutogradContext context(caller());
    EXPECT_EQ(rpc_sync(caller(), 1, &where, x), gpu(1 - device).str());
    const at::Tensor y = rpc_sync(caller(), 1, &same, x);
    ASSERT_EQ(y.device(), gpu(device));
    context.backward({y}, {.gradients = {gpu_full(6, 3, device)}});
    const at::Tensor gradient = context.gradient(x);
    ASSERT_EQ(gradient.device(), gpu(device));
    EXPECT_TRUE(at::equal(settled(gradient), at::full({6}, 3.0F)));
  }
  expect_nothing_left();
}

// Both have a map for the other, and they are not each other's reverse: the caller's holds for what
// the caller sent, either way.
TEST_P(Passes, DA_50_maps_of_both_workers) {
  start({{{"worker1", {{gpu(0), gpu(1)}}}}, {{"worker0", {{gpu(1), gpu(1)}}}}});
  const at::Tensor x = gpu_leaf(4, 0);
  DistAutogradContext context(caller());
  const at::Tensor y = rpc_sync(caller(), 1, &same, x);
  context.backward({y}, {.gradients = {gpu_full(4, 2, 0)}});
  ASSERT_EQ(context.gradient(x).device(), gpu(0));
  EXPECT_TRUE(at::equal(settled(context.gradient(x)), at::full({4}, 2.0F)));
}

// A worker without devices gets the tensor on its CPU; the gradient goes home.
TEST_P(Passes, DA_50_a_gradient_on_the_cpu_goes_to_the_device) {
  start({{{"worker1", {{gpu(0), c10::Device(c10::kCPU)}}}}, {}});
  const at::Tensor x = gpu_leaf(4, 0);
  DistAutogradContext context(caller());
  EXPECT_EQ(rpc_sync(caller(), 1, &where, x), "cpu");
  const at::Tensor y = rpc_sync(caller(), 1, &same, x);
  ASSERT_EQ(y.device(), gpu(0));
  context.backward({y}, {.gradients = {gpu_full(4, 2, 0)}});
  ASSERT_EQ(context.gradient(x).device(), gpu(0));
  EXPECT_TRUE(at::equal(settled(context.gradient(x)), at::full({4}, 2.0F)));
}

// The kernels of a node come after the gradient that it needs has arrived, and what it makes leaves
// after its kernels; no thread waits for a device.
TEST_P(Passes, DA_51_dist_autograd_sync_streams) {
  start({{{"worker1", {{gpu(0), gpu(1)}}}}, {}});
  const size_t blocking = fake_cuda::blocking_calls();
  const at::Tensor x = gpu_leaf(1000, 0);
  DistAutogradContext context(caller());
  const at::Tensor y = rpc_sync(caller(), 1, LateOf{"passes.late"}, x);
  // The call ends before y's own copy has: held with the others, it would hold the gradient of y
  // where it is.
  fake_cuda::run_all();
  fake_cuda::hold_copies_to_devices(true);
  std::atomic<bool> ended{false};
  Status status;
  std::thread backward([&] {
    const AutogradContextGuard guard(context);
    status = context.try_backward({y}, {.gradients = {gpu_full(1000, 3, 0)}});
    ended = true;
  });
  reached_->wait_arrived(1);
  fake_cuda::run_all();
  EXPECT_TRUE(read_->empty()) << "the node's kernel did not wait for its gradient";
  reached_->open();
  fake_cuda::hold_copies_to_devices(false);
  EXPECT_EQ(rpc_sync(caller(), 1, FunctionRef<std::string(const at::Tensor&)>{"passes.where"},
                     at::zeros({1})),
            "cpu");
  EXPECT_FALSE(ended) << "the gradient left before the kernel that makes it";
  gate_->store(true);
  backward.join();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(at::equal(settled(context.gradient(x)), at::full({1000}, 5.0F)));
  EXPECT_EQ(*read_, std::vector<float>(1000, 3.0F));
  EXPECT_EQ(fake_cuda::blocking_calls(), blocking) << "somebody waited for a device";
}

// A node runs on the stream of its forward, and a thread that reads a gradient queues behind the
// kernels that make it.
TEST_P(Passes, DA_52_gradients_synchronizations) {
  start({{}, {}});
  const at::Tensor x = gpu_leaf(100, 0);
  const c10::Stream forward = fresh();
  std::optional<c10::Stream> ran_on;
  DistAutogradContext context(caller());
  at::Tensor y;
  {
    const c10::StreamGuard guard(forward);
    y = with_backward(x, [&](const at::Tensor& gradient) {
      ran_on = current();
      at::Tensor out = with_bytes(at::zeros({100}), gradient.device());
      queue_fill(out, 7, gate_);
      return out;
    });
  }
  context.backward({y}, {.gradients = {gpu_full(100, 1, 0)}});
  EXPECT_EQ(ran_on, forward);
  const c10::StreamGuard guard(fresh());
  const auto read = queue_read(context.gradient(x));
  fake_cuda::run_all();
  EXPECT_TRUE(read->empty()) << "the reader did not wait for the gradient's kernel";
  gate_->store(true);
  fake_cuda::run_all();
  EXPECT_EQ(*read, std::vector<float>(100, 7.0F));
}

INSTANTIATE_TEST_SUITE_P(Nets, Passes, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
