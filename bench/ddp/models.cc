#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <unistd.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "weft/bench/ddp/driver.h"
#include "weft/bench/line_protocol.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/zero_redundancy_optimizer.h"
#include "weft/common/launch_info.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_optim/optimizer.h"
#include "weft/dist_optim/service.h"
#include "weft/rpc/call.h"
#include "weft/rref/rref.h"

namespace weft::bench {
namespace {

constexpr double kRate = 0.01;
// The hybrid.
constexpr char kServer[] = "w2";
constexpr int64_t kRows = 100'000;
constexpr int64_t kColumns = 64;
constexpr int64_t kIds = 1024;
constexpr int64_t kClasses = 16;

torch::nn::Sequential layers(const std::vector<int64_t>& widths) {
  torch::nn::Sequential net;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    if (i > 0) net->push_back(torch::nn::ReLU());
    net->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  return net;
}

using Ddp = DistributedDataParallel<torch::nn::Sequential>;

}  // namespace

DdpModel make_ddp_model(std::string_view name) {
  std::vector<int64_t> widths;
  int64_t batch = 0;
  if (name == "wide")
    std::tie(widths, batch) = std::pair(std::vector<int64_t>{2048, 2048, 2048, 10}, 64);
  if (name == "deep") std::tie(widths, batch) = std::pair(std::vector<int64_t>(9, 1024), 256);
  if (name == "small") std::tie(widths, batch) = std::pair(std::vector<int64_t>{64, 64, 10}, 32);
  if (widths.empty()) throw std::invalid_argument("wide, deep or small, not " + std::string(name));
  return {layers(widths), at::randn({batch, widths.front()}),
          at::randint(widths.back(), {batch}, at::kLong)};
}

ProcessGroup make_ddp_group(const std::string& path, int rank, int size, const std::string& backend,
                            const std::string& listen) {
  ProcessGroupOptions options;
  options.rank = rank;
  options.size = size;
  options.rendezvous = "file://" + path + ".group?run_id=bench";
  options.backend = backend == "tcp" ? Backend::kTcp : Backend::kShm;
  options.timeout = absl::Hours(1);
  options.init_timeout = absl::Minutes(1);
  options.listen_address = listen;
  options.allow_insecure = listen != "127.0.0.1";
  return init_process_group(options);
}

std::function<void()> make_ddp_step(const DdpModel& model, const ProcessGroup& group,
                                    std::string_view how) {
  auto optimizer =
      std::make_shared<torch::optim::SGD>(model.net->parameters(), torch::optim::SGDOptions(kRate));
  if (how == "alone") {
    return [net = model.net.ptr(), x = model.x, y = model.y, optimizer] {
      optimizer->zero_grad();
      at::cross_entropy_loss(net->forward(x), y).backward();
      optimizer->step();
    };
  }
  DistributedDataParallelOptions options;
  if (how == "mib") options.bucket_cap_mb = options.first_bucket_mb = 1;
  if (how == "one") options.bucket_cap_mb = options.first_bucket_mb = 100'000;
  auto ddp = std::make_shared<Ddp>(model.net, group, options);
  return [model, ddp, optimizer] {
    ddp->zero_grad();
    at::cross_entropy_loss(ddp->forward(model.x), model.y).backward();
    optimizer->step();
  };
}

double zero_share(const DdpModel& model, const ProcessGroup& of) {
  ProcessGroup group = of;
  const std::vector<at::Tensor> parameters = model.net->parameters();
  ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(parameters, group,
                                                        torch::optim::AdamOptions(1e-3));
  int64_t whole = 0;
  for (const at::Tensor& one : parameters) {
    one.mutable_grad() = at::full(one.sizes(), 0.01);
    whole += 2 * static_cast<int64_t>(one.nbytes());
  }
  optimizer.step();
  int64_t own = 0;
  if (optimizer.local().has_value()) {
    for (const auto& [key, state] : optimizer.local()->state()) {
      const auto& adam = static_cast<const torch::optim::AdamParamState&>(*state);
      own += static_cast<int64_t>(adam.exp_avg().nbytes() + adam.exp_avg_sq().nbytes());
    }
  }
  const at::Tensor most =
      at::full({1}, static_cast<double>(own) / static_cast<double>(whole), at::kDouble);
  group.all_reduce(most, {.op = ReduceOp::kMax});
  return most.item<double>();
}

Library hybrid_library() {
  Library lib("bench");
  const at::Tensor table = at::rand({kRows, kColumns}).set_requires_grad(true);
  lib.def("lookup", [table](const at::Tensor& ids) {
    return at::embedding(table, ids, -1, false, /*sparse=*/true);
  });
  lib.def("table", [table](CallContext& context) {
    return RRef<at::Tensor>::local(context.worker(), table);
  });
  lib.merge(dist_optim_library());
  return lib;
}

std::function<void()> make_hybrid_step(const Worker& worker, const ProcessGroup& trainers) {
  torch::nn::Sequential dense = layers({kColumns, kClasses});
  auto ddp = std::make_shared<Ddp>(dense, trainers);
  std::vector<RRef<at::Tensor>> all = {
      rpc_sync(worker, kServer, FunctionRef<RRef<at::Tensor>()>{"bench.table"})};
  for (const at::Tensor& one : dense->parameters()) {
    all.push_back(RRef<at::Tensor>::local(worker, one));
  }
  auto optimizer = std::make_shared<DistributedOptimizer<optim::SGD>>(
      worker, all, optim::SGD::Options{.lr = kRate});
  const at::Tensor ids = at::randint(kRows, {kIds}, at::kLong);
  const at::Tensor target = at::zeros({kIds, kClasses});
  return [&worker, ddp, optimizer, ids, target] {
    DistAutogradContext context(worker);
    const at::Tensor rows =
        rpc_sync(worker, kServer, FunctionRef<at::Tensor(at::Tensor)>{"bench.lookup"}, ids);
    optimizer->backward_and_step(context, {at::mse_loss(ddp->forward(rows), target)});
  };
}

int live(const std::string& log) {
  const Environment environment = process_environment();
  const LaunchInfo info = value_or_throw(
      launch_info(value_or_throw(Config::from_environment(environment)), environment));
  ProcessGroup group = init_process_group();
  const auto step = make_ddp_step(make_ddp_model("small"), group, "ddp");
  const int fd = ::open(log.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) throw std::runtime_error("cannot open " + log);
  // In the first life until it is killed; in the next one a step is what is waited for.
  for (int64_t i = 1; info.restart_count == 0 || i == 1; ++i) {
    step();
    if (i > 1) continue;
    const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    const std::string line = "{\"life\":" + std::to_string(info.restart_count) +
                             ",\"rank\":" + std::to_string(group.rank()) +
                             ",\"pid\":" + std::to_string(::getpid()) +
                             ",\"at\":" + std::to_string(now) + "}\n";
    if (::write(fd, line.data(), line.size()) < 0) throw std::runtime_error("cannot write " + log);
  }
  ::close(fd);
  return 0;
}

}  // namespace weft::bench
