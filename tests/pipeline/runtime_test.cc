// The runtime: gradients and training equal one process bit for bit for every schedule, messages
// are counted, and an error anywhere is an error everywhere.
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "weft/pipeline/internal/pipeline_state.h"
#include "weft/pipeline/internal/service.h"
#include "weft/pipeline/internal/split.h"
#include "weft/rpc/inspection.h"
#include "weft/tests/pipeline/model.h"
#include "weft/tests/testing/vcompute.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::string> synchronous() {
  std::vector<std::string> out;
  for (const std::string& name : pipeline::schedule_names()) {
    if (name != "pipedream") out.push_back(name);
  }
  return out;
}

at::Tensor batch(int64_t n, double factor) {
  return at::cos(at::arange(n * kWidth, at::kFloat) * factor).reshape({n, kWidth});
}

void expect_same_gradients(const pipeline::Pipeline& p, const Local& local) {
  for (size_t s = 0; s < local.blocks.size(); ++s) {
    const auto got = p.gradients(static_cast<int>(s));
    for (const auto& item : local.blocks[s]->named_parameters()) {
      const auto it = got.find(item.key());
      ASSERT_NE(it, got.end()) << item.key();
      EXPECT_TRUE(torch::equal(it->second, item.value().grad()))
          << "stage " << s << " " << item.key() << "\n"
          << it->second << "\n"
          << item.value().grad();
    }
  }
}

Status error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

class PipelineRun : public ::testing::TestWithParam<std::string> {};

TEST_P(PipelineRun, PP_4_GradientsEqualOneProcess) {
  for (int p : {1, 2, 4}) {
    for (const bool shared : {false, true}) {
      if (shared && p == 1) continue;
      SCOPED_TRACE(GetParam() + " p=" + std::to_string(p) + (shared ? " shared" : ""));
      const int m = p == 2 ? 3 : 5;
      World world(*pipeline::make_schedule(GetParam(), p, m), {}, shared);
      Local local(world.plan.stages(), shared);
      const at::Tensor x = batch(2 * m + 1, 0.37);  // uneven
      const at::Tensor y = batch(2 * m + 1, 0.91);
      const auto result = world.pipe->step({x}, y);
      EXPECT_EQ(result.loss, local.step(x, y, m));
      expect_same_gradients(*world.pipe, local);
      // A second step adds to them, as without a pipeline.
      world.pipe->step({x * 2}, y);
      local.step(x * 2, y, m);
      expect_same_gradients(*world.pipe, local);
      world.pipe->zero_grad();
      EXPECT_TRUE(world.pipe->gradients(0).empty());
      // What is live at once is what the simulator and the verifier count.
      std::vector<int64_t> peaks;
      for (const auto& list : world.plan.workers) {
        int64_t live = 0;
        int64_t most = 0;
        for (const auto& a : list) {
          if (a.kind == pipeline::ActionKind::kForward) most = std::max(most, ++live);
          if (a.kind == pipeline::ActionKind::kBackward ||
              a.kind == pipeline::ActionKind::kWeightGrad) {
            --live;
          }
        }
        peaks.push_back(most);
      }
      EXPECT_EQ(result.peak_activations, peaks);
      world.expect_nothing_left();
    }
  }
}
// Steps follow each other without a barrier, and train as one process does.
TEST_P(PipelineRun, PP_4_TrainingEqualsOneProcess) {
  const OptimizerChoice sgd = optimizer_choice<optim::SGD>({.lr = 0.05, .momentum = 0.9});
  for (const int p : {1, 2, 4}) {
    SCOPED_TRACE(absl::StrCat(GetParam(), " p=", p));
    World world(*pipeline::make_schedule(GetParam(), p, 4), {.optimizer = sgd});
    Local local(world.plan.stages());
    std::vector<std::unique_ptr<LocalOptimizer>> optimizers;
    for (const auto& block : local.blocks) {
      optimizers.push_back(*LocalOptimizer::make(sgd.name, sgd.options, block->parameters()));
    }
    std::vector<Future<pipeline::StepResult>> steps;
    std::vector<double> want;
    for (int k = 0; k < 20; ++k) {
      const at::Tensor x = batch(8, 0.3 + 0.1 * k);
      const at::Tensor y = batch(8, 0.8);
      steps.push_back(world.pipe->step_async({x}, y));
      want.push_back(local.step(x, y, 4));
      for (size_t s = 0; s < local.blocks.size(); ++s) {
        std::vector<at::Tensor> gradients;
        for (const auto& t : local.blocks[s]->parameters()) gradients.push_back(t.grad());
        ASSERT_TRUE(optimizers[s]->step(gradients).ok());
        for (const auto& t : local.blocks[s]->parameters()) t.mutable_grad() = at::Tensor();
      }
    }
    for (size_t k = 0; k < steps.size(); ++k) EXPECT_EQ(steps[k].wait().loss, want[k]) << k;
    for (size_t s = 0; s < local.blocks.size(); ++s) {
      const StateDict got = world.blocks[s].state_dict();
      for (const auto& item : local.blocks[s]->named_parameters()) {
        EXPECT_TRUE(torch::equal(got.at(item.key()), item.value())) << s << " " << item.key();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineRun, ::testing::ValuesIn(synchronous()),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) {
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           }
                           return name;
                         });

TEST(Pipeline, MessagesAreThoseOfThePlan) {
  World world(pipeline::one_f_one_b(3, 4));
  const auto sent = [&] {
    int64_t sum = 0;
    for (size_t w = 0; w < 3; ++w) sum += counter((*world.cluster)[w], "pipeline_sends");
    return sum;
  };
  world.pipe->step({batch(4, 0.1)}, batch(4, 0.2));
  EXPECT_EQ(sent(), pipeline::count_sends(world.plan));
  world.pipe->step({batch(4, 0.1)}, batch(4, 0.2));
  EXPECT_EQ(sent(), 2 * pipeline::count_sends(world.plan));
  // In the metrics of its worker: of the one in the middle, results on and gradients back.
  EXPECT_THAT(
      (*world.cluster)[1].metrics().text(),
      AllOf(HasSubstr("weft_pipeline_steps_total 2\n"),
            HasSubstr("weft_pipeline_failures_total 0\n"),
            HasSubstr("weft_pipeline_messages_sent_total 16\n"),
            HasSubstr(absl::StrCat("weft_pipeline_bytes_sent_total ", 16 * kWidth * 4, "\n")),
            HasSubstr("weft_pipeline_step_seconds_count 2\n")));
}

TEST(Pipeline, PP_8_MicroBatchesMayDifferInShape) {
  World world(pipeline::zb_h1(2, 3));
  Local local(2);
  std::vector<pipeline::Tensors> inputs;
  std::vector<at::Tensor> targets;
  double want = 0;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = batch(1 + 2 * i, 0.4);
    inputs.push_back({x});
    targets.push_back(batch(1 + 2 * i, 0.6));
    at::Tensor h = x;
    for (const auto& b : local.blocks) h = b->forward(h);
    const at::Tensor loss = squares(h, targets.back());
    want += loss.item<double>();
    loss.backward();
  }
  const auto result =
      world.pipe->step_async(std::move(inputs), std::move(targets), {1, 1, 1}).wait();
  EXPECT_EQ(result.loss, want);
  expect_same_gradients(*world.pipe, local);
  // No message more than for equal shapes.
  int64_t sent = 0;
  for (size_t w = 0; w < 2; ++w) sent += counter((*world.cluster)[w], "pipeline_sends");
  EXPECT_EQ(sent, pipeline::count_sends(world.plan));
}

TEST(Pipeline, AStageThatThrowsIsAnErrorEverywhere) {
  World world(pipeline::one_f_one_b(3, 4));
  world.pipe->step({batch(4, 0.1)}, batch(4, 0.2));
  world.blocks[1].rpc_sync(&BlockImpl::throw_in, int64_t{3});
  auto first = world.pipe->step_async({batch(4, 0.1)}, batch(4, 0.2));
  const Status status = first.try_wait().status();
  EXPECT_EQ(error_kind(status), ErrorKind::kUser) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("pipeline step 1, worker 'worker1', stage 1, micro-batch 2, action "
                              "F1.2"),
                    HasSubstr("this block is broken")));
  EXPECT_EQ(error_of([&] { world.pipe->step({batch(4, 0.1)}, batch(4, 0.2)); }).message(),
            world.pipe->status().message());
  world.expect_nothing_left();
  // The modules are there, and another pipeline takes them.
  world.pipe->close();
  *world.pipe = world.make({.loss = "app.squares"});
  world.pipe->step({batch(4, 0.1)}, batch(4, 0.2));
}

TEST(Pipeline, BadInput_ABatchThatDoesNotFit) {
  World world(pipeline::gpipe(2, 4));
  const auto refused = [&](const std::function<void()>& fn) {
    const Status s = error_of(fn);
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    return std::string(s.message());
  };
  EXPECT_THAT(refused([&] { world.pipe->step({batch(3, 1)}, batch(3, 1)); }),
              HasSubstr("a batch of 3 for 4 micro-batches"));
  EXPECT_THAT(refused([&] { world.pipe->step({batch(8, 1)}, batch(7, 1)); }),
              HasSubstr("a batch of 8 with an input or target of 7"));
  EXPECT_THAT(refused([&] { world.pipe->step({}, batch(8, 1)); }),
              HasSubstr("a step without inputs"));
  EXPECT_THAT(refused([&] { (void)world.pipe->step_async({{}}, {}, {1}); }),
              HasSubstr("1 inputs, 0 targets and 1 weights for 4 micro-batches"));
  EXPECT_THAT(refused([&] { (void)world.pipe->gradients(2); }), HasSubstr("stage 2 of 2"));
  // None of these was a step.
  EXPECT_GT(world.pipe->step({batch(8, 1)}, batch(8, 0.5)).loss, 0);
  // What only a stage can tell ends the pipeline.
  EXPECT_THAT(refused([&] {
                world.pipe->step({batch(8, 1), batch(8, 1)}, batch(8, 1));
              }),
              AllOf(HasSubstr("stage 0, micro-batch 0"), HasSubstr("is given 2 tensors")));
}

TEST(Pipeline, BadInput_PipelinesThatCannotBeMade) {
  World world(pipeline::gpipe(2, 2));
  const auto refused = [&](const std::function<void()>& fn) {
    return std::string(error_of(fn).message());
  };
  EXPECT_THAT(refused([&] { world.make({.loss = "app.nothing"}); }),
              AllOf(HasSubstr("worker 'worker1': "), HasSubstr("stage 1"),
                    HasSubstr("no loss is registered as 'app.nothing'")));
  OptimizerChoice bad = optimizer_choice<optim::SGD>({.lr = -1});
  EXPECT_THAT(refused([&] { world.make({.loss = "app.squares", .optimizer = bad}); }),
              HasSubstr("lr"));
  EXPECT_THAT(refused([&] { world.make({.memory_cap = 1}); }), HasSubstr("VERIFY-4"));
  EXPECT_THAT(refused([&] { world.make({.clip_norm = -1}); }), HasSubstr("clip_norm is -1"));
  world.plan = pipeline::gpipe(3, 2);
  EXPECT_THAT(refused([&] { world.make({}); }),
              HasSubstr("a pipeline of 2 stages for a plan of 3"));
  world.plan = pipeline::gpipe(2, 2);
  world.plan.placement = {1, 0};
  std::swap(world.plan.workers[0], world.plan.workers[1]);
  std::swap(world.blocks[0], world.blocks[1]);
  world.plan.workers[0].pop_back();
  EXPECT_THAT(refused([&] { world.make({}); }), HasSubstr("VERIFY-3"));
  world.plan = pipeline::zb_v(1, 2);
  EXPECT_THAT(refused([&] { world.make({}); }),
              HasSubstr("stages 0 and 1 are at one worker of the plan, and at"));
  world.plan = pipeline::with_reductions(pipeline::gpipe(2, 2));
  std::swap(world.blocks[0], world.blocks[1]);
  EXPECT_THAT(refused([&] { world.make({.loss = "app.squares"}); }),
              HasSubstr("the plan reduces its gradients, and nothing does"));
  world.plan = pipeline::gpipe(2, 2);
  world.plan.tied = {{0, 1}};
  EXPECT_THAT(refused([&] { world.make({}); }), HasSubstr("D0 is missing"));
  world.plan = pipeline::with_tied(world.plan, {{0, 1}});
  EXPECT_THAT(refused([&] {
                world.make({.tied = {{0, {"weight"}}}});
              }),
              HasSubstr("1 of one are named, and 0 of the other"));
  EXPECT_THAT(refused([&] {
                world.make({.loss = "app.squares", .tied = {{0, {"weight"}}, {1, {"heavy"}}}});
              }),
              HasSubstr("there is no parameter 'heavy'"));
  std::swap(world.blocks[0], world.blocks[1]);
  // Nothing of these is left at the workers.
  world.plan = pipeline::gpipe(2, 2);
  std::swap(world.blocks[0], world.blocks[1]);
  world.pipe->step({batch(2, 1)}, batch(2, 0.5));
}

struct StrangerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(Pipeline, BadInput_StagesOfUnknownClassesAndAtUnknownWorkers) {
  World world(pipeline::gpipe(2, 2));
  EXPECT_THAT(
      std::string(
          error_of([&] {
            RemoteModule<BlockImpl> block((*world.cluster)[0], "worker7", int64_t{1}, false);
            (void)pipeline::Pipeline((*world.cluster)[0], {world.blocks[0], block}, world.plan);
          }).message()),
      HasSubstr("worker7"));
  EXPECT_THAT(
      std::string(
          error_of([&] {
            RemoteModule<StrangerImpl> stranger((*world.cluster)[0], "worker1");
            (void)pipeline::Pipeline((*world.cluster)[0], {world.blocks[0], stranger}, world.plan);
          }).message()),
      HasSubstr("Stranger"));
  EXPECT_GT(world.pipe->step({batch(8, 1)}, batch(8, 0.5)).loss, 0);
}

TEST(Pipeline, BadInput_LossesThatAreNone) {
  World world(pipeline::gpipe(2, 2));
  const auto first_error = [&](const pipeline::PipelineOptions& options) {
    pipeline::Pipeline pipe = world.make(options);
    const Status s = error_of([&] { pipe.step({batch(4, 1)}, batch(4, 1)); });
    EXPECT_EQ(error_kind(s), ErrorKind::kInvalidArgument) << s;
    pipe.close();
    return std::string(s.message());
  };
  EXPECT_THAT(first_error({.loss = ""}),
              AllOf(HasSubstr("stage 1, micro-batch 0, action F1.0"),
                    HasSubstr("the loss is no scalar: 1 tensors, the first [2, 6]")));
  EXPECT_THAT(first_error({.loss = "app.constant"}),
              AllOf(HasSubstr("stage 1, micro-batch 0, action F1.0"),
                    HasSubstr("the loss does not require a gradient")));
  world.expect_nothing_left();
}

// The number of the one pipeline that has a part at the worker.
uint64_t pipeline_at(const Worker& worker) {
  Inspection seen(100);
  worker.service<pipeline::internal::PipelineService>()->put_inspection(&seen);
  const auto& rows = seen.tables().front().rows();
  uint64_t number = 0;
  EXPECT_EQ(rows.size(), 1u);
  EXPECT_TRUE(rows.size() == 1 && absl::SimpleAtoi(std::get<std::string>(rows[0][0]), &number));
  return number;
}

TEST(Pipeline, BadInput_ASlotThatIsFilledTwice) {
  World world(pipeline::gpipe(2, 2));
  Worker& to = (*world.cluster)[1];
  pipeline::internal::PutMessage message{.worker = 1, .step = 3, .edge = 0, .micro_batch = 1};
  message.pipeline = pipeline_at(to);
  message.of = to.service<pipeline::internal::PipelineService>()->digest(message.pipeline).value();
  const auto put = [&](const pipeline::internal::PutMessage& m) {
    return std::string(pipeline::internal::ask<pipeline::internal::PipelineMessage>(
                           (*world.cluster)[0], to.info(), "@pipeline.put", m, {})
                           .try_wait()
                           .status()
                           .message());
  };
  EXPECT_EQ(put(message), "");
  EXPECT_THAT(put(message), HasSubstr("a second time: result of stage 0, micro-batch 1, step 3"));
  for (const auto& [edge, what] : {std::pair<int64_t, std::string>{1, "edge 1, micro-batch 1"},
                                   {-1, "edge -1, micro-batch 1"}}) {
    auto other = message;
    other.edge = edge;
    EXPECT_THAT(put(other), HasSubstr(what));
  }
  auto back = message;
  back.backward = true;
  EXPECT_THAT(put(back), HasSubstr("edge 0>1 does not end at this worker"));
  // None of these ended the pipeline.
  EXPECT_GT(world.pipe->step({batch(4, 1)}, batch(4, 0.5)).loss, 0);
}

// One worker's part is made anew, of something else than the others': none of them runs an action with
// it, and each says which worker and what.
TEST(Pipeline, BadInput_AnotherPlanSeedOrPartitionAtOneWorker) {
  const auto adjust = [](int, JoinOptions* join) {
    join->services.pop_back();
    join->services.push_back(pipeline_service(
        {.make_compute = [](const ServiceContext& context, const pipeline::Plan&, int) {
          return std::make_shared<VCompute>(context.runtime, pipeline::StageCost{});
        }}));
  };
  using pipeline::internal::ask;
  using pipeline::internal::OpenMessage;
  using pipeline::internal::PipelineMessage;
  const std::map<std::string, std::function<void(OpenMessage*)>> changes = {
      {"plan", [](OpenMessage* m) { m->plan = pipeline::to_text(pipeline::gpipe(3, 4)); }},
      {"seed", [](OpenMessage* m) { m->seed = 8; }},
      {"partition", [](OpenMessage* m) { m->tied.resize(3, {"weight"}); }},
      {"options", [](OpenMessage* m) { m->first_step = 1; }}};
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    World world(pipeline::one_f_one_b(3, 4), {.seed = 7}, false, adjust);
    const Worker& maker = (*world.cluster)[0];
    const Worker& other = (*world.cluster)[1];
    OpenMessage message{.pipeline = pipeline_at(other), .plan = pipeline::to_text(world.plan)};
    message.self = 1;
    for (size_t w = 0; w < 3; ++w) message.workers.push_back((*world.cluster)[w].info());
    message.loss = "app.squares";
    message.has_seed = true;
    message.seed = 7;
    message.deadline_ns = absl::ToInt64Nanoseconds(absl::Seconds(60));
    const auto ends = [&] {
      ask<PipelineMessage>(maker, other.info(), "@pipeline.close",
                           PipelineMessage{message.pipeline}, {})
          .wait();
      ask<PipelineMessage>(maker, other.info(), "@pipeline.open", message, {}).wait();
      return error_of([&] {
        world.pipe->step_async(std::vector<pipeline::Tensors>(4, {batch(1, 1)}), {}, {1, 1, 1, 1})
            .wait();
      });
    };
    EXPECT_TRUE(ends().ok());  // the same once more
    change(&message);
    const Status status = ends();
    EXPECT_EQ(error_kind(status), ErrorKind::kInvalidArgument) << status;
    const std::string want = absl::StrCat("differ in the pipeline's ", what);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(want), HasSubstr("'worker1'")));
    for (size_t w = 0; w < 3; ++w) {
      Inspection seen(100);
      (*world.cluster)[w].service<pipeline::internal::PipelineService>()->put_inspection(&seen);
      EXPECT_THAT(seen.text(), AllOf(HasSubstr(want), HasSubstr("'worker1'"))) << w;
    }
    world.expect_nothing_left();
  }
}

TEST(Pipeline, AWorkerThatLeavesEndsTheStep) {
  auto world = std::make_unique<World>(pipeline::one_f_one_b(2, 2));
  world->pipe->step({batch(2, 1)}, batch(2, 0.5));
  (*world->cluster)[1].shutdown({.graceful = false});
  const Status status = error_of([&] { world->pipe->step({batch(2, 1)}, batch(2, 0.5)); });
  EXPECT_THAT(std::string(status.message()), HasSubstr("worker1"));
  EXPECT_EQ(counter((*world->cluster)[0], "pipeline_slots"), 0);
  world->pipe->close();
  world->blocks.clear();
  (*world->cluster)[0].shutdown({.graceful = false});
  world->cluster->forget();
}

// The split alone, with skips, a weight used twice on a path, and outputs of which some are unused.
TEST(Split, PP_4_EqualsTheWholeBackward) {
  for (const bool with_input : {true, false}) {
    const at::Tensor w = at::sin(at::arange(9, at::kFloat)).reshape({3, 3});
    const auto run = [&](bool split) {
      at::Tensor a = w.clone().set_requires_grad(true);
      at::Tensor b = (w + 1).clone().set_requires_grad(true);
      at::Tensor c = (w - 1).clone().set_requires_grad(true);
      at::Tensor x = at::cos(w);
      at::Tensor z = at::cos(w * 2);
      if (with_input) {
        x.set_requires_grad(true);
        z.set_requires_grad(true);
      }
      at::Tensor h = at::tanh(at::matmul(x, a));
      h = at::matmul(h, a) + x + at::matmul(z, b.exp());
      const at::Tensor y0 = at::matmul(h, b);
      const at::Tensor y1 = c * c;  // no input reaches it
      const at::Tensor y2 = h.sum();
      const at::Tensor g = at::cos(w * 3);
      std::vector<at::Tensor> out;
      if (split) {
        pipeline::internal::SplitBackward s({y0, y1, y2}, {x, z});
        out = s.input_grads({g, g * 2, at::Tensor()});
        if (with_input) {
          EXPECT_TRUE(out[0].defined());
        }
        s.weight_grads();
        out.resize(2);
      } else {
        torch::autograd::backward({y0, y1}, {g, g * 2});
        out = {x.grad(), z.grad()};
      }
      for (const at::Tensor& p : {a, b, c}) out.push_back(p.grad());
      return out;
    };
    const auto whole = run(false);
    const auto parts = run(true);
    ASSERT_EQ(whole.size(), parts.size());
    for (size_t i = 0; i < whole.size(); ++i) {
      ASSERT_EQ(whole[i].defined(), parts[i].defined()) << i;
      if (whole[i].defined()) {
        EXPECT_TRUE(torch::equal(whole[i], parts[i])) << i;
      }
    }
  }
}

}  // namespace
}  // namespace weft::testing
