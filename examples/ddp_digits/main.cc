// ddp_digits: a convolutional net learns to read handwritten digits, on several processes at once:
// each has a replica and a part of every epoch, gradients are averaged while the backward runs.
// Rank 0 writes a checkpoint after each epoch, from which the training goes on when it is started
// again. No Worker: a process group is all it needs. --help says how to start it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "ATen/Context.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/max_pool2d.h"
#include "ATen/ops/relu.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/collectives/ddp/checkpoint.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/distributed_sampler.h"
#include "weft/collectives/ddp/reduce_value.h"
#include "weft/collectives/ddp/sync_batch_norm.h"
#include "weft/collectives/process_group.h"
#include "weft/common/files.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/examples/ddp_digits/curve.h"

namespace ddp_digits {

using async_ps::Images;

constexpr int64_t kHeldOut = 360;
constexpr double kTarget = 0.97;

// How the learning rate grows with the number of ranks, and so with the batch of all of them.
enum class Scaling { kLinear, kRoot, kNone };

struct Options {
  std::string data;  // "": beside the program, ../share/weft/digits.csv
  std::string checkpoint;
  std::string svg;
  int64_t every = 0;  // steps between two checkpoints; 0: one after each epoch
  int64_t epochs = 12;
  int64_t batch = 32;  // of each rank
  int64_t seed = 1;
  double rate = 0.02;  // of one rank
  Scaling scaling = Scaling::kLinear;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using torch::nn::Conv2dOptions;
    conv1 = register_module("conv1", torch::nn::Conv2d(Conv2dOptions(1, 16, 3).padding(1)));
    norm1 = register_module("norm1", weft::SyncBatchNorm(16));
    conv2 = register_module("conv2", torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1)));
    norm2 = register_module("norm2", weft::SyncBatchNorm(32));
    out = register_module("out", torch::nn::Linear(32 * 2 * 2, 10));
  }
  at::Tensor forward(const at::Tensor& pixels) {
    at::Tensor x = pixels.to(at::kFloat).div(16).view({-1, 1, 8, 8});
    x = at::max_pool2d(at::relu(norm1(conv1(x))), 2);
    x = at::max_pool2d(at::relu(norm2(conv2(x))), 2);
    return out(x.flatten(1));
  }

  torch::nn::Conv2d conv1 = nullptr, conv2 = nullptr;
  weft::SyncBatchNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear out = nullptr;
};
TORCH_MODULE(Net);

namespace {

// ---- checkpoints -------------------------------------------------------------------------------

// The losses of an epoch so far, and the epochs before it: what a checkpoint has beside the state of
// the training.
struct Progress {
  int64_t steps = 0;  // of this epoch
  double sum = 0;     // of this rank's losses in them
  Curve curve;
};

weft::CheckpointOptions format_of(const std::string& file) {
  return {.format = file.ends_with(".pt") ? weft::CheckpointFormat::kArchive
                                          : weft::CheckpointFormat::kSafetensors};
}

void save(weft::ProcessGroup& group, const Options& options, const Progress& progress,
          weft::TrainingState* state) {
  // Rank 0's text counts for all: what a sum is of has to be that of all ranks.
  const double sum = weft::reduce_value(group, progress.sum);
  state->notes = {{"curve", progress.curve.text()},
                  {"epoch_steps", absl::StrCat(progress.steps)},
                  {"epoch_loss", absl::StrFormat("%.17g", sum)}};
  weft::save_checkpoint(group, options.checkpoint, *state, format_of(options.checkpoint));
}

Progress load(weft::ProcessGroup& group, const Options& options, weft::TrainingState* state) {
  Progress out;
  if (options.checkpoint.empty()) return out;
  const auto loaded = weft::load_checkpoint(group, options.checkpoint, state);
  if (!loaded.has_value()) return out;
  out.curve = Curve::parse(state->notes["curve"]);
  if (!absl::SimpleAtoi(state->notes["epoch_steps"], &out.steps)) out.steps = 0;
  if (!absl::SimpleAtod(state->notes["epoch_loss"], &out.sum)) out.sum = 0;
  if (group.rank() != 0) return out;
  if (!loaded->refused.empty()) absl::PrintF("%s\n", loaded->refused);
  absl::PrintF("goes on after epoch %d, step %d of %s\n", state->sampler->epoch(), state->step,
               loaded->path);
  return out;
}

// ---- training ----------------------------------------------------------------------------------

// The accuracy over all ranks: each looks at its own part of the images held out.
double accuracy(weft::ProcessGroup& group, Net& net, const Images& test) {
  const at::NoGradGuard no_grad;
  net->eval();
  weft::DistributedSampler sampler(static_cast<size_t>(test.size()),
                                   {.rank = group.rank(), .size = group.size(), .shuffle = false});
  const std::vector<size_t> mine = sampler.next(sampler.size()).value();
  // What the sampler has repeated to give all ranks equally many does not count.
  const std::vector<int64_t> own(mine.begin(),
                                 mine.begin() + static_cast<int64_t>(sampler.unrepeated()));
  const Images part = async_ps::select(test, own);
  const at::Tensor right = net->forward(part.pixels).argmax(1).eq(part.labels);
  const at::Tensor all = weft::all_gather_rows(group, right);
  net->train();
  return all.to(at::kDouble).mean().item<double>();
}

at::Tensor all_parameters(const Net& net) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& one : net->parameters()) flat.push_back(one.detach().flatten());
  return at::cat(flat);
}

bool replicas_are_equal(weft::ProcessGroup& group, const Net& net) {
  const at::Tensor mine = all_parameters(net);
  const at::Tensor all = weft::all_gather_rows(group, mine.view({1, -1}));
  return all.eq(mine).all().item<bool>();
}

// Over the bytes of all parameters and buffers: equal for trainings that ended alike to the last bit.
uint64_t digest(const Net& net) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&hash](const at::Tensor& tensor) {
    const at::Tensor flat = tensor.detach().contiguous();
    const auto* const bytes = static_cast<const unsigned char*>(flat.const_data_ptr());
    for (size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  };
  for (const at::Tensor& one : net->parameters()) add(one);
  for (const at::Tensor& one : net->buffers()) add(one);
  return hash;
}

// The rate of a step: with more ranks it begins with that of one and grows during the first epoch.
double rate_of(const Options& options, int ranks, int64_t step, int64_t steps_of_an_epoch) {
  double factor = 1;
  if (options.scaling == Scaling::kLinear) factor = ranks;
  if (options.scaling == Scaling::kRoot) factor = std::sqrt(ranks);
  const double warm =
      std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(steps_of_an_epoch));
  return options.rate * (1 + (factor - 1) * warm);
}

void set_rate(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

Curve train(weft::ProcessGroup& group, Net& net, const async_ps::Split& split,
            const Options& options) {
  torch::optim::SGD optimizer(net->parameters(),
                              torch::optim::SGDOptions(options.rate).momentum(0.9));
  weft::DistributedSampler sampler(
      static_cast<size_t>(split.train.size()),
      {.rank = group.rank(), .size = group.size(), .seed = static_cast<uint64_t>(options.seed)});
  weft::TrainingState state{.module = net.get(), .optimizer = &optimizer, .sampler = &sampler};
  Progress progress = load(group, options, &state);
  weft::DistributedDataParallel ddp(net, group);
  const auto batch_size = static_cast<size_t>(options.batch);
  const auto steps_of_an_epoch =
      static_cast<int64_t>((sampler.size() + batch_size - 1) / batch_size);
  while (sampler.epoch() < options.epochs) {
    while (const auto next = sampler.next(batch_size)) {
      const Images batch = async_ps::select(split.train, {next->begin(), next->end()});
      set_rate(optimizer, rate_of(options, group.size(), state.step, steps_of_an_epoch));
      ddp.zero_grad();
      const at::Tensor loss = at::cross_entropy_loss(ddp.forward(batch.pixels), batch.labels);
      loss.backward();
      optimizer.step();
      progress.sum += loss.item<double>();
      ++progress.steps;
      ++state.step;
      const bool saves = options.every > 0 && state.step % options.every == 0;
      if (saves && !options.checkpoint.empty()) save(group, options, progress, &state);
    }
    const double loss =
        weft::reduce_value(group, progress.sum / static_cast<double>(progress.steps));
    progress.curve.add(loss, accuracy(group, net, split.test));
    progress.steps = 0;
    progress.sum = 0;
    sampler.set_epoch(sampler.epoch() + 1);
    if (group.rank() == 0) {
      absl::PrintF("epoch %d/%d  loss %.4f  accuracy %.3f\n", sampler.epoch(), options.epochs, loss,
                   progress.curve.last_accuracy());
      std::fflush(stdout);
    }
    if (options.every == 0 && !options.checkpoint.empty()) save(group, options, progress, &state);
  }
  return progress.curve;
}

void print_help() {
  absl::PrintF(
      "usage: ddp_digits [options], on any number of processes\n"
      "\n"
      "Learns to read handwritten digits, each process from a part of the images. For example\n"
      "\n"
      "  weftrun -n 2 ddp_digits\n"
      "  torchrun --no-python --nproc-per-node 2 ddp_digits\n"
      "\n"
      "Exits with 1 unless %.2f of the images held out are read rightly in the end and all\n"
      "replicas are equal, bit for bit.\n"
      "\n"
      "  --data FILE        the images (digits.csv of the build)\n"
      "  --checkpoint FILE  written after each epoch; where it is there, the training goes on;\n"
      "                     a name that ends in .pt: an archive of LibTorch, else safetensors\n"
      "  --every N          steps between two checkpoints, instead of an epoch\n"
      "  --svg FILE         a picture of loss and accuracy, when it has ended\n"
      "  --epochs N         times that all images are gone through (%d)\n"
      "  --batch N          images of each process in a step (%d)\n"
      "  --rate X           the learning rate of one process (%g)\n"
      "  --scaling HOW      how it grows with their number: linear, root or none (linear)\n"
      "  --seed N           of the split, the first parameters and the order (%d)\n"
      "  --help\n",
      kTarget, Options().epochs, Options().batch, Options().rate, Options().seed);
}

Scaling scaling_of(const std::string& text) {
  if (text == "linear") return Scaling::kLinear;
  if (text == "root") return Scaling::kRoot;
  if (text == "none") return Scaling::kNone;
  throw std::invalid_argument("--scaling is linear, root or none, and not '" + text + "'");
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv,
                                   {"--data", "--checkpoint", "--every", "--svg", "--epochs",
                                    "--batch", "--rate", "--scaling", "--seed"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.data = line.text("--data", options.data);
  options.checkpoint = line.text("--checkpoint", "");
  options.svg = line.text("--svg", "");
  options.every = line.number("--every", options.every, 1, 1'000'000'000);
  const std::string rate = line.text("--rate", absl::StrCat(options.rate));
  if (!absl::SimpleAtod(rate, &options.rate) || !(options.rate > 0)) {
    throw std::invalid_argument("--rate is a number above 0, and not '" + rate + "'");
  }
  options.scaling = scaling_of(line.text("--scaling", "linear"));
  options.epochs = line.number("--epochs", options.epochs, 1, 100'000);
  options.batch = line.number("--batch", options.batch, 2, 100'000);
  options.seed = line.number("--seed", options.seed, 0, 1'000'000'000);
  const std::string data = async_ps::find_digits(options.data);
  at::set_num_threads(1);  // the model is too small to be worth more
  const async_ps::Split split =
      async_ps::split_by_class(async_ps::read_digits(data), kHeldOut, options.seed);

  weft::ProcessGroup group = weft::init_process_group();
  // Replicas begin apart, and equal once they are wrapped.
  at::manual_seed(static_cast<uint64_t>(options.seed * 1'000 + group.rank()));
  Net net;
  weft::convert_sync_batchnorm(*net, group);
  const Curve curve = train(group, net, split, options);
  const bool equal = replicas_are_equal(group, net);
  const bool learned = curve.last_accuracy() >= kTarget && equal;
  if (group.rank() == 0) {
    if (!options.svg.empty()) {
      weft::throw_if_error(group.runtime()->files().write_atomic(
          options.svg, curve.svg(absl::StrFormat("ddp_digits, %d ranks", group.size()))));
    }
    absl::PrintF(
        "ddp_digits: %s ranks=%d first_loss=%.3f last_loss=%.3f accuracy=%.3f replicas=%s "
        "digest=%016x\n",
        learned ? "ok" : "not learned", group.size(), curve.first_loss(), curve.last_loss(),
        curve.last_accuracy(), equal ? "equal" : "different", digest(net));
    std::fflush(stdout);
  }
  return learned ? 0 : 1;
}

}  // namespace
}  // namespace ddp_digits

int main(int argc, char** argv) {
  return examples::run_main("ddp_digits", &ddp_digits::run, argc, argv);
}
