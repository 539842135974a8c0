// Steps of layers whose pushes leave within the backward.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "torch/nn/functional/embedding.h"
#include "torch/nn/functional/linear.h"
#include "torch/types.h"
#include "weft/common/future.h"
#include "weft/common/sim.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/ps/layers.h"
#include "weft/ps/trainer.h"
#include "weft/rpc/call.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"

namespace weft::testing {
namespace {

namespace F = torch::nn::functional;

constexpr int64_t kInputs = 3;
constexpr double kStep = 0.5;

at::Tensor cube(const at::Tensor& x) { return (x * x * x).sum(); }

// An embedding below a linear layer, and what LibTorch has for the same.
class TwoLayers {
 public:
  explicit TwoLayers(ps::Client& client)
      : words(client.open_table("e", rows())), head(client.open_table("h", matrix()), kInputs, 2) {
    read();
  }

  at::Tensor rows_of(int64_t step) { return words.forward(ids(step)); }
  at::Tensor forward(int64_t step) { return head.forward(rows_of(step)); }
  // A step of SGD of what LibTorch computes, with which the tables are compared.
  void expect_step(int64_t step, const std::function<at::Tensor(const at::Tensor&)>& loss) {
    loss(F::linear(F::embedding(ids(step), rows_), weight_, bias_)).backward();
    const auto stepped = [](const at::Tensor& leaf) { return leaf.detach() - kStep * leaf.grad(); };
    const at::Tensor rows = stepped(rows_);
    const at::Tensor weight = stepped(weight_);
    const at::Tensor bias = stepped(bias_);
    read();
    for (const auto& [got, want] : {std::pair(rows_, rows), {weight_, weight}, {bias_, bias}}) {
      EXPECT_TRUE(torch::allclose(got, want, 1e-12, 1e-12)) << got << "\nwanted\n" << want;
    }
  }

  static at::Tensor ids(int64_t step) {
    return (torch::arange(6) * (step + 2)).fmod(5).view({2, 3});
  }

  ps::Embedding words;
  ps::Linear head;

 private:
  static ps::TableDefinition rows() {
    auto out = ps::sparse(kInputs, ps::rule<optim::SGD>({.lr = kStep}));
    out.dtype = torch::kFloat64;
    out.init = ps::Init::uniform(-1, 1, 5);
    return out;
  }
  static ps::TableDefinition matrix() {
    auto out = ps::Linear::definition(kInputs, 2, ps::rule<optim::SGD>({.lr = kStep}), true, 7);
    out.dtype = torch::kFloat64;
    return out;
  }
  // What the tables have.
  void read() {
    const auto leaf = [](const at::Tensor& values) { return values.clone().requires_grad_(true); };
    rows_ = leaf(words.table().pull_rows(torch::arange(5)).wait());
    const at::Tensor flat = head.table().pull().wait().reshape({-1});
    weight_ = leaf(flat.narrow(0, 0, 2 * kInputs).view({2, kInputs}));
    bias_ = leaf(flat.narrow(0, 2 * kInputs, 2));
  }

  at::Tensor rows_;
  at::Tensor weight_;
  at::Tensor bias_;
};

class PsStepInBackward : public PsTest {};
INSTANTIATE_TEST_SUITE_P(Nets, PsStepInBackward, ::testing::ValuesIn(nets()), net_name);

// The embedding's gradient does not come before another client has seen the head's push.
TEST_P(PsStepInBackward, PS_11_APushLeavesBeforeTheBackwardHasEnded) {
  PsJob job(2, 2, GetParam());
  TwoLayers model(job.clients[0]);
  const ps::Table other = job.clients[1].open_table("h", model.head.table().definition());
  for (int64_t step = 0; step < 3; ++step) {
    const at::Tensor before = other.pull().wait();
    model.words.step_in_backward();
    model.head.step_in_backward();
    const at::Tensor rows = model.rows_of(step);
    rows.register_hook([&](const at::Tensor&) {
      int pulls = 0;
      while (torch::equal(other.pull().wait(), before) && pulls < 10'000) ++pulls;
      EXPECT_LT(pulls, 10'000) << "the head's push has not left";
      EXPECT_EQ(model.words.table().clock(), static_cast<uint64_t>(step));
    });
    model.head.forward(rows).sin().sum().backward();
    EXPECT_EQ(model.words.table().clock(), static_cast<uint64_t>(step) + 1) << "it has left";
    for (const auto& pushed : {model.words.step(), model.head.step()}) pushed.wait();
    EXPECT_EQ(model.head.table().stats().pushes, static_cast<uint64_t>(step) + 1) << "once";
    EXPECT_EQ(model.head.table().clock(), static_cast<uint64_t>(step) + 1);
    model.expect_step(step, [](const at::Tensor& out) { return out.sin().sum(); });
  }
}

TEST_P(PsStepInBackward, PS_11_ABackwardOfAContextPushes) {
  PsJob job(2, 1, GetParam(), nullptr, [](int, JoinOptions* o) {
    o->services.push_back(dist_autograd_service());
    o->library = Library("layers");
    o->library.def("cube", &cube);
  });
  TwoLayers model(job.clients[0]);
  for (int64_t step = 0; step < 3; ++step) {
    {
      DistAutogradContext context(job.worker(0));
      model.words.step_in_backward();
      model.head.step_in_backward();
      const at::Tensor weight = model.head.weight();
      const at::Tensor out = model.forward(step);
      context.backward({rpc_sync(job.worker(0), "ps1", &cube, out)});
      EXPECT_FALSE(weight.grad().defined());
      EXPECT_EQ(model.words.table().clock(), static_cast<uint64_t>(step) + 1);
      EXPECT_EQ(model.head.table().clock(), static_cast<uint64_t>(step) + 1);
      for (const auto& pushed : {model.words.step(context), model.head.step(context)}) {
        pushed.wait();
      }
    }
    EXPECT_EQ(model.head.table().stats().pushes, static_cast<uint64_t>(step) + 1);
    model.expect_step(step, &cube);
  }
}

// What the backward has not decided, step() does: gradients that are missing, or added up.
TEST_F(PsTest, PS_11_WhatABackwardDoesNotBringIsPushedByTheStep) {
  PsJob job(1, 1);
  TwoLayers model(job.clients[0]);
  const auto loss = [](const at::Tensor& out) { return out.sin().sum(); };
  // A forward whose result is not used.
  model.words.step_in_backward({.rate = kStep / 2});
  (void)model.rows_of(3);
  (2 * loss(model.forward(0))).backward();
  EXPECT_EQ(model.words.table().clock(), 0U);
  for (const auto& pushed : {model.words.step(), model.head.step({.rate = kStep / 2})})
    pushed.wait();
  model.expect_step(0, loss);
  // Two backwards, the first of which reaches one of two forwards.
  model.words.step_in_backward();
  const at::Tensor first = model.rows_of(1);
  const at::Tensor second = model.head.forward(model.rows_of(1));
  (0 * first.sum()).backward({}, /*retain_graph=*/true);
  (0 * first.sum()).backward();
  loss(second).backward();
  EXPECT_EQ(model.words.table().clock(), 1U);
  for (const auto& pushed : {model.words.step(), model.head.step()}) pushed.wait();
  model.expect_step(1, loss);
  // No backward at all: the step ends.
  model.words.step_in_backward();
  (void)model.rows_of(2);
  model.words.step().wait();
  EXPECT_EQ(model.words.table().stats().pushes, 2U);
  EXPECT_EQ(model.words.table().clock(), 3U);
}

TEST_F(PsTest, BadInput_a_forward_after_the_push_of_its_step) {
  PsJob job(1, 1);
  TwoLayers model(job.clients[0]);
  const auto kind = ErrorKind::kState;
  model.words.step_in_backward();
  model.head.step_in_backward();
  model.forward(0).sum().backward();
  expect_ps_error(ps_error_of([&] { (void)model.rows_of(1); }), kind, {"table 'e'", "step() ends"});
  expect_ps_error(ps_error_of([&] {
                    (void)model.head.forward(torch::ones({1, kInputs}, torch::kFloat64));
                  }),
                  kind, {"table 'h'"});
  expect_ps_error(ps_error_of([&] { model.words.step_in_backward(); }), kind, {"table 'e'"});
  {
    const at::NoGradGuard no_grad;  // keeps nothing, so nothing is lost
    EXPECT_EQ(model.rows_of(1).sizes(), (std::vector<int64_t>{2, 3, kInputs}));
  }
  model.words.step().wait();
  model.head.drop();  // forgets it
  model.forward(1).sum().backward();
  for (const auto& pushed : {model.words.step(), model.head.step()}) pushed.wait();
  EXPECT_EQ(model.words.table().stats().pushes, 2U);
  EXPECT_EQ(model.head.table().stats().pushes, 2U);
}

// A push that is on its way does not change when another backward adds to the gradient of its leaf.
TEST_F(PsTest, PS_11_ALinearWithoutBiasPushesWhatItHadAtTheStep) {
  in_simulation(23, [](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(23);
    PsJob job(1, 1, Net::kInproc, sim,
              [&](int, JoinOptions* o) { o->transport = faulty_transport(o->transport, plan); });
    const auto definition =
        ps::Linear::definition(2, 3, ps::rule<optim::SGD>({.lr = 1.0}), false, 1);
    ps::Linear layer(job.clients[0].open_table("l", definition), 2, 3, false);
    const at::Tensor before = layer.weight().detach().clone();
    plan->add({.fault = Fault::kDelay,
               .kind = FrameKind::kRequest,
               .from = "c0",
               .delay = absl::Milliseconds(15)});
    const at::Tensor loss = layer.forward(torch::ones({1, 2})).sum();
    loss.backward({}, /*retain_graph=*/true);
    const auto pushed = layer.step();
    loss.backward();
    pushed.wait();
    plan->clear();
    EXPECT_TRUE(torch::equal(layer.weight().detach(), before - 1));
  });
}

// A layer whose push takes a second.
class SlowLayer final : public ps::Layer {
 public:
  SlowLayer(ps::Table table, SimRuntime& sim, std::function<void()> pushing)
      : Layer(std::move(table), {}), sim_(sim), pushing_(std::move(pushing)) {
    leaf_ = torch::ones({2}).requires_grad_(true);
  }
  ~SlowLayer() override { end_in_backward(); }
  const at::Tensor& leaf() const { return leaf_; }

 private:
  Future<ps::PushResult> push(const ps::internal::LeafGradients& /*gradients*/,
                              const ps::StepOptions& /*options*/) override {
    sim_.sleep(absl::Seconds(1));
    pushing_();
    Promise<ps::PushResult> pushed;
    pushed.set_value({});
    return pushed.future();
  }
  void forget() override {}
  std::vector<at::Tensor> leaves() const override { return {leaf_}; }

  SimRuntime& sim_;
  const std::function<void()> pushing_;
  at::Tensor leaf_;
};

// The push uses the layer, which the thread of a backward does not keep alive.
TEST_F(PsTest, PS_11_ALayerOutlivesThePushThatABackwardMakes) {
  in_simulation(29, [](const std::shared_ptr<SimRuntime>& sim) {
    PsJob job(1, 1, Net::kInproc, sim);
    const ps::Table table =
        job.clients[0].open_table("t", ps::dense({2}, ps::rule<optim::SGD>({})));
    for (const bool by_step : {false, true}) {
      bool ended = false;
      int pushes = 0;
      auto layer = std::make_unique<SlowLayer>(table, *sim, [&] {
        EXPECT_FALSE(ended) << "while its push was being made";
        ++pushes;
      });
      layer->step_in_backward();
      const at::Tensor loss = layer->leaf().sum();
      side_by_side(*sim, {[&] { loss.backward(); },
                          [&] {
                            sim->sleep(absl::Milliseconds(500));
                            if (by_step) {
                              layer->step().wait();
                            } else {
                              layer.reset();
                            }
                            ended = true;
                          }});
      EXPECT_EQ(pushes, 1);
    }
  });
}

TEST_F(PsTest, PS_11_ATrainerPushesWithinTheBackward) {
  for (const int ahead : {0, 2}) {
    std::vector<at::Tensor> values;
    for (const bool in_backward : {false, true}) {
      PsJob job(2, 1);
      TwoLayers model(job.clients[0]);
      ps::Trainer trainer(
          {&model.words, &model.head},
          {.ahead = ahead, .refresh = true, .in_backward = in_backward, .rate = [](int64_t step) {
             return 0.1 / static_cast<double>(step + 1);
           }});
      int64_t made = 0;
      uint64_t pushed = 0;
      const ps::TrainerReport report =
          trainer.run([&] { return made == 8 ? std::nullopt : std::optional<int64_t>(made++); },
                      [&](int64_t step) { model.words.prefetch(TwoLayers::ids(step)); },
                      [&](int64_t step) {
                        const at::Tensor loss = model.forward(step).sin().sum();
                        // The push of the step before may be under way, and this one would wait for it.
                        const ps::Table& table = model.words.table();
                        while (table.stats().pushes < static_cast<uint64_t>(step)) {
                          (void)table.pull_rows(torch::arange(1)).wait();
                        }
                        const uint64_t before = table.clock();
                        loss.backward();
                        pushed += table.clock() - before;
                      });
      EXPECT_EQ(report.steps, 8);
      EXPECT_EQ(pushed, in_backward ? 8U : 0U);
      EXPECT_EQ(model.words.table().stats().pushes, 8U);
      values.push_back(model.words.table().pull_rows(torch::arange(5)).wait());
      values.push_back(model.head.table().pull().wait());
    }
    EXPECT_TRUE(torch::equal(values[0], values[2]));
    EXPECT_TRUE(torch::equal(values[1], values[3]));
  }
}

}  // namespace
}  // namespace weft::testing
