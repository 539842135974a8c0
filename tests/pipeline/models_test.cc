// Random models in pipelines: stages with several inputs and outputs, skips between any two of them, weights
// that are used twice, and dropout, under every schedule. Gradients equal one process: bit for bit in
// chains, else to 1e-6, because sums over edges may be in another order.
//
// In simulation, one thread runs at a time: LibTorch's generator, which dropout draws from, is one per
// process, and here all stages are in one.

#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "weft/common/sim.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/service.h"
#include "weft/pipeline/internal/module_compute.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/service.h"
#include "weft/pipeline/verifier.h"
#include "weft/rpc/worker.h"
#include "weft/rref/remote_module.h"
#include "weft/rref/service.h"
#include "weft/store/hash_store.h"
#include "weft/tests/pipeline/model.h"
#include "weft/tests/testing/cluster.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/inproc_transport.h"

namespace weft::testing {
namespace {

using namespace std::chrono_literals;  // NOLINT

constexpr int64_t kMixWidth = 5;
constexpr uint64_t kSeed = 77;

// A stage that mixes its inputs, and gives so many outputs. The values are a function of `index`.
struct MixImpl : torch::nn::Module {
  MixImpl(int64_t index, int64_t inputs, int64_t outputs, bool twice, double dropout)
      : outputs(outputs), twice(twice), dropout(dropout) {
    const auto values = [&](double factor, at::IntArrayRef sizes) {
      int64_t n = 1;
      for (int64_t s : sizes) n *= s;
      return at::sin(at::arange(n, at::kDouble) * factor + static_cast<double>(index))
                 .reshape(sizes) /
             2;
    };
    for (int64_t i = 0; i < inputs; ++i) {
      weights.push_back(
          register_parameter(absl::StrCat("weight", i),
                             values(0.7 + 0.2 * static_cast<double>(i), {kMixWidth, kMixWidth})));
    }
    bias = register_parameter("bias", values(1.3, {kMixWidth}));
    scale = register_parameter("scale", values(2.1, {outputs, kMixWidth}) + 1);
  }
  std::vector<at::Tensor> forward(std::vector<at::Tensor> in) {
    at::Tensor h = bias.expand({in.at(0).size(0), kMixWidth});
    for (size_t i = 0; i < in.size(); ++i) h = h + at::matmul(in[i], weights.at(i));
    h = at::tanh(h);
    if (twice) h = at::relu(at::matmul(h, weights[0])) + h;
    if (dropout > 0) h = at::dropout(h, dropout, /*train=*/true);
    std::vector<at::Tensor> out;
    for (int64_t k = 0; k < outputs; ++k) out.push_back(h * scale.select(0, k));
    if (dropout < 0) {  // it writes to what it gave the last time
      if (last.defined()) last.add_(1);
      last = out[0].detach();
    }
    return out;
  }
  const int64_t outputs;
  const bool twice;
  const double dropout;
  std::vector<at::Tensor> weights;
  at::Tensor bias, scale, last;
};

struct StageSpec {
  int64_t inputs = 1;
  int64_t outputs = 1;
  bool twice = false;
  double dropout = 0;
};

struct MixModel {
  pipeline::Plan plan;
  std::vector<StageSpec> stages;
  bool chain = true;
  bool random = false;
  // Stages whose biases are one weight; -1: none.
  int tied_first = -1;
  int tied_second = -1;
  std::vector<at::Tensor> inputs_of(const at::Tensor& x) const {
    if (stages[0].inputs == 1) return {x};
    return {x, x * 2};
  }
};

// The chain of a schedule, each edge with an output of its own, and more edges between random stages.
MixModel draw_model(std::mt19937_64* random) {
  const auto below = [&](int n) {
    return static_cast<int>((*random)() % static_cast<uint64_t>(n));
  };
  const std::vector<std::string> names = {
      "sequential", "gpipe", "1f1b", "1f1b+1",     "interleaved:2", "looped_bfs:2",
      "zb-h1",      "zb-h2", "zb-v", "1f1b+split", "gpipe+split",   "interleaved:2+split"};
  MixModel m;
  m.plan =
      *pipeline::make_schedule(names[static_cast<size_t>(below(static_cast<int>(names.size())))],
                               1 + below(4), 1 + below(4));
  const int n = m.plan.stages();
  m.stages.resize(static_cast<size_t>(n));
  for (int s = 0; s < n; ++s) {
    m.stages[s].twice = below(3) == 0;
    m.stages[s].dropout = below(3) == 0 ? 0.3 : 0;
    m.random = m.random || m.stages[s].dropout > 0;
  }
  if (n > 2 && below(4) > 0) {
    m.chain = false;
    for (pipeline::Edge& e : m.plan.edges) e.output = 0;
    for (int k = 1 + below(3); k > 0; --k) {
      const int from = below(n - 2);
      const int to = from + 2 + below(n - from - 2);
      // An output of its own, or the one that another edge carries, too.
      int64_t& outputs = m.stages[from].outputs;
      const int output = below(2) == 0 ? static_cast<int>(outputs++) : 0;
      const pipeline::Edge edge{from, to, output};
      if (std::find(m.plan.edges.begin(), m.plan.edges.end(), edge) != m.plan.edges.end()) continue;
      m.plan.edges.push_back(edge);
      ++m.stages[to].inputs;
    }
    for (auto& list : m.plan.workers) {
      std::erase_if(list, [](const pipeline::Action& a) { return a.edge >= 0; });
    }
    throw_if_error(pipeline::insert_transfers(&m.plan));
  }
  if (below(3) == 0) m.plan = pipeline::with_recompute(m.plan, {}, below(2) == 0);
  if (below(3) == 0) m.stages[0].inputs = 2;
  if (n > 1 && below(3) == 0) {
    m.tied_first = below(n - 1);
    m.tied_second = m.tied_first + 1 + below(n - m.tied_first - 1);
    m.plan = pipeline::with_tied(m.plan, {{m.tied_first, m.tied_second}});
  }
  return m;
}

using Gradients = std::vector<std::map<std::string, at::Tensor>>;  // by stage

at::Tensor mix_batch(int64_t n, double factor) {
  return at::cos(at::arange(n * kMixWidth, at::kDouble) * factor).reshape({n, kMixWidth});
}

// One process that sums the same micro-batches in their order.
Gradients alone(const MixModel& m, const at::Tensor& x, const at::Tensor& y, double* loss) {
  std::vector<std::shared_ptr<MixImpl>> stages;
  for (size_t s = 0; s < m.stages.size(); ++s) {
    const StageSpec& spec = m.stages[s];
    stages.push_back(std::make_shared<MixImpl>(static_cast<int64_t>(s), spec.inputs, spec.outputs,
                                               spec.twice, spec.dropout));
  }
  if (m.tied_first >= 0) {
    const c10::AutoGradMode off(false);
    stages[m.tied_second]->bias.copy_(stages[m.tied_first]->bias);
  }
  const auto to = pipeline::edges_to(m.plan);
  std::vector<std::vector<at::Tensor>> xs;
  for (const at::Tensor& one : m.inputs_of(x)) {
    xs.push_back(at::tensor_split(one, m.plan.micro_batches));
  }
  const auto ys = at::tensor_split(y, m.plan.micro_batches);
  *loss = 0;
  for (int i = 0; i < m.plan.micro_batches; ++i) {
    std::vector<std::vector<at::Tensor>> out;
    for (size_t s = 0; s < stages.size(); ++s) {
      std::vector<at::Tensor> in;
      for (size_t k = 0; s == 0 && k < xs.size(); ++k) in.push_back(xs[k][i]);
      for (int e : to[s]) {
        const pipeline::Edge& edge = m.plan.edges[e];
        const auto& made = out[edge.from];
        if (edge.output >= 0) {
          in.push_back(made[edge.output]);
        } else {
          in.insert(in.end(), made.begin(), made.end());
        }
      }
      pipeline::internal::seed_generator(kSeed, /*step=*/0, static_cast<int>(s), i);
      out.push_back(stages[s]->forward(in));
    }
    const at::Tensor one = squares(out.back()[0], ys[i]);
    const double weight = static_cast<double>(ys[i].size(0)) / static_cast<double>(x.size(0));
    *loss += one.item<double>() * weight;
    (one * weight).backward();
  }
  if (m.tied_first >= 0) {
    at::Tensor& first = stages[m.tied_first]->bias.mutable_grad();
    at::Tensor& second = stages[m.tied_second]->bias.mutable_grad();
    first = second = first + second;
  }
  Gradients all;
  for (const auto& stage : stages) {
    auto& of_stage = all.emplace_back();
    for (const auto& item : stage->named_parameters()) {
      if (item.value().grad().defined()) of_stage.emplace(item.key(), item.value().grad());
    }
  }
  return all;
}

Gradients in_pipeline(const MixModel& m, const at::Tensor& x, const at::Tensor& y, uint64_t seed,
                      double* loss, std::vector<int64_t>* sends, Status* error = nullptr) {
  Gradients all;
  auto sim = std::make_shared<SimRuntime>(SimOptions{.seed = seed});
  const InprocOptions net{.seed = seed};
  auto network = std::make_shared<InprocNetwork>(net);
  const size_t n = m.plan.workers.size();
  const Status ended = sim->run([&] {
    auto store = std::make_shared<HashStore>(sim);
    std::vector<Worker> workers(n);
    {
      std::vector<std::unique_ptr<Thread>> joins;
      for (size_t i = 0; i < n; ++i) {
        joins.push_back(sim->spawn("join", [&, i] {
          Library lib("app");
          module_<MixImpl>(lib, "Mix")
              .constructor<int64_t, int64_t, int64_t, bool, double>()
              .def("forward", &MixImpl::forward);
          lib.def("squares", &squares);
          workers[i] = Worker::join({.name = absl::StrCat("w", i),
                                     .rank = static_cast<int>(i),
                                     .world_size = static_cast<int>(n),
                                     .library = std::move(lib),
                                     .store = store->new_client(),
                                     .transport = inproc_transport(network),
                                     .services = {rref_service(), dist_autograd_service(),
                                                  dist_optim_service(), pipeline_service()},
                                     .worker_threads = 2,
                                     .heartbeat_interval = 60'000ms,
                                     .lease = 600s,
                                     .runtime = sim,
                                     .log_level = Severity::kOff,
                                     .environment = Environment{}});
        }));
      }
    }
    {
      std::vector<RemoteModule<MixImpl>> modules;
      for (size_t s = 0; s < m.stages.size(); ++s) {
        const StageSpec& spec = m.stages[s];
        modules.emplace_back(workers[0], absl::StrCat("w", m.plan.placement[s]),
                             static_cast<int64_t>(s), spec.inputs, spec.outputs, spec.twice,
                             spec.dropout);
      }
      pipeline::PipelineOptions options{.loss = "app.squares", .seed = kSeed};
      for (int s : {m.tied_first, m.tied_second}) {
        if (s >= 0) options.tied[s] = {"bias"};
      }
      pipeline::Pipeline pipe(workers[0],
                              std::vector<pipeline::Stage>(modules.begin(), modules.end()), m.plan,
                              options);
      const auto result = pipe.step_async(m.inputs_of(x), y).try_wait();
      if (error != nullptr) *error = result.status();
      EXPECT_EQ(result.ok(), error == nullptr) << result.status();
      if (result.ok()) *loss = result->loss;
      for (int s = 0; result.ok() && s < m.plan.stages(); ++s) all.push_back(pipe.gradients(s));
      for (const Worker& w : workers) sends->push_back(counter(w, "pipeline_sends"));
      pipe.close();
    }
    std::vector<std::unique_ptr<Thread>> leaves;
    for (Worker& w : workers) leaves.push_back(sim->spawn("leave", [&w] { w.shutdown(); }));
  });
  EXPECT_TRUE(ended.ok()) << ended;
  return all;
}

void expect_same(const Gradients& got, const Gradients& want, bool bitwise) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t s = 0; s < want.size(); ++s) {
    ASSERT_EQ(got[s].size(), want[s].size()) << "stage " << s;
    for (const auto& [name, gradient] : want[s]) {
      ASSERT_EQ(got[s].count(name), 1u) << "stage " << s << " " << name;
      const at::Tensor& one = got[s].at(name);
      if (bitwise) {
        EXPECT_TRUE(at::equal(one, gradient)) << "stage " << s << " " << name;
      } else {
        EXPECT_TRUE(at::allclose(one, gradient, 1e-6, 1e-12)) << "stage " << s << " " << name;
      }
    }
  }
}

// Runs a step of so many rows in a pipeline and in one process, which shall have the same loss and gradients. Returns
// what each worker has sent.
std::vector<int64_t> expect_as_alone(const MixModel& m, int64_t rows, uint64_t seed, bool bitwise) {
  const at::Tensor x = mix_batch(rows, 0.37);
  const at::Tensor y = mix_batch(rows, 0.91);
  double want_loss = 0;
  double got_loss = 0;
  std::vector<int64_t> sends;
  const Gradients want = alone(m, x, y, &want_loss);
  const Gradients got = in_pipeline(m, x, y, seed, &got_loss, &sends);
  EXPECT_EQ(got_loss, want_loss);
  expect_same(got, want, bitwise);
  return sends;
}

// Its first stage writes to what it gave the last time.
MixModel writing_model(int micro_batches) {
  MixModel m;
  m.plan = pipeline::gpipe(2, micro_batches);
  m.stages.resize(2);
  m.stages[0].dropout = -1;
  return m;
}

TEST(PipelineModels, BadInput_AnOutputThatIsWrittenToWhileItIsSent) {
  double loss = 0;
  std::vector<int64_t> sends;
  Status error;
  in_pipeline(writing_model(3), mix_batch(600, 0.37), mix_batch(600, 0.91), 5, &loss, &sends,
              &error);
  EXPECT_EQ(error_kind(error), ErrorKind::kInvalidArgument) << error;
  const std::string why(error.message());
  EXPECT_NE(why.find("worker 'w0', stage 0, micro-batch 0, action SF0>1.0: a tensor was written to "
                     "in place while it was being sent"),
            std::string::npos)
      << why;
}

// What is small is answered late, and lent to no message meanwhile: of so many messages some are answered
// before the step has ended, after the stage has written.
TEST(PipelineModels, SmallOutputsMayBeWrittenToOnceTheyAreGiven) {
  expect_as_alone(writing_model(40), 80, 5, /*bitwise=*/true);
}

// As in a U-Net: each of the first stages gives something to its counterpart at the other end. Stages
// between are not asked to pass it on.
TEST(PipelineModels, PP_8_SkipsGoStraightToTheirConsumers) {
  for (const std::string name : {"1f1b", "zb-h1"}) {
    MixModel m;
    m.plan = *pipeline::make_schedule(name, 5, 3);
    m.stages.resize(5);
    m.chain = false;
    for (pipeline::Edge& e : m.plan.edges) e.output = 0;
    for (int s = 0; s < 2; ++s) {
      m.plan.edges.push_back({s, 4 - s, 1});
      m.stages[s].outputs = 2;
      m.stages[4 - s].inputs = 2;
    }
    for (auto& list : m.plan.workers) {
      std::erase_if(list, [](const pipeline::Action& a) { return a.edge >= 0; });
    }
    throw_if_error(pipeline::insert_transfers(&m.plan));
    const std::vector<int64_t> sends = expect_as_alone(m, 7, 5, /*bitwise=*/false);
    // With 3 micro-batches: results along the chain and the skips, and gradients back.
    EXPECT_EQ(sends, (std::vector<int64_t>{6, 9, 6, 9, 6})) << name;
  }
}

TEST(PipelineModels, PP_4_RandomModelsEqualOneProcess) {
  const int wanted = fewer(200, 24);
  int skips = 0;
  int random_ones = 0;
  int tied = 0;
  int two_inputs = 0;
  for (int k = 0; k < wanted; ++k) {
    std::mt19937_64 random(static_cast<uint64_t>(k) + 1);
    const MixModel m = draw_model(&random);
    SCOPED_TRACE(absl::StrCat("model ", k, ":\n", pipeline::to_text(m.plan)));
    skips += m.chain ? 0 : 1;
    random_ones += m.random ? 1 : 0;
    tied += m.tied_first >= 0 ? 1 : 0;
    two_inputs += m.stages[0].inputs > 1 ? 1 : 0;
    const int64_t n = 2 * m.plan.micro_batches + 1;  // uneven
    const std::vector<int64_t> sends = expect_as_alone(m, n, random(), m.chain);
    // Each edge between two workers costs two messages per micro-batch, whatever lies between.
    int64_t between = 0;
    for (const pipeline::Edge& e : m.plan.edges) {
      between += m.plan.placement[e.from] != m.plan.placement[e.to] ? 1 : 0;
    }
    // Two workers that share a weight cost two more.
    const bool apart =
        m.tied_first >= 0 && m.plan.placement[m.tied_first] != m.plan.placement[m.tied_second];
    EXPECT_EQ(std::accumulate(sends.begin(), sends.end(), int64_t{0}),
              2 * between * m.plan.micro_batches + (apart ? 2 : 0));
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(skips, wanted / 4);
  EXPECT_GT(random_ones, wanted / 4);
  EXPECT_GT(tied, wanted / 8);
  EXPECT_GT(two_inputs, wanted / 8);
}

}  // namespace
}  // namespace weft::testing
