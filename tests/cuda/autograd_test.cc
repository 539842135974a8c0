// Backward over tensors on GPUs: DA-48 to DA-52, and steps after it. What is compared with is the
// same computation in one process; kernels are late on either side. Where gradients go and what
// waits for what is shown without hardware, too: passes_test.cc, steps_test.cc.

#include <memory>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/allclose.h"
#include "ATen/ops/rand.h"
#include "c10/core/StreamGuard.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/autograd.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/rpc/call.h"
#include "weft/rpc/spi/device_order.h"
#include "weft/rref/rref.h"
#include "weft/tests/cuda/gpu_test.h"

namespace weft::testing {
namespace {

at::Tensor mul(const at::Tensor& x, const at::Tensor& y) { return x * y; }
// Its forward and its backward are late.
at::Tensor slow_mul(const at::Tensor& x, const at::Tensor& y) {
  delay(x.device().index());
  const at::Tensor z = x * y;
  z.register_hook([device = x.device().index()](const at::Tensor& gradient) {
    delay(device);
    return gradient * 1;
  });
  return z;
}

class CudaAutograd : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    parameter_ = leaf(gpu(0));
  }
  std::unique_ptr<Cluster> cluster(const DeviceMap& map) {
    Library lib("cuda");
    lib.def("mul", &mul).def("slow_mul", &slow_mul);
    lib.def("parameter", [p = parameter_] { return p; });
    lib.def("times_parameter", [p = parameter_](const at::Tensor& x) { return slow_mul(p, x); });
    lib.merge(dist_optim_library());
    return start(3, std::move(lib), all_to_all(3, map),
                 {rref_service(), dist_autograd_service(), dist_optim_service()});
  }
  static at::Tensor leaf(c10::Device device) {
    return at::rand({200, 200}, at::TensorOptions().device(device)).set_requires_grad(true);
  }
  // On a stream that has waited for nothing: the context has to.
  static void expect_gradients(const DistAutogradContext& context, const at::Tensor& local_loss,
                               const std::vector<at::Tensor>& leaves) {
    const auto want = torch::autograd::grad({local_loss}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) {
      const c10::StreamGuard guard(new_stream(gpu(0)));
      const at::Tensor got = context.gradient(leaves[i]);
      ASSERT_TRUE(got.defined()) << i;
      ASSERT_EQ(got.device(), leaves[i].device()) << i;
      EXPECT_TRUE(at::allclose(got.cpu(), want[i].cpu())) << i;
    }
  }
  at::Tensor parameter_;  // of worker1
};

TEST_P(CudaAutograd, DA_48_gpu_simple) {
  const auto c = cluster({{gpu(0), gpu(0)}});
  const at::Tensor x = leaf(gpu(0));
  const at::Tensor y = leaf(gpu(0));
  DistAutogradContext context((*c)[0]);
  context.backward({rpc_sync((*c)[0], 1, &mul, x, y).sum()});
  expect_gradients(context, (x * y).sum(), {x, y});
}

TEST_P(CudaAutograd, DA_49_gpu_to_cpu_continuation) {
  const auto c = cluster({});
  const at::Tensor x = leaf(gpu(0));
  const at::Tensor y = leaf(c10::kCPU);
  for (const bool root_on_gpu : {false, true}) {
    DistAutogradContext context((*c)[0]);
    const at::Tensor there = rpc_sync((*c)[0], 1, &mul, (x * x).cpu(), y);
    const at::Tensor here = there.to(gpu(0)) * x;
    const at::Tensor loss = root_on_gpu ? here.sum() : here.cpu().sum();
    context.backward({loss});
    expect_gradients(context, (((x * x).cpu() * y).to(gpu(0)) * x).sum(), {x, y});
  }
}

TEST_P(CudaAutograd, DA_50_device_maps_backward_pass) {
  for (const DeviceMap& map : maps()) {
    const auto c = cluster(map);
    const at::Tensor x = leaf(gpu(0));
    const at::Tensor y = leaf(gpu(0));
    DistAutogradContext context((*c)[0]);
    const at::Tensor there = rpc_sync((*c)[0], 1, &mul, x, y);
    context.backward({rpc_sync((*c)[0], 2, &mul, there, x).sum()});
    expect_gradients(context, (x * y * x).sum(), {x, y});
  }
}

TEST_P(CudaAutograd, DA_51_dist_autograd_sync_streams) {
  for (const DeviceMap& map : maps()) {
    const auto c = cluster(map);
    const at::Tensor x = leaf(gpu(0));
    const at::Tensor y = leaf(gpu(0));
    for (int round = 0; round < 3; ++round) {
      DistAutogradContext context((*c)[0]);
      const c10::StreamGuard guard(new_stream(gpu(0)));
      const at::Tensor there = rpc_sync((*c)[0], 1, &slow_mul, x, y);
      const at::Tensor loss = rpc_sync((*c)[0], 2, &slow_mul, there, x).sum();
      context.backward({loss});
      expect_gradients(context, (x * y * x).sum(), {x, y});
    }
  }
}

// Gradients of two passes are added, each made late.
TEST_P(CudaAutograd, DA_52_gradients_synchronizations) {
  const auto c = cluster({{gpu(0), gpu(0)}});
  const at::Tensor x = leaf(gpu(0));
  const at::Tensor y = leaf(gpu(0));
  DistAutogradContext context((*c)[0]);
  for (int pass = 0; pass < 2; ++pass) {
    const c10::StreamGuard guard(new_stream(gpu(0)));
    context.backward({rpc_sync((*c)[0], 1, &slow_mul, x, y).sum()});
  }
  expect_gradients(context, 2 * (x * y).sum(), {x, y});
}

// Each forward reads what the step before it has made, each step what its backward has made.
TEST_P(CudaAutograd, STREAM_5_steps_of_a_parameter_at_another_worker) {
  const auto c = cluster({{gpu(0), gpu(0)}});
  at::Tensor local = parameter_.detach().cpu().set_requires_grad(true);
  at::Tensor momentum;
  const at::Tensor x = at::rand({200, 200}, at::TensorOptions().device(gpu(0)));
  DistributedOptimizer<optim::SGD> optimizer(
      (*c)[0], {remote((*c)[0], 1, FunctionRef<at::Tensor()>{"cuda.parameter"})},
      {.lr = 0.01, .momentum = 0.9});
  for (int round = 0; round < 6; ++round) {
    const c10::StreamGuard guard(new_stream(gpu(0)));
    DistAutogradContext context((*c)[0]);
    const at::Tensor y =
        rpc_sync((*c)[0], 1, FunctionRef<at::Tensor(const at::Tensor&)>{"cuda.times_parameter"}, x);
    if (round % 2 == 0) {
      context.backward({(y * y).sum()});
      EXPECT_EQ(optimizer.step(context).updated, 1);
    } else {
      EXPECT_EQ(optimizer.backward_and_step(context, {(y * y).sum()}).updated, 1);
    }
    const at::Tensor z = local * x.cpu();
    const at::Tensor gradient = torch::autograd::grad({(z * z).sum()}, {local})[0];
    momentum = momentum.defined() ? momentum * 0.9 + gradient : gradient;
    local = (local - momentum * 0.01).detach().set_requires_grad(true);
  }
  follow_published((*c)[1]);
  EXPECT_TRUE(at::allclose(parameter_.detach().cpu(), local.detach(), 1e-4, 1e-6));
}

INSTANTIATE_TEST_SUITE_P(Nets, CudaAutograd, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
