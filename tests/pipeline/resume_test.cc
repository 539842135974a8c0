// A pipeline that has lost a worker goes on from the last step, bit for bit as without the loss:
// stages are made anew elsewhere, healthy workers stay, and every stage gets back its state.
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "weft/tests/pipeline/model.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using State = std::map<std::string, at::Tensor>;

at::Tensor numbers(int64_t n, double factor) {
  return at::cos(at::arange(n * kWidth, at::kFloat) * factor).reshape({n, kWidth});
}
at::Tensor input(int step) { return numbers(8, 0.3 + 0.1 * step); }
at::Tensor target() { return numbers(8, 0.8); }

std::vector<State> states_of(const pipeline::Pipeline& p) {
  std::vector<State> out;
  for (int s = 0; s < p.plan().stages(); ++s) out.push_back(p.state_dict(s));
  return out;
}

void expect_equal(const std::vector<State>& a, const std::vector<State>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t s = 0; s < a.size(); ++s) {
    ASSERT_EQ(a[s].size(), b[s].size());
    for (const auto& [name, tensor] : a[s]) {
      ASSERT_EQ(b[s].count(name), 1u) << name;
      EXPECT_TRUE(torch::equal(tensor, b[s].at(name))) << "stage " << s << " " << name;
    }
  }
}

pipeline::PipelineOptions training() {
  return {.loss = "app.squares", .optimizer = optimizer_choice<optim::Adam>({.lr = 0.01})};
}

constexpr int kSteps = 6;

class Resume : public ::testing::TestWithParam<std::string> {};

TEST_P(Resume, PP_9_FromTheLastStepAsIfNothingHadHappened) {
  const int p = 3;
  const pipeline::Plan plan = *pipeline::make_schedule(GetParam(), p, 4);
  std::vector<double> losses;
  std::vector<State> want;
  {
    World world(plan, training());
    for (int k = 0; k < kSteps; ++k) losses.push_back(world.pipe->step({input(k)}, target()).loss);
    want = states_of(*world.pipe);
  }
  // One worker more, which has no stage at first.
  ClusterOptions o;
  o.size = p + 1;
  o.library = model_library();
  o.adjust = [](int, JoinOptions* join) { add_pipeline_services(join); };
  auto cluster = std::make_unique<Cluster>(o);
  const Worker& maker = (*cluster)[0];
  std::vector<RemoteModule<BlockImpl>> blocks;
  for (int s = 0; s < plan.stages(); ++s) {
    blocks.emplace_back(maker, "worker" + std::to_string(plan.placement[s]), int64_t{s}, false);
  }
  auto pipe = std::make_unique<pipeline::Pipeline>(
      maker, std::vector<pipeline::Stage>(blocks.begin(), blocks.end()), plan, training());
  std::vector<State> last = states_of(*pipe);
  const int lost = 1;
  int step = 0;
  for (; step < 3; ++step) {
    EXPECT_EQ(pipe->step({input(step)}, target()).loss, losses[step]);
    last = states_of(*pipe);
  }
  auto broken = pipe->step_async({input(step)}, target());
  (*cluster)[lost].shutdown({.graceful = false});
  // Whether it was quicker or not: the lost worker's state after it is known to nobody.
  const Status ended = broken.try_wait().status();
  if (!ended.ok()) {
    EXPECT_THAT(std::string(ended.message()), HasSubstr("'worker1'"));
  }
  pipe->close();
  // The lost stages at the worker that had none; the others stay where they are.
  for (int s = 0; s < plan.stages(); ++s) {
    if (plan.placement[s] != lost) continue;
    blocks[s] = RemoteModule<BlockImpl>(maker, "worker" + std::to_string(p), int64_t{s}, false);
  }
  pipe = std::make_unique<pipeline::Pipeline>(
      maker, std::vector<pipeline::Stage>(blocks.begin(), blocks.end()), plan, training());
  for (int s = 0; s < plan.stages(); ++s) pipe->load_state_dict(s, last[s]);
  expect_equal(states_of(*pipe), last);
  for (; step < kSteps; ++step) {
    EXPECT_EQ(pipe->step({input(step)}, target()).loss, losses[step]) << step;
  }
  expect_equal(states_of(*pipe), want);
  pipe->close();
  blocks.clear();
  for (const size_t w : {0u, 2u, 3u}) (*cluster)[w].shutdown({.graceful = false});
  cluster->forget();
}
INSTANTIATE_TEST_SUITE_P(Schedules, Resume, ::testing::Values("1f1b", "zb-h1"),
                         [](const auto& info) { return info.param == "1f1b" ? "1f1b" : "zb_h1"; });

TEST(Resume, BadInput_StatesThatDoNotFit) {
  World world(pipeline::gpipe(2, 2), training());
  const pipeline::Pipeline& pipe = *world.pipe;
  world.pipe->step({input(0)}, target());
  const State good = pipe.state_dict(1);
  EXPECT_EQ(good.count("optimizer/0/steps"), 1u);
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
  bad.erase("optimizer/1/exp_avg");
  bad["bias"] = at::ones({kWidth});
  EXPECT_THAT(refused(1, bad), HasSubstr("'1/exp_avg' is missing"));
  bad["optimizer/1/exp_avg"] = at::ones({2});
  EXPECT_THAT(refused(1, bad), HasSubstr("'1/exp_avg' has another shape"));
  bad = good;
  bad["optimizer/9/steps"] = at::ones({1});
  EXPECT_THAT(refused(1, bad), HasSubstr("knows"));
  bad = good;
  bad["optimizer/0/steps"] = at::ones({3});
  EXPECT_THAT(refused(1, bad), HasSubstr("'0/steps' is no number"));
  // Nothing has changed.
  expect_equal({pipe.state_dict(1)}, {good});
}

}  // namespace
}  // namespace weft::testing
