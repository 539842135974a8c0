// A pipeline that has lost a worker goes on from the last step, bit for bit as without the loss:
// rebuild() has lost stages made anew elsewhere, healthy workers stay, and every stage gets back its
// state.
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor input(int step) { return numbers(8, 0.3 + 0.1 * step); }
at::Tensor target() { return numbers(8, 0.8); }

std::vector<State> states_of(const pipeline::Pipeline& p) {
  std::vector<State> out;
  for (int s = 0; s < p.plan().stages(); ++s) out.push_back(p.state_dict(s));
  return out;
}

pipeline::PipelineOptions training() {
  return {.loss = "app.squares", .optimizer = optimizer_choice<optim::Adam>({.lr = 0.01})};
}

constexpr int kSteps = 6;

// What a run without a loss gives.
struct Undisturbed {
  std::vector<double> losses;
  std::vector<State> states;
};
Undisturbed undisturbed(const pipeline::Plan& plan) {
  Undisturbed out;
  World world(plan, training());
  for (int k = 0; k < kSteps; ++k) {
    out.losses.push_back(world.pipe->step({input(k)}, target()).loss);
  }
  out.states = states_of(*world.pipe);
  return out;
}

// Workers, some of them without a stage at first, and a pipeline that loses some.
class Losses {
 public:
  Losses(const pipeline::Plan& plan, int spare, pipeline::PipelineOptions options)
      : plan_(plan), want_(undisturbed(plan)) {
    ClusterOptions o;
    o.size = static_cast<int>(plan.workers.size()) + spare;
    o.library = model_library();
    o.adjust = [](int, JoinOptions* join) { add_pipeline_services(join); };
    cluster_ = std::make_unique<Cluster>(o);
    for (int s = 0; s < plan.stages(); ++s) make(s, plan.placement[s]);
    pipe_ = std::make_unique<pipeline::Pipeline>(
        (*cluster_)[0], std::vector<pipeline::Stage>(blocks_.begin(), blocks_.end()), plan,
        std::move(options));
  }
  ~Losses() {
    pipe_->close();
    blocks_.clear();
    for (size_t w = 0; w < cluster_->size(); ++w) {
      if (lost_.count(static_cast<int>(w)) > 0) continue;
      EXPECT_EQ(counter((*cluster_)[w], "pipelines"), 0) << w;
      EXPECT_EQ(counter((*cluster_)[w], "pipeline_slots"), 0) << w;
      EXPECT_EQ(counter((*cluster_)[w], "pipeline_modules"), 0) << w;
      (*cluster_)[w].shutdown({.graceful = false});
    }
    cluster_->forget();
  }
  pipeline::Pipeline& pipe() { return *pipe_; }

  void train(int until) {
    for (; step_ < until; ++step_) {
      EXPECT_EQ(pipe_->step({input(step_)}, target()).loss, want_.losses[step_]) << step_;
    }
  }
  // While a step runs.
  void lose(const std::set<int>& workers) {
    auto broken = pipe_->step_async({input(step_)}, target());
    for (const int w : workers) (*cluster_)[w].shutdown({.graceful = false});
    lost_.insert(workers.begin(), workers.end());
    // Whether it was quicker or not.
    const Status ended = broken.try_wait().status();
    if (ended.ok()) {
      ++step_;
    } else {
      EXPECT_THAT(std::string(ended.message()),
                  HasSubstr("'worker" + std::to_string(*workers.begin()) + "'"));
    }
  }
  // The lost stages at worker `to`.
  void rebuild(int to, const pipeline::RebuildOptions& options = {}) {
    EXPECT_EQ(pipe_->rebuild([&](int s) { return pipeline::Stage(make(s, to)); }, options), step_);
    EXPECT_EQ(pipe_->next_step(), step_);
  }
  void expect_as_undisturbed() {
    train(kSteps);
    expect_equal(states_of(*pipe_), want_.states);
  }
  int step() const { return step_; }

 private:
  const RemoteModule<BlockImpl>& make(int stage, int at) {
    RemoteModule<BlockImpl> block((*cluster_)[0], "worker" + std::to_string(at), int64_t{stage},
                                  false);
    if (static_cast<int>(blocks_.size()) <= stage) return blocks_.emplace_back(std::move(block));
    return blocks_[stage] = std::move(block);
  }

  const pipeline::Plan plan_;
  const Undisturbed want_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<RemoteModule<BlockImpl>> blocks_;
  std::unique_ptr<pipeline::Pipeline> pipe_;
  std::set<int> lost_;
  int step_ = 0;
};

pipeline::PipelineOptions with_copies() {
  pipeline::PipelineOptions o = training();
  o.keep_copies = true;
  return o;
}

class Rebuild : public ::testing::TestWithParam<std::string> {};

// At a worker that had no stage, and then at one that has one already.
TEST_P(Rebuild, PP_9_FromTheLastStepAsIfNothingHadHappened) {
  Losses run(*pipeline::make_schedule(GetParam(), 3, 4), /*spare=*/1, with_copies());
  run.train(2);
  run.lose({1});
  run.rebuild(3);
  run.train(run.step() + 1);
  run.lose({2});
  run.rebuild(0);
  run.expect_as_undisturbed();
}
INSTANTIATE_TEST_SUITE_P(Schedules, Rebuild, ::testing::Values("1f1b", "zb-h1", "zb-v"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Rebuild, PP_9_BeforeTheFirstStepAndTwiceInARow) {
  Losses run(pipeline::one_f_one_b(3, 4), /*spare=*/1, with_copies());
  run.lose({2});
  run.rebuild(3);
  run.lose({1});
  run.rebuild(3);
  run.expect_as_undisturbed();
}

// A stage's copy is at its neighbour, so two neighbours that are lost together take it with them.
TEST(Rebuild, PP_9_LostWithItsCopies) {
  Losses run(pipeline::gpipe(4, 4), /*spare=*/1, with_copies());
  run.train(1);
  run.lose({1, 3});  // not neighbours
  run.rebuild(4);
  const int steps = run.step();
  const std::vector<State> kept = states_of(run.pipe());
  run.lose({2, 4});  // stages 1, 2 and 3
  try {
    run.pipe().rebuild([](int) -> pipeline::Stage { throw std::logic_error("not asked"); });
    ADD_FAILURE() << "rebuilt";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kState);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the stages of worker 'worker4', 'worker2'"),
                                    HasSubstr("give RebuildOptions::checkpoint or state")));
  }
  if (run.step() > steps) return;  // the step was quicker: its state was not taken
  run.rebuild(0, {.state = [&](int s) { return kept[s]; }, .steps = steps});
  run.expect_as_undisturbed();
}

// With states of the caller's own; and without a loss, after a stage that threw.
TEST(Rebuild, PP_9_FromStatesThatAreGiven) {
  Losses run(pipeline::zb_h1(2, 4), /*spare=*/1, training());
  run.train(2);
  const std::vector<State> kept = states_of(run.pipe());
  run.lose({1});
  if (run.step() > 2) return;  // the step was quicker: its state was not taken
  run.rebuild(2, {.state = [&](int s) { return kept[s]; }, .steps = 2});
  run.expect_as_undisturbed();
}

TEST(Rebuild, AStageThatThrewGoesOn) {
  pipeline::PipelineOptions options = with_copies();
  World world(pipeline::one_f_one_b(3, 4), options);
  const Undisturbed want = undisturbed(world.plan);
  EXPECT_EQ(world.pipe->step({input(0)}, target()).loss, want.losses[0]);
  world.blocks[1].rpc_sync(&BlockImpl::throw_in, int64_t{3});
  EXPECT_THROW(world.pipe->step({input(1)}, target()), Error);
  EXPECT_EQ(world.pipe->rebuild(nullptr), 1);
  for (int k = 1; k < kSteps; ++k) {
    EXPECT_EQ(world.pipe->step({input(k)}, target()).loss, want.losses[k]);
  }
  // Also while all goes well: what was done stays done.
  EXPECT_EQ(world.pipe->rebuild(nullptr), kSteps);
  expect_equal(states_of(*world.pipe), want.states);
}

TEST(Rebuild, BadInput_WhatCannotBeRebuilt) {
  const auto refused = [&](const std::function<void()>& fn, ErrorKind kind) {
    try {
      fn();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  {
    World world(pipeline::gpipe(2, 2), training());
    world.pipe->step({input(0)}, target());
    EXPECT_THAT(refused([&] { world.pipe->rebuild(nullptr); }, ErrorKind::kState),
                AllOf(HasSubstr("it keeps no copies"), HasSubstr("keep_copies")));
    EXPECT_THAT(refused([&] { world.pipe->rebuild(nullptr, {.plan = pipeline::gpipe(3, 2)}); },
                        ErrorKind::kInvalidArgument),
                HasSubstr("a pipeline of 2 stages with a plan of 3"));
    world.pipe->close();
    EXPECT_THAT(refused([&] { world.pipe->rebuild(nullptr); }, ErrorKind::kState),
                HasSubstr("the pipeline is closed"));
  }
  {
    World world(pipeline::gpipe(1, 2), training());
    EXPECT_THAT(refused([&] { world.make(with_copies()); }, ErrorKind::kInvalidArgument),
                HasSubstr("keep_copies needs a second worker"));
  }
  Losses run(pipeline::gpipe(2, 2), /*spare=*/0, with_copies());
  run.lose({1});
  EXPECT_THAT(refused([&] { run.pipe().rebuild(nullptr); }, ErrorKind::kInvalidArgument),
              HasSubstr("worker 'worker1' with stage 1 is gone, and nothing replaces it"));
  run.rebuild(0);  // it may be tried again
  run.expect_as_undisturbed();
}

TEST(Resume, BadInput_StatesThatDoNotFit) {
  World world(pipeline::gpipe(2, 2), training());
  const pipeline::Pipeline& pipe = *world.pipe;
  world.pipe->step({input(0)}, target());
  const State good = pipe.state_dict(1);
  EXPECT_EQ(good.count("optimizer/weight/steps"), 1u);
  const auto refused = [&](int stage, const State& state) {
    try {
      pipe.load_state_dict(stage, state);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument) << error.what();
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refused(2, good), HasSubstr("no stage 2 of 2"));
  State bad = good;
  bad.erase("weight");
  EXPECT_THAT(refused(1, bad), AllOf(HasSubstr("stage 1"), HasSubstr("weight")));
  bad = good;
  bad.erase("optimizer/bias/exp_avg");
  bad["bias"] = at::ones({kWidth});
  EXPECT_THAT(refused(1, bad), HasSubstr("'bias/exp_avg' is missing"));
  bad["optimizer/bias/exp_avg"] = at::ones({2});
  EXPECT_THAT(refused(1, bad), HasSubstr("'bias/exp_avg' has another shape"));
  bad = good;
  bad["optimizer/nine/steps"] = at::ones({1});
  EXPECT_THAT(refused(1, bad), HasSubstr("knows"));
  bad = good;
  bad["optimizer/weight/steps"] = at::ones({3});
  EXPECT_THAT(refused(1, bad), HasSubstr("'weight/steps' is no number"));
  // Nothing has changed.
  expect_equal({pipe.state_dict(1)}, {good});
}

}  // namespace
}  // namespace weft::testing
