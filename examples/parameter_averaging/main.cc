// parameter_averaging: every rank trains a model of its own on its share of the digits; every few
// steps all replace their parameters by the average. No DDP, no Worker: a process group alone.
// --help says how to start it.

#include <cstdio>
#include <string>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "ATen/Context.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "weft/collectives/process_group.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/store/spawn.h"

namespace {

using async_ps::Images;

constexpr int64_t kPixels = 64;
constexpr int64_t kHidden = 64;
constexpr int64_t kClasses = 10;
constexpr int64_t kHeldOut = 360;
constexpr int64_t kBatchSize = 32;
constexpr double kRate = 0.1;
constexpr double kTarget = 0.95;

struct Options {
  std::string data;
  int64_t epochs = 0;
  int64_t every = 0;
  int64_t seed = 0;
};

at::Tensor input(const at::Tensor& pixels) { return pixels.to(at::kFloat) / 16; }

// One step of plain gradient descent; returns the loss.
double step(torch::nn::Sequential& model, const Images& batch) {
  model->zero_grad();
  const at::Tensor loss = at::cross_entropy_loss(model->forward(input(batch.pixels)), batch.labels);
  loss.backward();
  const at::NoGradGuard no_grad;
  for (at::Tensor& p : model->parameters()) p.sub_(p.grad(), kRate);
  return loss.item<double>();
}

// Whether the parameters of all ranks are the same, bit by bit.
bool all_equal(weft::ProcessGroup& group, torch::nn::Sequential& model) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& p : model->parameters()) flat.push_back(p.detach().reshape({-1}));
  const at::Tensor mine = at::cat(flat);
  const at::Tensor all = at::empty({group.size(), mine.numel()});
  group.all_gather_into_tensor(all, mine);
  bool equal = true;
  for (int r = 0; r < group.size(); ++r) {
    equal = equal && at::equal(all[r].view(at::kByte), mine.view(at::kByte));
  }
  return equal;
}

int train(const Options& options) {
  weft::ProcessGroup group = weft::init_process_group();

  // All draw the same split, and take their own hand of it.
  const async_ps::Split split = async_ps::split_by_class(
      async_ps::read_digits(options.data), kHeldOut, static_cast<uint64_t>(options.seed));
  const Images mine = async_ps::deal(split.train, group.size())[static_cast<size_t>(group.rank())];

  at::manual_seed(static_cast<uint64_t>(options.seed) + static_cast<uint64_t>(group.rank()));
  torch::nn::Sequential model(torch::nn::Linear(kPixels, kHidden), torch::nn::ReLU(),
                              torch::nn::Linear(kHidden, kClasses));
  const std::vector<at::Tensor> parameters = model->parameters();
  group.broadcast_coalesced(parameters);  // ranks begin with those of rank 0

  // As many steps on every rank, whatever share it got.
  at::Tensor least = at::tensor({mine.size()});
  group.all_reduce(least, {.op = weft::ReduceOp::kMin});
  const int64_t batches = std::max<int64_t>(1, least.item<int64_t>() / kBatchSize);
  const int64_t batch_size = std::min(kBatchSize, least.item<int64_t>());

  const absl::Time begun = absl::Now();
  int64_t steps = 0;
  int64_t averaged = 0;
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    const auto order = async_ps::shuffled(
        mine.size(), static_cast<uint64_t>(options.seed * 1000 + epoch * 64 + group.rank()));
    double loss = 0;
    for (int64_t b = 0; b < batches; ++b) {
      const auto first = order.begin() + b * batch_size;
      loss = step(model, async_ps::select(mine, {first, first + batch_size}));
      if (++steps % options.every != 0) continue;
      group.all_reduce_coalesced(parameters, {.op = weft::ReduceOp::kAvg});
      ++averaged;
    }
    if (group.rank() == 0) {
      const double seconds = absl::ToDoubleSeconds(absl::Now() - begun);
      absl::PrintF("epoch %d/%d  loss %.4f  %.0f steps/s\n", epoch + 1, options.epochs, loss,
                   static_cast<double>(steps) / seconds);
    }
  }
  group.all_reduce_coalesced(parameters, {.op = weft::ReduceOp::kAvg});
  ++averaged;

  const bool equal = all_equal(group, model);
  const at::NoGradGuard no_grad;
  const at::Tensor guess = model->forward(input(split.test.pixels)).argmax(1);
  const double accuracy = guess.eq(split.test.labels).to(at::kDouble).mean().item<double>();
  const bool learned = accuracy >= kTarget;
  if (group.rank() == 0) {
    absl::PrintF("averaged %d times over %s among %d ranks; parameters of all ranks are %s\n",
                 averaged, std::string(group.backend()), group.size(),
                 equal ? "bit-equal" : "NOT equal");
    absl::PrintF("parameter_averaging: %s accuracy=%.3f (wanted: %.2f) steps=%d seconds=%.1f\n",
                 equal && learned ? "ok" : "not learned", accuracy, kTarget, steps,
                 absl::ToDoubleSeconds(absl::Now() - begun));
  }
  group.barrier();
  return equal && learned ? 0 : 1;
}

constexpr char kHelp[] =
    R"(parameter_averaging: ranks train apart and average their parameters now and then.

  weftrun -n 4 parameter_averaging [options]      also under torchrun --no-python, mpirun, srun
  parameter_averaging --spawn 4 [options]         starts its own ranks

  --data FILE    the digits; default: ../share/weft/digits.csv beside the program
  --epochs N     passes over the images, default 80
  --every K      steps between two averages, default 5
  --seed S       default 1
  --spawn N      start N ranks of this program, without a launcher

It exits with 1 unless the accuracy on images held out is at least 0.95, and the parameters of all
ranks are equal bit by bit.
)";

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const examples::CommandLine line(argc, argv,
                                   {"--data", "--epochs", "--every", "--seed", "--spawn"});
  if (line.help()) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  Options options;
  options.epochs = line.number("--epochs", 80, 1, 100'000);
  options.every = line.number("--every", 5, 1, 1'000'000);
  options.seed = line.number("--seed", 1, 0, 1'000'000);
  options.data = line.text("--data", async_ps::default_digits());
  const int64_t ranks = line.number("--spawn", 0, 0, 4096);
  at::set_num_threads(1);  // ranks share the machine
  if (ranks == 0) return train(options);
  weft::spawn(static_cast<int>(ranks), [&](int /*rank*/) { return train(options); });
  absl::PrintF("%d ranks have ended\n", ranks);  // here alone
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_main("parameter_averaging", &run, argc, argv);
}
