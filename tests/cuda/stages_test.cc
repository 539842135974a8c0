// Pipelines whose stages are on a GPU: losses and gradients are those of the same model in one process
// on that GPU, bit for bit, for every schedule, with the backward split, with recomputation, and with
// kernels that are late.

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/core/StreamGuard.h"
#include "gtest/gtest.h"
#include "weft/pipeline/reducer.h"
#include "weft/tests/cuda/gpus.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

// Where several streams are in use, cuBLAS promises equal bits with a workspace of a fixed size alone; it
// reads this once, before the first product.
class SteadyProducts : public ::testing::Environment {
  void SetUp() override { ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0); }
};
::testing::Environment* const steady_products =
    ::testing::AddGlobalTestEnvironment(new SteadyProducts);

// What each of `workers` workers joins with.
std::function<void(int, JoinOptions*)> on_the_gpu(int workers) {
  return [workers](int, JoinOptions* join) {
    join->devices = {gpu(0)};
    for (int w = 0; w < workers; ++w) {
      join->device_maps["worker" + std::to_string(w)] = {{gpu(0), gpu(0)}};
    }
  };
}

class CudaPipeline : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const Gpus gpus = find_gpus();
    if (gpus.count == 0) GTEST_SKIP() << gpus.why;
  }
  // `factor`: what a reducer has made of the gradients.
  static void compare(World& world, Local& local, int micro_batches, int factor = 1) {
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = numbers(2 * micro_batches + 1, 0.37 + step).to(gpu(0));
      const at::Tensor y = numbers(2 * micro_batches + 1, 0.91).to(gpu(0));
      if (step == 1) delay(0);
      // Made late, on the caller's stream.
      const at::Tensor late = x * 2;
      const auto result = world.pipe->step({late}, y);
      EXPECT_EQ(result.loss, local.step(late, y, micro_batches)) << "step " << step;
      for (size_t s = 0; s < local.blocks.size(); ++s) {
        const auto got = world.pipe->gradients(static_cast<int>(s));
        for (const auto& item : local.blocks[s]->named_parameters()) {
          ASSERT_EQ(got.count(item.key()), 1u) << item.key();
          const at::Tensor& mine = got.at(item.key());
          EXPECT_EQ(mine.device(), gpu(0));
          const at::Tensor want = item.value().grad().mul_(factor);  // steps add up
          EXPECT_TRUE(at::equal(mine, want))
              << "step " << step << " stage " << s << " " << item.key() << ": "
              << (mine - want).abs().max().item<float>() << " apart";
        }
      }
    }
    world.expect_nothing_left();
  }
};

TEST_P(CudaPipeline, GradientsEqualOneProcess) {
  const c10::StreamGuard guard(new_stream(gpu(0)));
  for (const bool shared : {false, true}) {
    SCOPED_TRACE(shared ? "shared" : "");
    constexpr int kMicroBatches = 5;
    World world(*pipeline::make_schedule(GetParam(), 2, kMicroBatches), {}, shared, on_the_gpu(2),
                "cuda:0");
    Local local(world.plan.stages(), shared, "cuda:0");
    compare(world, local, kMicroBatches);
  }
}

TEST_P(CudaPipeline, WithRecomputation) {
  if (GetParam() != "1f1b" && GetParam() != "zb-h1") return;
  constexpr int kMicroBatches = 4;
  World world(pipeline::with_recompute(*pipeline::make_schedule(GetParam(), 2, kMicroBatches)), {},
              false, on_the_gpu(2), "cuda:0");
  Local local(world.plan.stages(), false, "cuda:0");
  compare(world, local, kMicroBatches);
}

// Doubles, on the stream on which it is told.
class Doubles final : public pipeline::GradReducer {
 public:
  Status ready(const at::Tensor& gradient) override {
    at::Tensor(gradient).mul_(2);
    return absl::OkStatus();
  }
  Status finish(absl::Duration) override { return absl::OkStatus(); }
};

// What is told to be ready has been queued, and nothing is added to it later: also the last weights' gradients, which
// come layer by layer, and those of a first stage, which has no gradient of its input.
TEST_P(CudaPipeline, AReducerIsToldOfWholeGradients) {
  const c10::StreamGuard guard(new_stream(gpu(0)));
  constexpr int kMicroBatches = 4;
  const auto adjust = [](int index, JoinOptions* join) {
    on_the_gpu(2)(index, join);
    join->services.back() =
        pipeline_service({.make_reducer = [](const ServiceContext&, const pipeline::Plan&, int) {
          return std::make_shared<Doubles>();
        }});
  };
  World world(pipeline::with_reductions(*pipeline::make_schedule(GetParam(), 2, kMicroBatches)), {},
              false, adjust, "cuda:0");
  Local local(world.plan.stages(), false, "cuda:0");
  compare(world, local, kMicroBatches, 2);
}

// Draws from the GPU's generator.
struct NoisyImpl : torch::nn::Module {
  explicit NoisyImpl(int64_t index)
      : block(register_module("block", std::make_shared<BlockImpl>(index, false))) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::dropout(block->forward(x), 0.5, /*train=*/true);
  }
  const std::shared_ptr<BlockImpl> block;
};

// With a seed and without one a forward that runs again draws what it drew.
TEST_P(CudaPipeline, RecomputationDrawsTheSameOnAGpu) {
  if (GetParam() != "interleaved:2") return;
  for (const bool seeded : {true, false}) {
    std::vector<std::map<std::string, at::Tensor>> results;
    for (const bool again : {false, true}) {
      Library lib = model_library();
      module_<NoisyImpl>(lib, "Noisy").constructor<int64_t>().def("forward", &NoisyImpl::forward);
      ClusterOptions options{.size = 1, .library = std::move(lib)};
      options.adjust = [](int index, JoinOptions* join) {
        add_pipeline_services(join);
        on_the_gpu(1)(index, join);
      };
      Cluster cluster(std::move(options));
      std::vector<RemoteModule<NoisyImpl>> blocks;
      for (int64_t s = 0; s < 2; ++s) blocks.emplace_back(cluster[0], "worker0/cuda:0", s);
      pipeline::Plan plan = *pipeline::make_schedule(GetParam(), 1, 4);
      if (again) plan = pipeline::with_recompute(plan);
      pipeline::PipelineOptions how;
      how.loss = "app.squares";
      if (seeded) how.seed = 7;
      torch::manual_seed(11);
      pipeline::Pipeline pipe(
          cluster[0], std::vector<pipeline::Stage>(blocks.begin(), blocks.end()), plan, how);
      pipe.step({numbers(8, 0.3).to(gpu(0))}, numbers(8, 0.8).to(gpu(0)));
      results.push_back(pipe.gradients(0));
      pipe.close();
      blocks.clear();
    }
    ASSERT_FALSE(results[0].empty());
    for (const auto& [name, gradient] : results[0]) {
      EXPECT_TRUE(at::equal(gradient, results[1].at(name))) << name << ", seeded " << seeded;
    }
  }
}

std::vector<std::string> schedules() {
  std::vector<std::string> out;
  for (const std::string& name : pipeline::schedule_names()) {
    if (name != "pipedream") out.push_back(name);
  }
  return out;
}
INSTANTIATE_TEST_SUITE_P(Schedules, CudaPipeline, ::testing::ValuesIn(schedules()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace weft::testing
