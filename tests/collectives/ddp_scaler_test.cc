// Mixed precision: forwards in bf16 and fp16, and gradients that are scaled, on all ranks alike.

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "ATen/autocast_mode.h"
#include "ATen/ops/_amp_update_scale.h"
#include "weft/collectives/ddp/data_parallel.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/mixed_precision.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/testing/checks.h"

namespace weft::testing {
namespace {

struct CastNetImpl : torch::nn::Cloneable<CastNetImpl> {
  CastNetImpl() { CastNetImpl::reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(8, 16));
    out = register_module("out", torch::nn::Linear(16, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = first(x);
    computed_in = h.scalar_type();
    return out(torch::tanh(h));
  }
  torch::nn::Linear first = nullptr, out = nullptr;
  at::ScalarType computed_in = at::kFloat;
};
TORCH_MODULE(CastNet);

at::Tensor cast_batch(int64_t part) {
  return torch::arange(32, torch::kFloat32).sin().view({4, 8}) * static_cast<double>(1 + part);
}

// Replicas in bf16 or fp16: gradients are fp32, and their mean that of the ranks alone.
TEST(DdpMixedPrecision, AutocastInDdp) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    run_ranks(2, [dtype](ProcessGroup& group) {
      CastNet net;
      DistributedDataParallel ddp(net, group);
      std::vector<at::Tensor> want;
      for (int64_t r = 0; r < 2; ++r) {
        CastNet alone;
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          alone->parameters()[i].copy_(net->parameters()[i]);
        }
        const at::AutoGradMode with_grad(true);
        {
          const Autocast autocast(at::kCPU, dtype);
          alone->forward(cast_batch(r)).to(at::kFloat).square().sum().backward();
        }
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          const at::Tensor half = alone->parameters()[i].grad() / 2;
          if (r == 0) want.push_back(half);
          if (r == 1) want[i] = want[i] + half;
        }
      }
      at::Tensor loss;
      {
        const Autocast autocast(at::kCPU, dtype);
        loss = ddp.forward(cast_batch(group.rank())).to(at::kFloat).square().sum();
        EXPECT_EQ(net->computed_in, dtype);
        const Autocast off(at::kCPU, dtype, false);
        EXPECT_EQ(net->forward(cast_batch(0)).scalar_type(), at::kFloat);
      }
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      loss.backward();
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_EQ(net->parameters()[i].grad().scalar_type(), at::kFloat);
        expect_near(net->parameters()[i].grad(), want[i],
                    1e-6 * (1 + want[i].abs().max().item<double>()));
      }
    });
  }
}

// The caller's autocast is that of the replicas, with its type.
TEST(DdpMixedPrecision, AutocastInReplicas) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    CastNet net;
    DataParallel<CastNet> parallel(net, {.device_ids = {at::kCPU, at::kCPU, at::kCPU}});
    const at::Tensor x = torch::arange(96, torch::kFloat32).sin().view({12, 8});
    const Autocast autocast(at::kCPU, dtype);
    const at::Tensor got = parallel.forward(x);
    EXPECT_EQ(got.scalar_type(), dtype);
    expect_near(got.to(at::kFloat), net->forward(x).to(at::kFloat), 1e-2);
  }
}

// The scale after any sequence of steps is what LibTorch's operator gives.
TEST(DdpMixedPrecision, TheScaleIsThatOfLibTorch) {
  run_ranks(2, [](ProcessGroup& group) {
    GradScaler scaler(group, {.init_scale = 1 << 14, .growth_interval = 3});
    at::Tensor scale = torch::full({1}, static_cast<float>(1 << 14));
    at::Tensor tracker = torch::zeros({1}, at::kInt);
    for (int i = 0; i < 60; ++i) {
      // Only one rank has it, in turn.
      const bool bad = (i * 7) % 11 < 3;
      const bool mine = bad && i % 2 == group.rank();
      at::Tensor grad = torch::full({5}, 3.0);
      if (mine) grad[2] = i % 3 == 0 ? std::numeric_limits<float>::quiet_NaN() : INFINITY;
      const double before = scaler.get_scale();
      EXPECT_EQ(scaler.unscale_gradients({grad}), !bad);
      EXPECT_EQ(grad[0].item<float>(), static_cast<float>(3.0 / before));
      scaler.update();
      at::_amp_update_scale_(scale, tracker, torch::full({1}, bad ? 1.0F : 0.0F), 2, 0.5, 3);
      ASSERT_EQ(scaler.get_scale(), scale.item<float>()) << i;
      ASSERT_EQ(scaler.growth_tracker(), tracker.item<int>()) << i;
    }
    GradScaler other(group);
    other.load_state(scaler.state());
    EXPECT_EQ(other.get_scale(), scaler.get_scale());
    EXPECT_EQ(other.growth_tracker(), scaler.growth_tracker());
  });
}

// A rank whose own gradients are not finite keeps all from stepping; then all step alike.
TEST(DdpMixedPrecision, AllStepOrNone) {
  run_ranks(3, [](ProcessGroup& group) {
    CastNet net;
    DistributedDataParallel ddp(net, group);
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    GradScaler scaler(group);
    CastNet plain;
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        plain->parameters()[i].copy_(net->parameters()[i]);
      }
    }
    DistributedDataParallel plain_ddp(plain, group);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.01);
    int stepped = 0;
    for (int i = 0; i < 6; ++i) {
      ddp.zero_grad();
      const at::Tensor x = cast_batch(group.rank());
      scaler.scale(ddp.forward(x).square().mean()).backward();
      const bool bad = i == 1 || i == 4;
      // After the reduction: DDP itself would give it to all.
      if (bad && group.rank() == i % 3) net->parameters()[0].grad()[0][0] = INFINITY;
      if (i == 2) {
        EXPECT_TRUE(scaler.unscale(optimizer));
      }
      const at::Tensor before = net->first->weight.detach().clone();
      const bool did = scaler.step(optimizer);
      EXPECT_EQ(did, !bad);
      EXPECT_EQ(torch::equal(before, net->first->weight), bad);
      scaler.update();
      stepped += did ? 1 : 0;
      if (!did) continue;
      plain_ddp.zero_grad();
      plain_ddp.forward(x).square().mean().backward();
      plain_optimizer.step();
    }
    EXPECT_EQ(stepped, 4);
    EXPECT_EQ(scaler.get_scale(), 65536 / 4);
    // Powers of two: scaled and divided again, bit for bit what they were.
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(net->parameters()[i], plain->parameters()[i]));
    }
  });
}

TEST(DdpMixedPrecision, BadInput_CallsInAnotherOrder) {
  run_ranks(1, [](ProcessGroup& group) {
    CastNet net;
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    GradScaler scaler(group);
    expect_error(error_of([&] { scaler.update(); }), ErrorKind::kState,
                 {"no gradient was unscaled"});
    scaler.scale(net->forward(cast_batch(0)).sum()).backward();
    scaler.unscale(optimizer);
    expect_error(error_of([&] { scaler.unscale(optimizer); }), ErrorKind::kState,
                 {"unscale() was called for these since the last update()"});
    scaler.step(optimizer);
    expect_error(error_of([&] { scaler.step(optimizer); }), ErrorKind::kState,
                 {"step() was called for this optimizer since the last update()"});
    expect_error(error_of([&] { scaler.unscale(optimizer); }), ErrorKind::kState,
                 {"unscale() after step()"});
    scaler.update();
    expect_error(error_of([&] { scaler.load_state("1 -1"); }), ErrorKind::kInvalidArgument,
                 {"'1 -1' is no state of a scaler"});
    expect_error(error_of([&] { GradScaler(group, {.init_scale = INFINITY}); }),
                 ErrorKind::kInvalidArgument, {"init_scale is inf"});
    expect_error(error_of([&] { GradScaler(group, {.growth_factor = 1}); }),
                 ErrorKind::kInvalidArgument, {"growth_factor is 1"});
    expect_error(error_of([&] { Autocast(at::kCPU, at::kInt); }), ErrorKind::kInvalidArgument,
                 {"Int on a CPU"});
    // Switched off it changes nothing.
    GradScaler off(group, {.enabled = false});
    const at::Tensor loss = net->forward(cast_batch(0)).sum();
    EXPECT_TRUE(off.scale(loss).is_same(loss));
    EXPECT_TRUE(off.step(optimizer));
    off.update();
    EXPECT_EQ(off.get_scale(), 1);
  });
}

}  // namespace
}  // namespace weft::testing
