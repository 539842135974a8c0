// ddp_digits: a convolutional net learns to read handwritten digits, on several processes at once:
// each has a replica and a part of every epoch, gradients are averaged while the backward runs.
// Rank 0 writes a checkpoint after each epoch, from which the training goes on when it is started
// again. No Worker: a process group is all it needs. --help says how to start it.

#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "ATen/Context.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/max_pool2d.h"
#include "ATen/ops/relu.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/str_format.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/distributed_sampler.h"
#include "weft/collectives/ddp/reduce_value.h"
#include "weft/collectives/process_group.h"
#include "weft/common/files.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"

namespace ddp_digits {

using async_ps::Images;

constexpr int64_t kHeldOut = 360;
constexpr double kTarget = 0.97;

struct Options {
  std::string data;  // "": beside the program, ../share/weft/digits.csv
  std::string checkpoint;
  int64_t epochs = 12;
  int64_t batch = 32;  // of each rank
  int64_t seed = 1;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using torch::nn::Conv2dOptions;
    conv1 = register_module("conv1", torch::nn::Conv2d(Conv2dOptions(1, 16, 3).padding(1)));
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(16));
    conv2 = register_module("conv2", torch::nn::Conv2d(Conv2dOptions(16, 32, 3).padding(1)));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(32));
    out = register_module("out", torch::nn::Linear(32 * 2 * 2, 10));
  }
  at::Tensor forward(const at::Tensor& pixels) {
    at::Tensor x = pixels.to(at::kFloat).div(16).view({-1, 1, 8, 8});
    x = at::max_pool2d(at::relu(norm1(conv1(x))), 2);
    x = at::max_pool2d(at::relu(norm2(conv2(x))), 2);
    return out(x.flatten(1));
  }

  torch::nn::Conv2d conv1 = nullptr, conv2 = nullptr;
  torch::nn::BatchNorm2d norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear out = nullptr;
};
TORCH_MODULE(Net);

namespace {

// ---- checkpoints -------------------------------------------------------------------------------

std::string packed(const Net& net, const torch::optim::Optimizer& optimizer, int64_t epochs) {
  torch::serialize::OutputArchive archive;
  torch::serialize::OutputArchive model;
  torch::serialize::OutputArchive steps;
  net->save(model);
  optimizer.save(steps);
  archive.write("model", model);
  archive.write("optimizer", steps);
  archive.write("epochs", at::tensor(epochs), /*is_buffer=*/true);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

// How many epochs it had.
int64_t unpack(const std::string& bytes, Net& net, torch::optim::Optimizer& optimizer) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  torch::serialize::InputArchive model;
  torch::serialize::InputArchive steps;
  at::Tensor epochs = at::tensor(int64_t{0});
  archive.read("model", model);
  archive.read("optimizer", steps);
  archive.read("epochs", epochs, /*is_buffer=*/true);
  net->load(model);
  optimizer.load(steps);
  return epochs.item<int64_t>();
}

// ---- training ----------------------------------------------------------------------------------

// Of all ranks: each looks at its own part of the images held out.
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

struct Ended {
  double first_loss = 0;
  double last_loss = 0;
  double accuracy = 0;
};

Ended train(weft::ProcessGroup& group, Net& net, const async_ps::Split& split,
            const Options& options) {
  const bool leads = group.rank() == 0;
  // Gradients are means over the ranks: the rate grows with the batch of all of them.
  const double rate = 0.02 * group.size();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
  weft::Files& files = group.runtime()->files();
  int64_t done = 0;
  if (!options.checkpoint.empty()) {
    const auto bytes = files.read(options.checkpoint);
    if (bytes.ok()) {
      done = unpack(*bytes, net, optimizer);
      if (leads) absl::PrintF("goes on after epoch %d of %s\n", done, options.checkpoint);
    }
  }
  weft::DistributedDataParallel ddp(net, group);
  weft::DistributedSampler sampler(
      static_cast<size_t>(split.train.size()),
      {.rank = group.rank(), .size = group.size(), .seed = static_cast<uint64_t>(options.seed)});
  Ended ended;
  for (int64_t epoch = done; epoch < options.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    double sum = 0;
    int64_t steps = 0;
    while (const auto next = sampler.next(static_cast<size_t>(options.batch))) {
      const Images batch = async_ps::select(split.train, {next->begin(), next->end()});
      ddp.zero_grad();
      const at::Tensor loss = at::cross_entropy_loss(ddp.forward(batch.pixels), batch.labels);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>();
      ++steps;
    }
    ddp.sync_buffers();  // each rank has gone on with the statistics of its own last batch
    ended.last_loss = weft::reduce_value(group, sum / static_cast<double>(steps));
    ended.accuracy = accuracy(group, net, split.test);
    if (epoch == done) ended.first_loss = ended.last_loss;
    if (leads) {
      absl::PrintF("epoch %d/%d  loss %.4f  accuracy %.3f\n", epoch + 1, options.epochs,
                   ended.last_loss, ended.accuracy);
      std::fflush(stdout);
    }
    if (options.checkpoint.empty()) continue;
    if (leads) {
      weft::throw_if_error(
          files.write_atomic(options.checkpoint, packed(net, optimizer, epoch + 1)));
    }
    group.barrier();
  }
  return ended;
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
      "  --checkpoint FILE  written after each epoch; where it is there, the training goes on\n"
      "  --epochs N         times that all images are gone through (%d)\n"
      "  --batch N          images of each process in a step (%d)\n"
      "  --seed N           of the split, the first parameters and the order (%d)\n"
      "  --help\n",
      kTarget, Options().epochs, Options().batch, Options().seed);
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv,
                                   {"--data", "--checkpoint", "--epochs", "--batch", "--seed"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.data = line.text("--data", options.data);
  options.checkpoint = line.text("--checkpoint", "");
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
  const Ended ended = train(group, net, split, options);
  const bool equal = replicas_are_equal(group, net);
  const bool learned = ended.accuracy >= kTarget && equal;
  if (group.rank() == 0) {
    absl::PrintF(
        "ddp_digits: %s ranks=%d first_loss=%.3f last_loss=%.3f accuracy=%.3f replicas=%s "
        "digest=%016x\n",
        learned ? "ok" : "not learned", group.size(), ended.first_loss, ended.last_loss,
        ended.accuracy, equal ? "equal" : "different", digest(net));
    std::fflush(stdout);
  }
  return learned ? 0 : 1;
}

}  // namespace
}  // namespace ddp_digits

int main(int argc, char** argv) {
  return examples::run_main("ddp_digits", &ddp_digits::run, argc, argv);
}
