// DistributedDataParallel against Python's over Gloo (ddp_oracle.py), with the same weights and
// batches, and against one process that has the batches of all ranks.

#include <array>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string_view>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/join.h"
#include "weft/tests/collectives/ddp_world.h"
#include "weft/tests/integration/process.h"

namespace weft::testing {
namespace {

constexpr int kSteps = 20;
constexpr std::array<int, 3> kJoinSteps = {10, 12, 15};  // of each rank, where they join

// As Net of ddp_oracle.py.
struct OracleNetImpl : torch::nn::Module {
  explicit OracleNetImpl(bool sparse) {
    using torch::nn::Linear;
    conv = register_module(
        "conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    table = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 8).sparse(sparse)));
    first = register_module("first", Linear(64, 16));
    twice = register_module("twice", Linear(16, 16));
    frozen = register_module("frozen", Linear(16, 16));
    sometimes = register_module("sometimes", Linear(16, 16));
    out = register_module("out", Linear(24, 5));
    for (at::Tensor& one : frozen->parameters()) one.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids, bool with_sometimes) {
    at::Tensor h = torch::tanh(norm(conv(x))).flatten(1);
    h = torch::tanh(first(h));
    h = torch::tanh(twice(torch::tanh(twice(h))));
    h = torch::tanh(frozen(h));
    if (with_sometimes) h = torch::tanh(sometimes(h));
    return out(torch::cat({h, table(ids)}, 1));
  }
  torch::nn::Conv2d conv = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  torch::nn::Embedding table = nullptr;
  torch::nn::Linear first = nullptr, twice = nullptr, frozen = nullptr, sometimes = nullptr,
                    out = nullptr;
};
using OracleNet = std::shared_ptr<OracleNetImpl>;

using Tensors = std::map<std::string, at::Tensor>;

// One case of the file.
struct OracleCase {
  int ranks = 0;
  bool adam = false;
  int micro = 1;
  bool views = false;
  bool unused = false;
  bool sparse = false;
  bool channels_last = false;
  bool is_static = false;
  bool join = false;
  Tensors all{};

  // In the order of CONFIG there.
  explicit OracleCase(Tensors from) : all(std::move(from)) {
    const auto* const config = all.at("config").const_data_ptr<int64_t>();
    ranks = static_cast<int>(config[0]);
    adam = config[1] != 0;
    micro = static_cast<int>(config[2]);
    views = config[3] != 0;
    unused = config[4] != 0;
    sparse = config[5] != 0;
    channels_last = config[6] != 0;
    is_static = config[7] != 0;
    join = config[8] != 0;
  }
  bool uses_sometimes(int step, int rank) const {
    return !unused || (!is_static && step % 2 == 0 && rank == 0);
  }
  int steps(int rank) const { return join ? kJoinSteps.at(static_cast<size_t>(rank)) : kSteps; }

  OracleNet start() const {
    const torch::NoGradGuard no_grad;
    auto net = std::make_shared<OracleNetImpl>(sparse);
    if (channels_last) {
      net->conv->weight.set_data(
          net->conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
    for (const auto& item : net->named_parameters()) {
      item.value().copy_(all.at("start." + item.key()));
    }
    for (const auto& item : net->named_buffers()) item.value().copy_(all.at("start." + item.key()));
    return net;
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer(torch::nn::Module& net) const {
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& one : net.parameters()) {
      if (one.requires_grad()) parameters.push_back(one);
    }
    if (adam) {
      return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.005));
    }
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.05).momentum(sparse ? 0 : 0.9));
  }
  // `forward`: of the module, or of what is around it.
  template <class F>
  at::Tensor loss(F&& forward, int step, int m, int rank) const {
    const int64_t index = (step * micro + m) * ranks + rank;
    at::Tensor x = all.at("x")[index];
    if (channels_last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor out = forward(x, all.at("ids")[index], uses_sometimes(step, rank));
    return (out - all.at("y")[index]).pow(2).mean();
  }
};

using OracleCases = std::map<std::string, OracleCase>;

OracleCases read_cases(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  OracleCases out;
  for (const auto& one : torch::pickle_load(bytes).toGenericDict()) {
    Tensors all;
    for (const auto& item : one.value().toGenericDict()) {
      all.emplace(item.key().toStringRef(), item.value().toTensor());
    }
    out.emplace(one.key().toStringRef(), OracleCase(std::move(all)));
  }
  return out;
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// The nets of all ranks after the training.
std::vector<OracleNet> train_all(const OracleCase& c) {
  std::vector<OracleNet> nets;
  for (int r = 0; r < c.ranks; ++r) nets.push_back(c.start());
  run_ranks(c.ranks, [&](ProcessGroup& group) {
    const int rank = group.rank();
    const OracleNet& net = nets[static_cast<size_t>(rank)];
    DistributedDataParallel ddp(net, group,
                                {.bucket_cap_mb = 0.004,
                                 .first_bucket_mb = 0.001,
                                 .find_unused_parameters = c.unused && !c.is_static,
                                 .static_graph = c.is_static,
                                 .gradient_as_bucket_view = c.views});
    const auto optimize = c.optimizer(*net);
    const auto forward = [&ddp](const auto&... args) { return ddp.forward(args...); };
    std::optional<Join> join;
    if (c.join) join.emplace(std::initializer_list<internal::JoinableRef>{ddp});
    for (int s = 0; s < c.steps(rank); ++s) {
      ddp.zero_grad();
      for (int m = 0; m + 1 < c.micro; ++m) {
        const auto local = ddp.no_sync();
        c.loss(forward, s, m, rank).backward();
      }
      c.loss(forward, s, c.micro - 1, rank).backward();
      optimize->step();
    }
    if (join.has_value()) join->wait();
  });
  return nets;
}

// One process; its loss is the mean of those that the ranks have. Buffers are not compared with it:
// they have seen the batches of all.
OracleNet train_joined(const OracleCase& c) {
  OracleNet net = c.start();
  const auto optimize = c.optimizer(*net);
  const auto forward = [&net](const auto&... args) { return net->forward(args...); };
  for (int s = 0; s < kSteps; ++s) {
    optimize->zero_grad();
    for (int m = 0; m < c.micro; ++m) {
      for (int r = 0; r < c.ranks; ++r) (c.loss(forward, s, m, r) / c.ranks).backward();
    }
    optimize->step();
  }
  return net;
}

TEST(DdpOracle, CL_4_equals_pythons) {
  const char* const python = std::getenv("WEFT_TEST_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "no Python that imports torch (WEFT_TEST_PYTHON)";
  const integration::TempDir folder;
  const std::string file = folder.path("cases.pt");
  const std::string log = folder.path("python.log");
  // A covering few; every combination with WEFT_DDP_ORACLE_CASES=all (ddp_oracle.soak).
  const char* const which = std::getenv("WEFT_DDP_ORACLE_CASES");
  const bool all = which != nullptr && std::string_view(which) == "all";
  std::vector<std::string> command = {python, "-W", "ignore", WEFT_DDP_ORACLE, file};
  if (all) command.emplace_back("all");
  integration::Process peer({.command = command, .error_file = log});
  const std::string said = peer.read_all(std::chrono::seconds(500));
  ASSERT_EQ(peer.wait_exit(), 0) << said << std::ifstream(log).rdbuf();
  const OracleCases cases = read_cases(file);
  EXPECT_EQ(cases.size(), all ? 29U : 8U);
  double worst = 0;
  for (const auto& [name, c] : cases) {
    SCOPED_TRACE(name);
    const std::vector<OracleNet> nets = train_all(c);
    for (const OracleNet& net : nets) {
      for (const auto& item : net->named_parameters()) {
        const double off = largest_difference(item.value(), c.all.at("end." + item.key()));
        EXPECT_LE(off, 1e-6) << item.key();
        worst = std::max(worst, off);
        EXPECT_TRUE(torch::equal(item.value(), nets[0]->named_parameters()[item.key()]));
      }
    }
    for (const auto& item : nets[0]->named_buffers()) {
      EXPECT_LE(largest_difference(item.value(), c.all.at("end." + item.key())), 1e-6)
          << item.key();
    }
    if (c.adam || c.join) continue;
    const OracleNet joined = train_joined(c);
    for (const auto& item : joined->named_parameters()) {
      EXPECT_LE(largest_difference(item.value(), nets[0]->named_parameters()[item.key()]), 1e-5)
          << item.key();
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

}  // namespace
}  // namespace weft::testing
