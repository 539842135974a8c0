// Layers on tables against LibTorch's own, and the trainer that pulls ahead.

#include <optional>

#include "absl/strings/str_cat.h"
#include "torch/nn/functional/embedding.h"
#include "torch/nn/functional/linear.h"
#include "torch/types.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/service.h"
#include "weft/ps/layers.h"
#include "weft/ps/trainer.h"
#include "weft/rpc/call.h"
#include "weft/tests/ps/fixture.h"
#include "weft/transport/faulty_transport.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {
namespace {

namespace F = torch::nn::functional;
using ps::Table;
using namespace std::chrono_literals;  // NOLINT

constexpr int64_t kIds = 20;
constexpr int64_t kWidth = 3;
constexpr double kRate = 0.5;

ps::TableDefinition rows_of_doubles() {
  auto out = ps::sparse(kWidth, ps::rule<optim::SGD>({.lr = kRate}));
  out.dtype = torch::kFloat64;
  out.init = ps::Init::uniform(-1, 1, 5);
  return out;
}
at::Tensor all_rows(const Table& table) { return table.pull_rows(torch::arange(kIds)).wait(); }
// A leaf with the same values.
at::Tensor local(const at::Tensor& values) { return values.clone().requires_grad_(true); }
void expect_near(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(torch::allclose(got, want, 1e-12, 1e-12)) << got << "\nwanted\n" << want;
}
at::Tensor ids_of(int64_t step) { return (torch::arange(12) * (step + 3)).fmod(7).view({4, 3}); }

// At the other worker: what a forward of a tensor that came from here leads to.
at::Tensor squares(const at::Tensor& x) { return (x * x).sum(); }

class PsLayers : public PsTest {};
INSTANTIATE_TEST_SUITE_P(Nets, PsLayers, ::testing::ValuesIn(nets()), net_name);

// No copy of them is made, and what is added to a leaf's gradient after its push is none of the server's.
TEST_P(PsLayers, PS_11_GradientsOfRowsLieWhereTheServerReadsThem) {
  const bool shares = GetParam() == Net::kGrpc;
  PsJob job(1, 1, GetParam(), nullptr, [&](int, JoinOptions* o) {
    if (shares) o->transport = grpc_transport();
  });
  const auto counter = [&](const char* name) {
    return shares ? job.worker(0).debug_info().at(name) : 1;
  };
  constexpr int64_t kWide = 12'800;
  const at::Tensor ids = torch::arange(5);
  ps::Embedding layer(
      job.clients[0].open_table("e", ps::sparse(kWide, ps::rule<optim::SGD>({.lr = 1}))));
  float steps = 0;
  const auto step = [&](bool once_more) {
    const at::Tensor sum = layer.forward(ids).sum();
    sum.backward({}, /*retain_graph=*/once_more);
    const Future<ps::PushResult> pushed = layer.step();
    if (once_more) sum.backward();
    pushed.wait();
    ++steps;
  };
  do {
    step(false);
  } while (counter("arena_zero_copies") == 0);
  const int64_t copies = counter("arena_copies");
  const int64_t in_place = counter("arena_zero_copies");
  for (int i = 0; i < 3; ++i) step(true);
  EXPECT_EQ(counter("arena_zero_copies"), in_place + (shares ? 3 : 0));
  EXPECT_EQ(counter("arena_copies"), copies);
  EXPECT_TRUE(torch::equal(layer.table().pull_rows(ids).wait(), torch::full({5, kWide}, -steps)));
}

TEST_P(PsLayers, PS_11_AnEmbeddingPullsDistinctRowsAndPushesTheirGradients) {
  PsJob job(2, 1, GetParam());
  ps::Embedding layer(job.clients[0].open_table("e", rows_of_doubles()));
  at::Tensor weight = local(all_rows(layer.table()));
  for (int64_t step = 0; step < 4; ++step) {
    // Two forwards in a step share rows, and their gradients add up.
    const auto loss = [&](const auto& look_up) {
      return (look_up(ids_of(step)).sin().sum() * look_up(ids_of(step + 1)[0]).sum());
    };
    const at::Tensor ours = loss([&](const at::Tensor& ids) { return layer.forward(ids); });
    const at::Tensor want = loss([&](const at::Tensor& ids) { return F::embedding(ids, weight); });
    expect_near(ours.detach(), want.detach());
    const bool differentiable = step == 3;  // a backward that is recorded itself
    ours.backward({}, differentiable, differentiable);
    want.backward();
    layer.step().wait();
    weight = local(weight.detach() - kRate * weight.grad());
    expect_near(all_rows(layer.table()), weight.detach());
  }
  EXPECT_EQ(layer.table().stats().pushes, 4U);
  EXPECT_EQ(layer.table().clock(), 4U);
  // Without a gradient the step ends, and nothing is pushed.
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(layer.forward(ids_of(0)).requires_grad());
  }
  layer.step().wait();
  expect_near(all_rows(layer.table()), weight.detach());
  EXPECT_EQ(layer.table().stats().pushes, 4U);
  EXPECT_EQ(layer.table().clock(), 5U);
  EXPECT_EQ(layer.forward(torch::zeros({0, 2}, torch::kLong)).sizes(),
            (std::vector<int64_t>{0, 2, kWidth}));
}

TEST_P(PsLayers, PS_11_BagsAreSumsMeansAndMaxima) {
  PsJob job(2, 1, GetParam());
  const at::Tensor flat = torch::tensor({4, 4, 1, 2, 3, 4}, torch::kInt);
  const at::Tensor offsets = torch::tensor({0, 3, 3}, torch::kLong);  // the second is empty
  for (const ps::Reduce reduce : {ps::Reduce::kSum, ps::Reduce::kMean, ps::Reduce::kMax}) {
    ps::EmbeddingBag layer(
        job.clients[0].open_table(absl::StrCat("bag", static_cast<int>(reduce)), rows_of_doubles()),
        reduce);
    const at::Tensor weight = local(all_rows(layer.table()));
    F::EmbeddingBagFuncOptions options;
    if (reduce == ps::Reduce::kSum) options.mode(torch::kSum);
    if (reduce == ps::Reduce::kMean) options.mode(torch::kMean);
    if (reduce == ps::Reduce::kMax) options.mode(torch::kMax);
    const auto with_offsets = F::EmbeddingBagFuncOptions(options).offsets(offsets);
    const at::Tensor want = F::embedding_bag(flat.to(torch::kLong), weight, with_offsets);
    const at::Tensor ours = layer.forward(flat, offsets);
    expect_near(ours.detach(), want.detach());
    (ours * ours).sum().backward();
    (want * want).sum().backward();
    layer.step().wait();
    const at::Tensor after = weight.detach() - kRate * weight.grad();
    expect_near(all_rows(layer.table()), after);
    expect_near(layer.forward(ids_of(1)).detach(), F::embedding_bag(ids_of(1), after, options));
  }
}

// A backward that passes through another worker: what the context has is pushed, and `.grad` is not used.
TEST_P(PsLayers, PS_11_LayersStepWithTheGradientsOfAContext) {
  PsJob job(2, 1, GetParam(), nullptr, [](int, JoinOptions* o) {
    o->services.push_back(dist_autograd_service());
    o->library = Library("layers");
    o->library.def("squares", &squares);
  });
  ps::Embedding words(job.clients[0].open_table("e", rows_of_doubles()));
  auto definition = ps::Linear::definition(kWidth, 2, ps::rule<optim::SGD>({.lr = kRate}), true, 7);
  definition.dtype = torch::kFloat64;
  ps::Linear head(job.clients[0].open_table("h", definition), kWidth, 2);
  at::Tensor rows = local(all_rows(words.table()));
  at::Tensor weight = local(head.weight().detach());
  at::Tensor bias = local(head.bias().detach());
  EXPECT_LE(weight.abs().max().item<double>(), 0.578);
  EXPECT_GT(weight.abs().max().item<double>(), 0.1);
  for (int64_t step = 0; step < 3; ++step) {
    {
      DistAutogradContext context(job.worker(0));
      const at::Tensor out = head.forward(words.forward(ids_of(step)));
      context.backward({rpc_sync(job.worker(0), "ps1", &squares, out)});
      EXPECT_FALSE(head.weight().grad().defined());
      const auto pushed = {words.step(context), head.step(context)};
      for (const auto& push : pushed) push.wait();
    }
    squares(F::linear(F::embedding(ids_of(step), rows), weight, bias)).backward();
    rows = local(rows.detach() - kRate * rows.grad());
    weight = local(weight.detach() - kRate * weight.grad());
    bias = local(bias.detach() - kRate * bias.grad());
    expect_near(all_rows(words.table()), rows.detach());
    expect_near(head.weight().detach(), weight.detach());
    expect_near(head.bias().detach(), bias.detach());
  }
  EXPECT_EQ(head.table().stats().pulls, 4U) << "the first, and one with each push";
}

TEST_F(PsTest, PS_11_ALinearWithoutBiasAndAfterAFailedPush) {
  PsJob job(1, 1);
  const auto definition = ps::Linear::definition(2, 3, ps::rule<optim::SGD>({.lr = 1.0}), false, 1);
  ps::Linear layer(job.clients[0].open_table("l", definition), 2, 3, false);
  const at::Tensor before = layer.weight().detach().clone();
  (layer.forward(torch::ones({1, 2})) * std::numeric_limits<float>::infinity()).sum().backward();
  expect_ps_error(layer.step().try_wait().status(), ErrorKind::kInvalidArgument, {"not finite"});
  EXPECT_TRUE(torch::equal(layer.weight(), before)) << "pulled anew";
  layer.forward(torch::ones({1, 2})).sum().backward();
  layer.step().wait();
  EXPECT_TRUE(torch::equal(layer.weight(), before - 1));
  EXPECT_FALSE(layer.bias().defined());
}

TEST_F(PsTest, PS_11_RowsThatWerePulledAheadAreThoseOfTheIdsAsTheyWere) {
  PsJob job(1, 1);
  ps::Embedding layer(job.clients[0].open_table("e", rows_of_doubles()));
  at::Tensor ids = torch::arange(4);
  layer.prefetch(ids);
  const at::Tensor rows = all_rows(layer.table());
  ids.add_(1);  // a buffer that is used again
  expect_near(layer.forward(ids).detach(), rows.narrow(0, 1, 4));
  const uint64_t pulls = layer.table().stats().pulls;
  expect_near(layer.forward(torch::arange(4)).detach(), rows.narrow(0, 0, 4));
  EXPECT_EQ(layer.table().stats().pulls, pulls) << "it was pulled ahead";
  expect_near(layer.forward(torch::arange(4)).detach(), rows.narrow(0, 0, 4));
  EXPECT_EQ(layer.table().stats().pulls, pulls + 1) << "and used once";
  for (int64_t i = 0; i < 70; ++i) layer.prefetch(torch::full({1}, i, torch::kLong));
  EXPECT_EQ(layer.forward(torch::full({1}, 69, torch::kLong)).sizes()[0], 1);
}

TEST_F(PsTest, BadInput_layers_and_ids_that_do_not_fit_their_table) {
  PsJob job(1, 1);
  const Table sparse = job.clients[0].open_table("e", rows_of_doubles());
  const Table dense = job.clients[0].open_table("d", ps::dense({6}, ps::rule<optim::SGD>()));
  const auto wrong = ErrorKind::kInvalidArgument;
  expect_ps_error(ps_error_of([&] { ps::Embedding layer(dense); }), wrong,
                  {"sparse table", "table 'd'"});
  expect_ps_error(ps_error_of([&] { ps::Linear layer(sparse, 2, 3); }), wrong,
                  {"dense table", "table 'e'"});
  expect_ps_error(ps_error_of([&] { ps::Linear layer(dense, 2, 3); }), wrong,
                  {"2 inputs and 3 outputs"});
  expect_ps_error(ps_error_of([&] { ps::Linear layer(dense, -2, -3, false); }), wrong, {"-2"});
  expect_ps_error(ps_error_of([&] { (void)ps::Linear::definition(0, 1, {}); }), wrong,
                  {"0 inputs"});
  ps::Embedding words(sparse);
  expect_ps_error(ps_error_of([&] { (void)words.forward(torch::ones({2})); }), wrong,
                  {"table 'e'", "int64 or int32"});
  expect_ps_error(ps_error_of([&] { words.prefetch({}); }), wrong, {"int64 or int32"});
  ps::EmbeddingBag bags(sparse);
  expect_ps_error(ps_error_of([&] { (void)bags.forward(torch::arange(3)); }), wrong,
                  {"two dimensions"});
  expect_ps_error(
      ps_error_of([&] { (void)bags.forward(ids_of(0), torch::zeros({1}, torch::kLong)); }), wrong,
      {"one dimension"});
  expect_ps_error(ps_error_of([&] { ps::Trainer trainer({}); }), wrong, {"one layer"});
  expect_ps_error(ps_error_of([&] { ps::Trainer trainer({&words}, {.ahead = 33}); }), wrong,
                  {"ahead is 33"});
}

// ---- the trainer -------------------------------------------------------------------------------

// What one client has after some steps, and how long they took in virtual time.
struct Trained {
  at::Tensor rows;
  absl::Duration took;
  ps::TrainerReport report;
};
constexpr int64_t kSteps = 12;

// Each step computes for 20 ms; a request and its answer take 15.
Trained run_trainer(const ps::TrainerOptions& options) {
  Trained out;
  in_simulation(21, [&](const std::shared_ptr<SimRuntime>& sim) {
    const auto plan = std::make_shared<FaultPlan>(21);
    PsJob job(2, 1, Net::kInproc, sim, [&](int, JoinOptions* o) {
      o->services.push_back(dist_autograd_service());
      o->transport = faulty_transport(o->transport, plan);
    });
    ps::Embedding words(job.clients[0].open_table("e", rows_of_doubles()));
    plan->add({.fault = Fault::kDelay,
               .kind = FrameKind::kRequest,
               .from = "c0",
               .delay = absl::Milliseconds(15)});
    const absl::Time begun = sim->now();
    int64_t made = 0;
    ps::Trainer trainer({&words}, options);
    out.report = trainer.run(
        [&]() -> std::optional<int64_t> {
          if (made == kSteps) return std::nullopt;
          return made++;
        },
        [&](int64_t step) { words.prefetch(ids_of(step)); },
        [&](int64_t step, DistAutogradContext& context) {
          const at::Tensor loss = words.forward(ids_of(step)).sin().sum();
          sim->sleep(absl::Milliseconds(20));
          context.backward({loss});
        });
    out.took = sim->now() - begun;
    plan->clear();
    out.rows = all_rows(words.table());
  });
  return out;
}

TEST_F(PsTest, PS_11_ATrainerPullsTheNextRowsWhileItComputes) {
  const Trained plain = run_trainer({.ahead = 0});
  const Trained ahead = run_trainer({.ahead = 1});
  const Trained fresh = run_trainer({.ahead = 1, .refresh = true});
  for (const Trained* run : {&plain, &ahead, &fresh}) EXPECT_EQ(run->report.steps, kSteps);
  // A pull, which follows the push of the step before, and 20 ms of computing.
  EXPECT_GE(plain.took, absl::Milliseconds(50) * (kSteps - 1));
  // The pull is on its way while another step is computed.
  EXPECT_LE(ahead.took, absl::Milliseconds(36) * kSteps + absl::Milliseconds(30));
  EXPECT_FALSE(torch::equal(ahead.rows, plain.rows)) << "rows are older by a step";
  EXPECT_TRUE(torch::equal(fresh.rows, plain.rows)) << fresh.rows - plain.rows;
}

TEST_F(PsTest, PS_11_ATrainerThatHasFailedForgetsAndRunsAgain) {
  PsJob job(1, 1);
  ps::Embedding words(job.clients[0].open_table("e", rows_of_doubles()));
  const at::Tensor before = all_rows(words.table());
  ps::Trainer trainer({&words}, {.rate = [](int64_t) { return 1.0; }});
  int64_t made = 0;
  const auto next = [&]() -> std::optional<int64_t> {
    if (made == 3) return std::nullopt;
    return made++;
  };
  const auto look_up = [&](int64_t) { words.prefetch(torch::arange(2)); };
  const auto wait = [&](int64_t step) {
    words.forward(torch::arange(2)).sum().backward();
    if (step == 1) throw std::runtime_error("no more of this");
  };
  EXPECT_THROW(trainer.run(next, look_up, wait), std::runtime_error);
  const auto compute = [&](int64_t) { words.forward(torch::arange(2)).sum().backward(); };
  made = 2;
  EXPECT_EQ(trainer.run(next, look_up, compute).steps, 1);
  // Step 0 of the first run and the one of the second: what the failed step had is not there.
  expect_near(all_rows(words.table()).narrow(0, 0, 2), before.narrow(0, 0, 2) - 2);
}

}  // namespace
}  // namespace weft::testing
