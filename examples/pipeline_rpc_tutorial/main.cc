// pipeline_rpc_tutorial: the classic pipeline of PyTorch's RPC tutorial. A network's two halves live
// at two workers; the master cuts a batch into splits and sends each on its way: the second half
// fetches what the first one has made by its RRef, so that both work at once, on different splits.
// Backward goes the same way through distributed autograd. Nothing here knows of a plan: compare
// pipeline_digits. --help says how to start it.

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "ATen/Parallel.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/relu.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/examples/loss_log.h"
#include "weft/weft.h"

namespace tutorial {
namespace {

constexpr int kProcesses = 3;  // a master and two shards
constexpr int64_t kHeldOut = 360;
constexpr int64_t kWidth = 96;
constexpr double kTarget = 0.15;

struct Options {
  std::string data;
  int64_t splits = 4;
  int64_t batch = 128;
  int64_t steps = 110;
  int64_t seed = 1;
};

// Half of the network. Calls on one object run one at a time, so the splits do, too.
class Shard {
 public:
  explicit Shard(int64_t number) : is_last_(number == 1) {
    first_ = torch::nn::Linear(number == 0 ? 64 : kWidth, kWidth);
    second_ = torch::nn::Linear(kWidth, is_last_ ? 10 : kWidth);
  }
  // What the worker before has made stays there until it is fetched here.
  at::Tensor forward(const weft::RRef<at::Tensor>& input) {
    const at::Tensor h = second_(at::relu(first_(input.to_here())));
    return is_last_ ? h : at::relu(h);
  }
  std::vector<weft::RRef<at::Tensor>> parameters(const weft::CallContext& context) {
    std::vector<weft::RRef<at::Tensor>> out;
    for (const auto& module : {first_, second_}) {
      for (at::Tensor& p : module->parameters()) {
        out.push_back(weft::RRef<at::Tensor>::local(context.worker(), std::move(p)));
      }
    }
    return out;
  }

 private:
  const bool is_last_;
  torch::nn::Linear first_{nullptr};
  torch::nn::Linear second_{nullptr};
};

weft::Library library() {
  weft::Library lib("tutorial");
  lib.class_<Shard>("Shard")
      .constructor<int64_t>()
      .def("forward", &Shard::forward)
      .def("parameters", &Shard::parameters);
  return lib;
}

class DistributedNet {
 public:
  DistributedNet(const weft::Worker& worker, int64_t splits)
      : worker_(worker),
        splits_(splits),
        first_(weft::remote<Shard>(worker, 1, int64_t{0})),
        second_(weft::remote<Shard>(worker, 2, int64_t{1})) {}

  at::Tensor forward(const at::Tensor& batch) const {
    std::vector<weft::Future<at::Tensor>> outputs;
    for (const at::Tensor& split : batch.tensor_split(splits_)) {
      const auto x = weft::RRef<at::Tensor>::local(worker_, split);
      const weft::RRef<at::Tensor> y = first_.remote(&Shard::forward, x);
      outputs.push_back(second_.rpc_async(&Shard::forward, y));
    }
    std::vector<at::Tensor> parts;
    for (auto& output : outputs) parts.push_back(output.wait());
    return at::cat(parts);
  }
  std::vector<weft::RRef<at::Tensor>> parameters() const {
    auto all = first_.rpc_sync(&Shard::parameters);
    for (auto& p : second_.rpc_sync(&Shard::parameters)) all.push_back(std::move(p));
    return all;
  }

 private:
  const weft::Worker& worker_;
  const int64_t splits_;
  const weft::RRef<Shard> first_;
  const weft::RRef<Shard> second_;
};

at::Tensor pixels_of(const async_ps::Images& images) { return images.pixels.to(at::kFloat) / 16; }

// Whether the network has learned.
bool train(const weft::Worker& worker, const Options& options, const async_ps::Split& data) {
  const DistributedNet net(worker, options.splits);
  weft::DistributedOptimizer<weft::optim::SGD> optimizer(worker, net.parameters(),
                                                         {.lr = 0.1, .momentum = 0.9});
  examples::LossLog log(worker, options.steps, /*every=*/20);
  const int64_t per_epoch = std::max<int64_t>(1, data.train.size() / options.batch);
  std::vector<int64_t> order;
  for (int64_t step = 0; step < options.steps; ++step) {
    if (step % per_epoch == 0) {
      order = async_ps::shuffled(data.train.size(), static_cast<uint64_t>(options.seed + step));
    }
    const auto at = order.begin() + (step % per_epoch) * options.batch;
    const async_ps::Images batch = async_ps::select(data.train, {at, at + options.batch});
    weft::DistAutogradContext context(worker);
    const at::Tensor loss = at::cross_entropy_loss(net.forward(pixels_of(batch)), batch.labels);
    context.backward({loss});
    optimizer.step(context);
    log.add(loss.item<double>());
  }
  const double accuracy = net.forward(pixels_of(data.test))
                              .argmax(1)
                              .eq(data.test.labels)
                              .to(at::kDouble)
                              .mean()
                              .item<double>();
  const bool learned = log.last() < kTarget;
  absl::PrintF("pipeline_rpc_tutorial: %s splits=%d first_loss=%.3f last_loss=%.3f accuracy=%.4f\n",
               learned ? "ok" : "not learned", options.splits, log.first(), log.last(), accuracy);
  std::fflush(stdout);
  return learned;
}

void print_help() {
  const Options o;
  absl::PrintF(
      "usage: pipeline_rpc_tutorial [options], on %d processes\n"
      "\n"
      "Learns the handwritten digits with a network whose halves are at ranks 1 and 2. For "
      "example\n"
      "\n"
      "  weftrun -n %d pipeline_rpc_tutorial --splits 8\n"
      "\n"
      "It prints the first loss and the last one (the mean of the last ten steps), and exits with\n"
      "1 unless the last is below %.2f.\n"
      "\n"
      "  --splits N   parts of a batch that are under way at once (%d)\n"
      "  --batch N    images of a step (%d)\n"
      "  --steps N    (%d)\n"
      "  --seed N     of the first parameters and the order of the images (%d)\n"
      "  --data FILE  instead of ../share/weft/digits.csv, beside the program\n"
      "  --help\n",
      kProcesses, kProcesses, kTarget, o.splits, o.batch, o.steps, o.seed);
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv,
                                   {"--splits", "--batch", "--steps", "--seed", "--data"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.splits = line.number("--splits", options.splits, 1, 100);
  options.batch = line.number("--batch", options.batch, options.splits, 1000);
  options.steps = line.number("--steps", options.steps, 1, 1'000'000);
  options.seed = line.number("--seed", options.seed, 0, 1'000'000'000);
  options.data = line.text("--data", async_ps::default_digits());

  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size != kProcesses) {
    throw std::invalid_argument(absl::StrFormat(
        "this program needs %d processes, a master and two shards, and was started as %d; try: "
        "weftrun -n %d pipeline_rpc_tutorial",
        kProcesses, launch.world_size, kProcesses));
  }
  async_ps::Split data;
  if (launch.rank == 0) {
    data = async_ps::split_by_class(async_ps::read_digits(options.data), kHeldOut,
                                    static_cast<uint64_t>(options.seed));
  }
  at::set_num_threads(1);  // the layers are too small to be worth more
  at::manual_seed(static_cast<uint64_t>(options.seed + launch.rank));

  weft::JoinOptions join{.library = library()};
  if (environment.count("WEFT_LOG_LEVEL") == 0) join.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(join));
  const bool learned = launch.rank != 0 || train(worker, options, data);
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "pipeline_rpc_tutorial: shutdown: %s\n", result.status.message());
  }
  return learned && result.status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace tutorial

int main(int argc, char** argv) {
  return examples::run_main("pipeline_rpc_tutorial", &tutorial::run, argc, argv);
}
