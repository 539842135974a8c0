// Plans beside the synchronous chain: weights that stages share, forwards that run again or alone, and
// steps after every micro-batch.
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/pipeline/verifier.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

pipeline::Plan tied_plan(const std::string& name, int p, int m) {
  const pipeline::Plan plan = *pipeline::make_schedule(name, p, m);
  return pipeline::with_tied(plan, {{0, plan.stages() - 1}});
}

pipeline::PipelineOptions tied_options(const pipeline::Plan& plan) {
  pipeline::PipelineOptions options;
  options.tied = {{0, {"weight"}}, {plan.stages() - 1, {"weight"}}};
  return options;
}

// The first and the last stage share a weight. On one worker (zb-v) or two.
TEST(Pipeline, PP_4_WeightsThatStagesShare) {
  for (const std::string name : {"1f1b", "interleaved:2", "zb-h1", "zb-v"}) {
    SCOPED_TRACE(name);
    const pipeline::Plan plan = tied_plan(name, 2, 3);
    World world(plan, tied_options(plan));
    Local local(plan.stages());
    const int last = plan.stages() - 1;
    local.blocks[last]->weight = local.blocks[0]->weight;
    const at::Tensor x = numbers(7, 0.37);
    const at::Tensor y = numbers(7, 0.91);
    const auto result = world.pipe->step({x}, y);
    EXPECT_NEAR(result.loss, local.step(x, y, 3), 1e-6);
    for (int s = 0; s <= last; ++s) {
      const auto got = world.pipe->gradients(s);
      for (const auto& item : local.blocks[s]->named_parameters()) {
        // The last stage's own weight is not used in one process.
        const at::Tensor& want = s == last && item.key() == "weight"
                                     ? local.blocks[0]->weight.grad()
                                     : item.value().grad();
        EXPECT_TRUE(at::allclose(got.at(item.key()), want, 1e-5, 1e-6)) << s << " " << item.key();
      }
    }
    EXPECT_TRUE(
        at::equal(world.pipe->gradients(0).at("weight"), world.pipe->gradients(last).at("weight")));
    world.expect_nothing_left();
  }
}

TEST(Pipeline, SharedWeightsStayEqualWhileTheyTrain) {
  const pipeline::Plan plan = tied_plan("zb-h1", 3, 4);
  pipeline::PipelineOptions options = tied_options(plan);
  options.optimizer = optimizer_choice<optim::SGD>({.lr = 0.05, .momentum = 0.9});
  World world(plan, options);
  const at::Tensor before = world.pipe->state_dict(2).at("weight");
  for (int k = 0; k < 3; ++k) world.pipe->step({numbers(8, 0.3 + 0.1 * k)}, numbers(8, 0.8));
  EXPECT_TRUE(
      at::equal(world.pipe->state_dict(0).at("weight"), world.pipe->state_dict(2).at("weight")));
  EXPECT_FALSE(at::equal(world.pipe->state_dict(0).at("weight"), before));
}

// A plan whose shared weights wait for each other in a circle is refused before anything runs.
TEST(Pipeline, SharedWeightsThatWaitInACircleAreRefused) {
  pipeline::Plan plan = *pipeline::make_schedule("interleaved:2", 2, 2);
  plan.tied = {{0, 3}};
  for (auto& list : plan.workers) {
    std::vector<pipeline::Action> with;
    for (const auto& a : list) {
      const bool reduces = a.kind == pipeline::ActionKind::kStep && (a.stage == 0 || a.stage == 3);
      if (reduces) with.push_back({pipeline::ActionKind::kReduce, a.stage});
      with.push_back(a);
    }
    list = std::move(with);
  }
  // Stage 3 is reduced before stage 1 has its gradients, which stage 0's wait for.
  const pipeline::Verdict v = pipeline::verify(plan);
  ASSERT_FALSE(v.ok());
  EXPECT_EQ(v.problems[0].rule, "VERIFY-5");
  EXPECT_NE(v.problems[0].text.find("stage 0, which has the same weight, has not been reduced"),
            std::string::npos)
      << v.problems[0].text;
  EXPECT_TRUE(pipeline::verify(pipeline::with_tied(plan, {{0, 3}})).ok());
}

TEST(Pipeline, PP_6_EveryForwardRunsOnceMore) {
  const at::Tensor x = numbers(11, 0.37);
  const at::Tensor y = numbers(11, 0.91);
  struct Case {
    std::vector<int> stages;
    bool except_last;
    std::vector<int64_t> again;  // forwards of a stage that run twice, of 5
  };
  for (const std::string name : {"gpipe", "zb-h1"}) {
    for (const Case& c :
         {Case{{}, false, {5, 5, 0}}, Case{{}, true, {4, 4, 0}}, Case{{1}, false, {0, 5, 0}}}) {
      SCOPED_TRACE(name + (c.except_last ? " except last" : ""));
      const auto plan =
          pipeline::with_recompute(*pipeline::make_schedule(name, 3, 5), c.stages, c.except_last);
      World world(plan);
      Local local(3);
      const auto result = world.pipe->step({x}, y);
      EXPECT_EQ(result.loss, local.step(x, y, 5));
      for (int s = 0; s < 3; ++s) {
        for (const auto& item : local.blocks[s]->named_parameters()) {
          EXPECT_TRUE(at::equal(world.pipe->gradients(s).at(item.key()), item.value().grad()));
        }
        const std::vector<int64_t> counts = world.blocks[s].rpc_sync(&BlockImpl::counts);
        EXPECT_EQ(counts[0], 5 + c.again[s]) << "stage " << s;
        EXPECT_EQ(counts[1], 5) << "stage " << s;  // with a graph: once
      }
      EXPECT_EQ(result.peak_activations, pipeline::verify(plan).peak_activations);
      world.expect_nothing_left();
    }
  }
}

TEST(Pipeline, PP_16_ForwardsKeepNothingAndComeInOrder) {
  for (const std::string name : {"1f1b", "zb-v"}) {
    World world(*pipeline::make_schedule(name, 2, 4));
    Local local(world.plan.stages());
    at::Tensor want = numbers(11, 0.37);
    const auto got = world.pipe->forward({want});
    {
      const c10::AutoGradMode off(false);
      for (const auto& b : local.blocks) want = b->forward(want);
    }
    ASSERT_EQ(got.size(), 1u);
    EXPECT_FALSE(got[0].requires_grad());
    EXPECT_TRUE(at::allclose(got[0], want, 0, 1e-6));  // rows of another batch size
    for (auto& block : world.blocks) {
      EXPECT_EQ(block.rpc_sync(&BlockImpl::counts), (std::vector<int64_t>{4, 0}));
    }
    EXPECT_TRUE(world.pipe->gradients(0).empty());
    world.expect_nothing_left();
    // Training goes on.
    EXPECT_GT(world.pipe->step({numbers(8, 0.3)}, numbers(8, 0.5)).loss, 0);
    EXPECT_EQ(world.pipe->next_step(), 2);
  }
}

// Each stage steps after every micro-batch, and a backward uses the weights of its forward: the same
// bits as one process that keeps all versions.
TEST(Pipeline, PP_14_PipeDreamUsesTheWeightsOfItsForwards) {
  constexpr int kStages = 3;
  constexpr int kBatches = 7;
  const OptimizerChoice sgd = optimizer_choice<optim::SGD>({.lr = 0.05, .momentum = 0.9});
  World world(pipeline::pipedream(kStages, kBatches), {.optimizer = sgd});
  Local local(kStages);
  std::vector<std::unique_ptr<LocalOptimizer>> optimizers;
  std::vector<std::vector<std::vector<at::Tensor>>> versions(kStages);  // stage, updates, parameter
  const auto keep = [&](int s) {
    auto& version = versions[s].emplace_back();
    for (const auto& p : local.blocks[s]->parameters()) version.push_back(p.detach().clone());
  };
  for (int s = 0; s < kStages; ++s) {
    optimizers.push_back(
        *LocalOptimizer::make(sgd.name, sgd.options, local.blocks[s]->parameters()));
    keep(s);
  }
  std::vector<pipeline::Tensors> inputs;
  std::vector<at::Tensor> targets;
  for (int i = 0; i < kBatches; ++i) {
    inputs.push_back({numbers(3, 0.3 + 0.1 * i)});
    targets.push_back(numbers(3, 0.8 + 0.05 * i));
  }
  std::vector<double> want;
  for (int i = 0; i < kBatches; ++i) {
    Local with(kStages);
    at::Tensor h = inputs[i][0];
    for (int s = 0; s < kStages; ++s) {
      // As many steps as stand before this forward in the worker's list.
      size_t steps = 0;
      for (const auto& a : world.plan.workers[s]) {
        if (a.kind == pipeline::ActionKind::kForward && a.micro_batch == i) break;
        steps += a.kind == pipeline::ActionKind::kStep ? 1 : 0;
      }
      const auto parameters = with.blocks[s]->parameters();
      for (size_t k = 0; k < parameters.size(); ++k) {
        parameters[k].set_data(versions[s].at(steps)[k].clone());
      }
      h = with.blocks[s]->forward(h);
    }
    const at::Tensor loss = squares(h, targets[i]);
    want.push_back(loss.item<double>());
    loss.backward();
    for (int s = 0; s < kStages; ++s) {
      std::vector<at::Tensor> gradients;
      for (const auto& p : with.blocks[s]->parameters()) gradients.push_back(p.grad());
      ASSERT_TRUE(optimizers[s]->step(gradients).ok());
      keep(s);
    }
  }
  const auto result =
      world.pipe->step_async(inputs, targets, std::vector<double>(kBatches, 1.0)).wait();
  EXPECT_EQ(result.losses, want);
  // With the ones of now: p - r, as many as are live.
  EXPECT_EQ(result.weight_versions, (std::vector<int64_t>{3, 2, 1}));
  for (int s = 0; s < kStages; ++s) {
    const StateDict got = world.blocks[s].state_dict();
    for (const auto& item : local.blocks[s]->named_parameters()) {
      EXPECT_TRUE(at::equal(got.at(item.key()), item.value())) << s << " " << item.key();
    }
  }
  world.expect_nothing_left();
}

// It converges as the synchronous schedule does.
TEST(Pipeline, PP_14_PipeDreamConverges) {
  const auto train = [](const std::string& name) {
    const auto m = 4;
    World world(*pipeline::make_schedule(name, 2, m),
                {.optimizer = optimizer_choice<optim::SGD>({.lr = 0.02})});
    double loss = 0;
    for (int k = 0; k < 60; ++k) {
      std::vector<pipeline::Tensors> inputs;
      std::vector<at::Tensor> targets;
      for (int i = 0; i < m; ++i) {
        inputs.push_back({numbers(4, 0.3 + 0.1 * i)});
        targets.push_back(numbers(4, 0.8));
      }
      loss = world.pipe->step_async(inputs, targets, std::vector<double>(m, 1.0)).wait().loss;
    }
    return loss;
  };
  const double synchronous = train("1f1b");
  const double asynchronous = train("pipedream");
  EXPECT_LT(asynchronous, 1.02 * synchronous);
}

}  // namespace
}  // namespace weft::testing
