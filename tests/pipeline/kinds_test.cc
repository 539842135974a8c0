// Plans beside the synchronous chain: weights that stages share, forwards that run again or alone, and
// steps after every micro-batch.
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/dist_optim/lr_scheduler.h"
#include "weft/pipeline/stage_optimizer.h"
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

// ---- losses, optimizers, norms ------------------------------------------------------------------

// A batch in two, four or eight micro-batches, in one step or in several that add up: the same gradients.
TEST(Pipeline, PP_4_LossesAndAccumulation) {
  const at::Tensor x = numbers(8, 0.37);
  const at::Tensor y = numbers(8, 0.91);
  const auto gradients = [](const World& world) {
    std::vector<State> out;
    for (int s = 0; s < world.plan.stages(); ++s) out.push_back(world.pipe->gradients(s));
    return out;
  };
  const auto expect_close = [](const std::vector<State>& a, const std::vector<State>& b) {
    for (size_t s = 0; s < a.size(); ++s) {
      ASSERT_EQ(a[s].size(), b[s].size());
      for (const auto& [name, t] : a[s]) {
        EXPECT_TRUE(at::allclose(t, b[s].at(name), 1e-6, 1e-7)) << "stage " << s << " " << name;
      }
    }
  };
  for (const std::string name : {"1f1b", "zb-h1"}) {
    SCOPED_TRACE(name);
    World whole(*pipeline::make_schedule(name, 2, 8));
    whole.pipe->step({x}, y);
    const std::vector<State> want = gradients(whole);
    for (const int parts : {2, 4}) {  // steps that accumulate, each of 8 / parts micro-batches
      World world(*pipeline::make_schedule(name, 2, 8 / parts));
      const auto xs = at::tensor_split(x, parts);
      const auto ys = at::tensor_split(y, parts);
      for (int k = 0; k < parts; ++k) {
        const int m = 8 / parts;
        const auto split_x = at::tensor_split(xs[k], m);
        std::vector<pipeline::Tensors> inputs;
        for (const at::Tensor& one : split_x) inputs.push_back({one});
        world.pipe
            ->step_async(std::move(inputs), at::tensor_split(ys[k], m),
                         std::vector<double>(static_cast<size_t>(m), 1.0 / 8))
            .wait();
      }
      expect_close(gradients(world), want);
    }
    // A sum of eight losses is eight times their mean; by tokens, each counts by its number of them.
    World sum(*pipeline::make_schedule(name, 2, 8), {.reduction = pipeline::Reduction::kSum});
    const double total = sum.pipe->step({x}, y).loss;
    std::vector<State> eightfold = want;
    for (State& state : eightfold) {
      for (auto& [key, t] : state) t = t * 8;
    }
    expect_close(gradients(sum), eightfold);
    World tokens(*pipeline::make_schedule(name, 2, 8));
    std::vector<pipeline::Tensors> inputs;
    for (const at::Tensor& one : at::tensor_split(x, 8)) inputs.push_back({one});
    const std::vector<double> weights = {3, 1, 4, 1, 5, 9, 2, 6};
    const auto result =
        tokens.pipe->step_async(std::move(inputs), at::tensor_split(y, 8), weights).wait();
    Local local(2);
    double weighted = 0;
    for (int i = 0; i < 8; ++i) {
      at::Tensor h = at::tensor_split(x, 8)[i];
      for (const auto& b : local.blocks) h = b->forward(h);
      const at::Tensor loss = squares(h, at::tensor_split(y, 8)[i]);
      weighted += loss.item<double>() * weights[i];
      (loss * weights[i]).backward();
    }
    EXPECT_EQ(result.loss, weighted);
    std::vector<State> of_local;
    for (const auto& b : local.blocks) {
      auto& state = of_local.emplace_back();
      for (const auto& item : b->named_parameters()) state[item.key()] = item.value().grad();
    }
    expect_equal(gradients(tokens), of_local);
    EXPECT_NEAR(total, 8 * whole.pipe->step({x}, y).loss, 1e-5);
  }
}

// One of LibTorch's optimizers per stage, or a rule of weft::optim, and a schedule over all stages.
TEST(Pipeline, OptimizersOfLibTorchAndSchedules) {
  const auto adjust = [](int, JoinOptions* join) {
    join->services.back() =
        pipeline_service({.make_optimizer = [](const ServiceContext&, const pipeline::Plan&, int,
                                               std::vector<at::Tensor> parameters) {
          return pipeline::torch_optimizer(
              std::make_unique<torch::optim::AdamW>(std::move(parameters), 0.01));
        }});
  };
  for (const bool of_torch : {true, false}) {
    SCOPED_TRACE(of_torch ? "AdamW" : "SGD");
    const OptimizerChoice sgd = optimizer_choice<optim::SGD>({.lr = 0.01, .momentum = 0.9});
    World world(pipeline::zb_v(2, 4), {.optimizer = sgd}, false,
                of_torch ? std::function<void(int, JoinOptions*)>(adjust) : nullptr);
    const int n = world.plan.stages();
    Local local(n);
    std::vector<std::unique_ptr<torch::optim::AdamW>> theirs;
    std::vector<std::unique_ptr<LocalOptimizer>> ours;
    for (const auto& block : local.blocks) {
      theirs.push_back(std::make_unique<torch::optim::AdamW>(block->parameters(), 0.01));
      ours.push_back(*LocalOptimizer::make(sgd.name, sgd.options, block->parameters()));
    }
    StepLR schedule(world.pipe->rates(), {.step_size = 2, .gamma = 0.5});
    std::vector<Future<pipeline::StepResult>> begun;
    std::vector<double> want;
    for (int k = 0; k < 5; ++k) {
      const at::Tensor x = numbers(8, 0.3 + 0.1 * k);
      const at::Tensor y = numbers(8, 0.8);
      begun.push_back(world.pipe->step_async({x}, y));
      want.push_back(local.step(x, y, 4));
      const double lr = 0.01 * std::pow(0.5, k / 2);
      EXPECT_EQ(world.pipe->rates().lr(0), lr);
      for (int s = 0; s < n; ++s) {
        std::vector<at::Tensor> gradients;
        for (const auto& p : local.blocks[s]->parameters()) gradients.push_back(p.grad());
        if (of_torch) {
          for (auto& group : theirs[s]->param_groups()) group.options().set_lr(lr);
          theirs[s]->step();
        } else {
          std::vector<double> options = sgd.options;
          options[0] = lr;
          ASSERT_TRUE(ours[s]->set_options(options).ok());
          ASSERT_TRUE(ours[s]->step(gradients).ok());
        }
        local.blocks[s]->zero_grad();
      }
      schedule.step();  // while steps of the old rate may be under way
    }
    for (size_t k = 0; k < begun.size(); ++k) EXPECT_EQ(begun[k].wait().loss, want[k]) << k;
    // With its optimizer into another pipeline, the next step is the same.
    World other(pipeline::zb_v(2, 4), {.optimizer = sgd, .first_step = 5}, false,
                of_torch ? std::function<void(int, JoinOptions*)>(adjust) : nullptr);
    for (int s = 0; s < n; ++s) other.pipe->load_state_dict(s, world.pipe->state_dict(s));
    for (World* w : {&world, &other}) {
      w->pipe->rates().set_lr(0.003, 0);
      w->pipe->step({numbers(8, 0.5)}, numbers(8, 0.8));
    }
    for (int s = 0; s < n; ++s) {
      StateDict a = world.blocks[s].state_dict();
      for (const auto& [name, t] : other.blocks[s].state_dict()) EXPECT_TRUE(at::equal(t, a[name]));
    }
  }
  World without(pipeline::gpipe(2, 2));
  EXPECT_EQ(without.pipe->rates().num_groups(), 0u);
  EXPECT_THROW(without.pipe->rates().set_lr(1, 0), Error);
}

// The norm is that of all stages' gradients, a shared weight counted once; no stage steps before it is known.
TEST(Pipeline, NormsOverAllStagesClipAndSkip) {
  for (const std::string name : {"1f1b", "zb-v", "interleaved:2"}) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(absl::StrCat(name, tied ? " tied" : ""));
      pipeline::Plan plan = *pipeline::make_schedule(name, 2, 4);
      const int n = plan.stages();
      pipeline::PipelineOptions options{.optimizer = optimizer_choice<optim::SGD>({.lr = 0.5}),
                                        .clip_norm = 0.05,
                                        .skip_not_finite = true,
                                        .record = true};
      if (tied) {
        plan = pipeline::with_tied(plan, {{0, n - 1}});
        options.tied = {{0, {"weight"}}, {n - 1, {"weight"}}};
      }
      World world(plan, options);
      Local local(n);
      if (tied) {
        const c10::AutoGradMode off(false);
        local.blocks[n - 1]->weight.copy_(local.blocks[0]->weight);
      }
      for (int k = 0; k < 3; ++k) {
        const at::Tensor x = numbers(8, 0.3 + 0.1 * k);
        const at::Tensor y = numbers(8, 0.8);
        const bool broken = k == 1;
        const auto result = world.pipe->step({broken ? x / 0 : x}, y);
        EXPECT_EQ(result.skipped, broken);
        for (const auto& times : result.times) EXPECT_EQ(times.size() % 2, 0u);
        if (broken) {
          EXPECT_FALSE(std::isfinite(result.grad_norm));
          continue;
        }
        local.step(x, y, 4);
        at::Tensor& first = local.blocks[0]->weight.mutable_grad();
        at::Tensor& last = local.blocks[n - 1]->weight.mutable_grad();
        if (tied) first = last = first + last;
        double squares = 0;
        for (int s = 0; s < n; ++s) {
          for (const auto& p : local.blocks[s]->parameters()) {
            if (tied && s == n - 1 && p.is_same(local.blocks[s]->weight)) continue;
            squares += p.grad().to(at::kDouble).pow(2).sum().item<double>();
          }
        }
        EXPECT_NEAR(result.grad_norm, std::sqrt(squares), 1e-6);
        EXPECT_GT(result.grad_norm, 0.05) << "nothing is clipped";
        const c10::AutoGradMode off(false);
        const double factor = 0.05 / (std::sqrt(squares) + 1e-6);
        for (const auto& block : local.blocks) {
          for (const auto& p : block->parameters()) at::Tensor(p).sub_(p.grad() * (0.5 * factor));
          block->zero_grad();
        }
      }
      for (int s = 0; s < n; ++s) {
        const StateDict got = world.blocks[s].state_dict();
        for (const auto& item : local.blocks[s]->named_parameters()) {
          EXPECT_TRUE(at::allclose(got.at(item.key()), item.value(), 1e-5, 1e-6))
              << "stage " << s << " " << item.key();
        }
      }
      world.expect_nothing_left();
    }
  }
}

}  // namespace
}  // namespace weft::testing
