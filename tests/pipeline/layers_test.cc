// The last weights' gradients of a stage that is reduced are taken layer by layer: the gradient of a layer
// leaves before the next layer is computed. Counted by what happens, in which order.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "weft/common/mutex.h"
#include "weft/pipeline/internal/split.h"
#include "weft/pipeline/reducer.h"
#include "weft/tests/pipeline/model.h"
#include "weft/tests/testing/vcompute.h"

namespace weft::testing {
namespace {

using pipeline::internal::SplitBackward;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr int kMicro = 4;

// What happens in each stage of the test that runs.
struct Events {
  void add(int64_t stage, const std::string& what) {
    MutexLock lock(&mutex);
    of_stage[stage].push_back(what);
  }
  std::vector<std::string> last(int64_t stage, size_t count) {
    MutexLock lock(&mutex);
    const auto& all = of_stage[stage];
    return {all.end() - static_cast<std::ptrdiff_t>(std::min(count, all.size())), all.end()};
  }
  std::string throws_at;  // this weights' gradient of stage 1; before a step
  Mutex mutex;
  std::map<int64_t, std::vector<std::string>> of_stage ABSL_GUARDED_BY(mutex);
};
Events* events = nullptr;

// x * w, which says when the gradient of w is computed.
struct Told : torch::autograd::Function<Told> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& w, int64_t stage, const std::string& name) {
    ctx->save_for_backward({x, w});
    ctx->saved_data["stage"] = stage;
    ctx->saved_data["name"] = name;
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    at::Tensor dw;
    if (ctx->needs_input_grad(1)) {
      const int64_t stage = ctx->saved_data["stage"].toInt();
      const std::string name = ctx->saved_data["name"].toStringRef();
      if (stage == 1 && name == events->throws_at) throw std::runtime_error("no gradient of w");
      events->add(stage, name);
      dw = (gradients[0] * saved[0]).sum_to_size(saved[1].sizes());
    }
    return {gradients[0] * saved[1], dw, at::Tensor(), at::Tensor()};
  }
};

// Layer a has kWidth weights, layer b one.
struct TwoLayersImpl : torch::nn::Module {
  explicit TwoLayersImpl(int64_t stage)
      : stage(stage),
        a(register_parameter("a", at::cos(at::arange(kWidth, at::kFloat)))),
        b(register_parameter("b", at::full({1}, 1.5))) {}
  at::Tensor forward(const at::Tensor& x) {
    const int64_t i = forwards++ % kMicro;
    return Told::apply(Told::apply(x, a, stage, absl::StrCat("a", i)), b, stage,
                       absl::StrCat("b", i));
  }
  const int64_t stage;
  at::Tensor a;
  at::Tensor b;
  int64_t forwards = 0;
};

class Noted final : public pipeline::GradReducer {
 public:
  explicit Noted(int stage) : stage_(stage) {}
  Status ready(const at::Tensor& gradient) override {
    events->add(stage_, gradient.numel() == 1 ? "b is ready" : "a is ready");
    return absl::OkStatus();
  }
  Status finish(absl::Duration) override {
    events->add(stage_, "reduced");
    return absl::OkStatus();
  }

 private:
  const int stage_;
};

struct Layers {
  explicit Layers(const pipeline::Plan& plan, bool reduced = true,
                  std::map<int, std::vector<std::string>> tied = {}) {
    ClusterOptions o;
    o.size = static_cast<int>(plan.workers.size());
    o.library = model_library();
    module_<TwoLayersImpl>(o.library, "TwoLayers")
        .constructor<int64_t>()
        .def("forward", &TwoLayersImpl::forward);
    o.adjust = [reduced](int, JoinOptions* join) {
      add_pipeline_services(join);
      if (!reduced) return;
      join->services.back() = pipeline_service(
          {.make_reducer = [](const ServiceContext&, const pipeline::Plan&, int stage) {
            return std::make_shared<Noted>(stage);
          }});
    };
    cluster = std::make_unique<Cluster>(o);
    for (int s = 0; s < plan.stages(); ++s) {
      modules.emplace_back((*cluster)[0], absl::StrCat("worker", plan.placement[s]), int64_t{s});
    }
    pipe = std::make_unique<pipeline::Pipeline>(
        (*cluster)[0], std::vector<pipeline::Stage>(modules.begin(), modules.end()), plan,
        pipeline::PipelineOptions{.loss = "app.squares", .tied = std::move(tied), .record = true});
  }
  ~Layers() {
    pipe->close();
    pipe = nullptr;
    modules.clear();
    cluster->shutdown();
  }
  std::unique_ptr<Cluster> cluster;
  std::vector<RemoteModule<TwoLayersImpl>> modules;
  std::unique_ptr<pipeline::Pipeline> pipe;
};

class PipelineLayers : public ::testing::Test {
 protected:
  PipelineLayers() { events = &events_; }
  ~PipelineLayers() override { events = nullptr; }
  Events events_;
};

// Stage 1 has two weights' gradients left when its last input gradient has gone. Stage 0 has no input
// gradient: the whole of its backward is the last weights' gradient, and its layers leave one by one, too.
TEST_F(PipelineLayers, PP_11_ALayerLeavesBeforeTheNextLastGradientIsComputed) {
  const pipeline::Plan plan = pipeline::with_reductions(pipeline::zb_h1(2, kMicro));
  Layers layers(plan);
  for (int step = 0; step < 2; ++step) {
    const auto result = layers.pipe->step({numbers(8, 0.37)}, numbers(8, 0.91));
    EXPECT_THAT(events_.last(1, 7),
                ElementsAre("b2", "b3", "b is ready", "a2", "a3", "a is ready", "reduced"));
    EXPECT_THAT(events_.last(0, 7),
                ElementsAre("b2", "a2", "b3", "b is ready", "a3", "a is ready", "reduced"));
    // Each action has its time, one after the other.
    for (const auto& of_worker : result.times) {
      for (size_t k = 1; k < of_worker.size(); ++k) EXPECT_GE(of_worker[k], of_worker[k - 1]);
    }
  }
}

// Without a reduction nothing leaves, and a micro-batch is let go as soon as it can be.
TEST_F(PipelineLayers, PP_11_WithoutAReductionMicroBatchesComeOneAfterTheOther) {
  Layers layers(pipeline::zb_h1(2, kMicro));
  layers.pipe->step({numbers(8, 0.37)}, numbers(8, 0.91));
  EXPECT_THAT(events_.last(1, 4), ElementsAre("b2", "a2", "b3", "a3"));
}

// A reduction of weights that stages share is none of the layers'.
TEST_F(PipelineLayers, PP_11_SharedWeightsLeaveMicroBatchesOneAfterTheOther) {
  Layers layers(pipeline::with_tied(pipeline::zb_h1(2, kMicro), {{0, 1}}), /*reduced=*/false,
                {{0, {"b"}}, {1, {"b"}}});
  layers.pipe->step({numbers(8, 0.37)}, numbers(8, 0.91));
  EXPECT_THAT(events_.last(1, 4), ElementsAre("b2", "a2", "b3", "a3"));
}

// A stage that is no module. It notes what it is asked for.
class Asked final : public VCompute {
 public:
  Asked(std::shared_ptr<Runtime> runtime, int stage)
      : VCompute(std::move(runtime), pipeline::StageCost{}), stage_(stage) {}
  Status weight_grad(int64_t step, int micro_batch) override {
    events->add(stage_, absl::StrCat("W", micro_batch));
    return VCompute::weight_grad(step, micro_batch);
  }
  Status weight_grads(int64_t step, const std::vector<int>& micro_batches,
                      absl::FunctionRef<Status(int)> at) override {
    events->add(stage_, absl::StrCat(micro_batches.size(), " together"));
    return VCompute::weight_grads(step, micro_batches, at);
  }

 private:
  const int stage_;
};

TEST_F(PipelineLayers, PP_11_WhatIsReducedIsAskedForTogetherAndNothingElse) {
  for (const bool reduced : {false, true}) {
    pipeline::Plan plan = pipeline::zb_h1(2, kMicro);
    if (reduced) plan = pipeline::with_reductions(plan);
    ClusterOptions o;
    o.size = 2;
    o.library = model_library();
    o.adjust = [](int, JoinOptions* join) {
      add_pipeline_services(join);
      join->services.back() = pipeline_service(
          {.make_compute = [](const ServiceContext& context, const pipeline::Plan&, int stage) {
            return std::make_shared<Asked>(context.runtime, stage);
          }});
    };
    Cluster cluster(o);
    {
      const std::vector<WorkerInfo> members = cluster[0].worker_infos();
      pipeline::Pipeline pipe(cluster[0],
                              {pipeline::Stage(members[0]), pipeline::Stage(members[1])}, plan);
      pipe.step_async(std::vector<pipeline::Tensors>(kMicro, {numbers(1, 0.37)}), {},
                      std::vector<double>(kMicro, 1.0))
          .wait();
      pipe.close();
    }
    cluster.shutdown();
    if (reduced) {
      EXPECT_THAT(events_.last(1, 3), ElementsAre("2 together", "W2", "W3"));
      EXPECT_THAT(events_.last(0, 4), ElementsAre("W0", "W1", "W2", "W3"));  // one is left
    } else {
      EXPECT_THAT(events_.last(1, 4), ElementsAre("W0", "W1", "W2", "W3"));
    }
  }
}

TEST_F(PipelineLayers, PP_9_AWeightsGradientThatFailsAmongOthersIsNamed) {
  const pipeline::Plan plan = pipeline::with_reductions(pipeline::zb_h1(2, kMicro));
  for (const int i : {2, 3}) {
    for (const std::string layer : {"a", "b"}) {
      events_.throws_at = absl::StrCat(layer, i);
      Layers layers(plan);
      const auto result = layers.pipe->step_async({numbers(8, 0.37)}, numbers(8, 0.91)).try_wait();
      EXPECT_THAT(std::string(result.status().message()),
                  ::testing::AllOf(HasSubstr("no gradient of w"), HasSubstr("worker 'worker1'"),
                                   HasSubstr(absl::StrCat("stage 1, micro-batch ", i)),
                                   HasSubstr(absl::StrCat("action W1.", i))));
    }
  }
}

// ---- several graphs at once ---------------------------------------------------------------------

struct Graphs {
  // `swapped`: that graph uses the weights in the other order.
  Graphs(int count, int swapped) {
    for (int k = 0; k < count; ++k) {
      at::Tensor x = numbers(3, 0.3 + k).set_requires_grad(true);
      const auto layer = [](const at::Tensor& in, const at::Tensor& w) {
        return at::tanh(at::matmul(in, w));
      };
      const at::Tensor y = k == swapped ? layer(layer(x, b), a) : layer(layer(x, a), b);
      outputs.push_back(y * c);
      inputs.push_back(x);
    }
    for (size_t k = 0; k < outputs.size(); ++k) {
      owned.push_back(std::make_unique<SplitBackward>(std::vector<at::Tensor>{outputs[k]},
                                                      std::vector<at::Tensor>{inputs[k]}));
      owned.back()->input_grads({at::sin(outputs[k].detach())});
      all.push_back(owned.back().get());
    }
  }
  std::vector<at::Tensor> gradients() const { return {a.grad(), b.grad(), c.grad()}; }

  at::Tensor a = numbers(kWidth, 0.7).set_requires_grad(true);
  at::Tensor b = numbers(kWidth, 0.9).set_requires_grad(true);
  at::Tensor c = numbers(1, 0.2).set_requires_grad(true);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  std::vector<std::unique_ptr<SplitBackward>> owned;
  std::vector<SplitBackward*> all;
};

TEST(SplitBackwards, PP_4_SeveralGraphsLayerByLayerHaveTheBitsOfOneAfterTheOther) {
  constexpr int kGraphs = 3;
  for (const int swapped : {-1, 0, 1, 2}) {
    SCOPED_TRACE(swapped);
    Graphs one(kGraphs, swapped);
    for (SplitBackward* graph : one.all) graph->weight_grads();
    Graphs together(kGraphs, swapped);
    std::vector<std::string> order;
    const auto name = [&together](const at::Tensor& p) {
      return p.is_same(together.a) ? "a" : p.is_same(together.b) ? "b" : "c";
    };
    const Status status = SplitBackward::weight_grads(
        together.all, [&](const at::Tensor& p) { order.emplace_back(name(p)); },
        [&](size_t k) {
          order.push_back(absl::StrCat(k));
          return Status();
        });
    EXPECT_TRUE(status.ok()) << status;
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_TRUE(at::equal(one.gradients()[k], together.gradients()[k])) << k;
    }
    // Where one graph is another one, they come one after the other.
    const std::vector<std::string> by_layer = {"0", "1", "2", "c", "0", "1",
                                               "2", "b", "0", "1", "2", "a"};
    const std::vector<std::string> by_graph = {
        "0", "1", "2", "c", swapped == 2 ? "a" : "b", swapped == 2 ? "b" : "a"};
    EXPECT_THAT(order, ElementsAreArray(swapped < 0 ? by_layer : by_graph));
  }
}

TEST(SplitBackwards, PP_4_AnErrorBetweenTwoLayersEndsThem) {
  Graphs graphs(2, -1);
  int left = 3;
  const Status status = SplitBackward::weight_grads(graphs.all, nullptr, [&](size_t) {
    return --left > 0 ? Status() : make_error(ErrorKind::kUser, "enough");
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("enough"));
  EXPECT_FALSE(graphs.a.grad().defined());
  EXPECT_TRUE(graphs.c.grad().defined());
}

// Gradients of a pipeline run no accumulator's hook.
TEST(SplitBackwards, PP_4_AnAccumulatorWithAHookTellsAtTheEnd) {
  struct Counting final : torch::autograd::FunctionPostHook {
    explicit Counting(int* runs) : runs(runs) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& out,
                                              const torch::autograd::variable_list&) override {
      ++*runs;
      return out;
    }
    int* const runs;
  };
  for (const bool hooked : {false, true}) {
    at::Tensor a = numbers(kWidth, 0.7).set_requires_grad(true);
    at::Tensor b = numbers(kWidth, 0.9).set_requires_grad(true);
    int runs = 0;
    const auto accumulator = torch::autograd::impl::grad_accumulator(a);
    if (hooked) accumulator->add_post_hook(std::make_unique<Counting>(&runs));
    const at::Tensor x = numbers(3, 0.3);
    const at::Tensor y = at::matmul(at::tanh(at::matmul(x, a)), b);
    SplitBackward split({y}, {x});
    split.input_grads({at::ones_like(y)});
    std::vector<std::string> ready;
    bool a_was_there = false;
    split.weight_grads([&](const at::Tensor& p) {
      if (ready.empty()) a_was_there = a.grad().defined();
      ready.emplace_back(p.is_same(a) ? "a" : "b");
      EXPECT_TRUE(p.grad().defined());
    });
    EXPECT_THAT(ready, ::testing::UnorderedElementsAre("a", "b"));
    EXPECT_EQ(a_was_there, hooked) << "b leaves first, unless both are told at the end";
    EXPECT_EQ(runs, 0);
    EXPECT_EQ(accumulator->post_hooks().size(), hooked ? 1u : 0u);
  }
}

}  // namespace
}  // namespace weft::testing
