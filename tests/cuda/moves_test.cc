// Pipelines and parameter servers on GPUs that are made of host memory (fake_runtime.h): what a stage
// takes is there before its kernels, and what a trainer pushes is what its kernels made. Kernels are
// place-holders, and streams do only what a test asks for.

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "gtest/gtest.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/service.h"
#include "weft/pipeline/stage_compute.h"
#include "weft/ps/client.h"
#include "weft/ps/server.h"
#include "weft/tests/cuda/fake_gpus.h"
#include "weft/tests/testing/checks.h"
#include "weft/tests/testing/cluster.h"

namespace weft::testing {
namespace {

using pipeline::Tensors;

// Adds one to what it is given, by a kernel; both ways.
class AddsOne : public pipeline::StageCompute {
 public:
  explicit AddsOne(std::atomic<int>* queued) : queued_(queued) {}
  StatusOr<Tensors> forward(pipeline::ForwardCall call) override {
    at::Tensor out = plus_one(call.inputs[0]);
    if (call.is_last && !call.forward_only) {
      last_ = out;
      return Tensors{at::zeros({1})};
    }
    return Tensors{std::move(out)};
  }
  Status recompute(int64_t, int) override { return absl::OkStatus(); }
  StatusOr<Tensors> backward(int64_t, int, Tensors gradients) override {
    return Tensors{plus_one(gradients.empty() ? last_ : gradients[0])};
  }
  StatusOr<Tensors> input_grad(int64_t step, int i, Tensors gradients) override {
    return backward(step, i, std::move(gradients));
  }
  Status weight_grad(int64_t, int) override { return absl::OkStatus(); }
  Status step(int64_t) override { return absl::OkStatus(); }
  void drop(const Status&) override {}
  // What the first stage's last backward gave.
  static at::Tensor& came_back() {
    static auto* const only = new at::Tensor();
    return *only;
  }

 private:
  at::Tensor plus_one(const at::Tensor& x) {
    at::Tensor out = with_bytes(at::full(x.sizes(), -100.0F), x.device());
    fake_cuda::queue(native(current(x.device())), [x, out] {
      const auto* const from = static_cast<const float*>(x.const_data_ptr());
      auto* const to = static_cast<float*>(out.mutable_data_ptr());
      for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] + 1;
      return true;
    });
    came_back() = out;
    queued_->fetch_add(1);
    return out;
  }
  std::atomic<int>* const queued_;
  at::Tensor last_;
};

class GpuMoves : public ::testing::TestWithParam<Net> {
 protected:
  void TearDown() override {
    fake_cuda::hold_copies_to_devices(false);
    fake_cuda::run_all();
    AddsOne::came_back() = at::Tensor();
  }
  static std::unique_ptr<Cluster> start(int size, const ServiceFactory& service) {
    ClusterOptions options{.size = size, .net = GetParam()};
    options.adjust = [size, service](int, JoinOptions* o) {
      o->devices = {gpu(0)};
      for (int w = 0; w < size; ++w) {
        o->device_maps["worker" + std::to_string(w)] = {{gpu(0), gpu(0)}};
      }
      o->services = {service};
    };
    return std::make_unique<Cluster>(std::move(options));
  }
};

// RUN-7
TEST_P(GpuMoves, RUN_7_what_a_stage_queues_comes_after_the_copies_of_what_it_takes) {
  std::atomic<int> queued{0};
  const auto c = start(
      2, pipeline_service({.make_compute = [&](const ServiceContext&, const pipeline::Plan&, int) {
        return std::make_shared<AddsOne>(&queued);
      }}));
  std::vector<pipeline::Stage> stages;
  for (size_t w = 0; w < 2; ++w) stages.emplace_back((*c)[w].info());
  pipeline::Pipeline pipe((*c)[0], stages, *pipeline::make_schedule("gpipe", 2, 1));
  const at::Tensor x = with_bytes(at::full({2, 3}, 5.0F), gpu(0));
  fake_cuda::hold_copies_to_devices(true);
  auto streamed = pipe.forward_async({{x}});
  eventually([&] { return queued.load() >= 1; }, "the first stage runs");
  fake_cuda::run_all();
  EXPECT_EQ(queued.load(), 1) << "the second stage has something that was not there";
  fake_cuda::hold_copies_to_devices(false);
  const auto outputs = streamed.wait();
  EXPECT_TRUE(at::equal(settled(outputs[0][0]), at::full({2, 3}, 7.0F)));
  pipe.step({x}, with_bytes(at::full({2, 3}, 0.0F), gpu(0)));
  EXPECT_TRUE(at::equal(settled(AddsOne::came_back()), at::full({2, 3}, 9.0F)));
  pipe.close();
}

constexpr int kInTurns = 16;
// The first stage's outputs are on the CPU and on the GPU in turns; the second one keeps what it is given.
class InTurns : public pipeline::StageCompute {
 public:
  InTurns(bool first, std::vector<at::Tensor>* seen) : first_(first), seen_(seen) {}
  StatusOr<Tensors> forward(pipeline::ForwardCall call) override {
    if (!first_) {
      seen_->push_back(call.inputs[0]);
      return Tensors{at::zeros({1})};
    }
    // On a stream that is this thread's alone.
    if (!own_) c10::impl::VirtualGuardImpl(c10::kCUDA).exchangeStream(fresh());
    own_ = true;
    // No kernel ends before all have been queued.
    go_->store(call.micro_batch == kInTurns - 1);
    // Large, so that it takes the second thread a while.
    if (call.micro_batch % 2 == 0) return Tensors{at::full({1 << 20}, 6.0F)};
    at::Tensor out = with_bytes(at::full({3}, -100.0F), gpu(0));
    fake_cuda::queue(native(current(gpu(0))), [out, go = go_] {
      if (!go->load()) return false;
      auto* const to = static_cast<float*>(out.mutable_data_ptr());
      for (int64_t i = 0; i < out.numel(); ++i) to[i] = 6;
      return true;
    });
    return Tensors{std::move(out)};
  }
  Status recompute(int64_t, int) override { return absl::OkStatus(); }
  StatusOr<Tensors> backward(int64_t, int, Tensors) override { return Tensors{at::Tensor()}; }
  StatusOr<Tensors> input_grad(int64_t, int, Tensors) override { return Tensors{at::Tensor()}; }
  Status weight_grad(int64_t, int) override { return absl::OkStatus(); }
  Status step(int64_t) override { return absl::OkStatus(); }
  void drop(const Status&) override {}

 private:
  const bool first_;
  std::vector<at::Tensor>* const seen_;
  bool own_ = false;
  const std::shared_ptr<std::atomic<bool>> go_ = std::make_shared<std::atomic<bool>>(false);
};

// RUN-7, RUN-10: what is on a device is written by the thread that computed it, also behind messages that the second
// thread has not written yet.
TEST_P(GpuMoves, RUN_7_also_behind_what_the_second_thread_writes) {
  std::vector<at::Tensor> seen;
  const auto c = start(2, pipeline_service({.make_compute = [&](const ServiceContext&,
                                                                const pipeline::Plan&, int stage) {
                         return std::make_shared<InTurns>(stage == 0, &seen);
                       }}));
  std::vector<pipeline::Stage> stages;
  for (size_t w = 0; w < 2; ++w) stages.emplace_back((*c)[w].info());
  pipeline::Pipeline pipe((*c)[0], stages, *pipeline::make_schedule("gpipe", 2, kInTurns));
  const at::Tensor x = at::zeros({kInTurns, 1});
  for (int step = 0; step < 5; ++step) pipe.step({x}, x);
  pipe.close();
  ASSERT_EQ(seen.size(), size_t{5 * kInTurns});
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_TRUE(at::equal(settled(seen[i]), at::full(seen[i].sizes(), 6.0F))) << "message " << i;
  }
}

TEST_P(GpuMoves, PS_11_a_push_has_what_the_kernels_before_it_made) {
  const auto c = start(2, ps_service());
  const ps::Server server((*c)[1]);
  const ps::Client client((*c)[0], {.servers = {"worker1"}});
  ps::Table table = client.open_table("t", ps::dense({100}, ps::rule<optim::SGD>({.lr = 1.0})));
  const c10::StreamGuard guard(fresh());
  const at::Tensor gradient = with_bytes(at::full({100}, -100.0F), gpu(0));
  queue_fill(gradient, -4, nullptr);
  table.push(gradient).wait();
  EXPECT_TRUE(at::equal(table.pull().wait(), at::full({100}, 4.0F)));
}

INSTANTIATE_TEST_SUITE_P(Nets, GpuMoves, ::testing::ValuesIn(nets()), net_name);

}  // namespace
}  // namespace weft::testing
