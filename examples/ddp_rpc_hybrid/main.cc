// ddp_rpc_hybrid: a table of embeddings lies at a server and is trained by RPC; the dense layers
// above it are replicated over the trainers by DistributedDataParallel. One backward runs through
// both: gradients of the table go to the server, those of the dense layers are averaged, and one
// optimizer steps all. A master makes the table and drives the trainers. --help says how to start
// it.

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/sequential.h>

#include "ATen/Context.h"
#include "ATen/Parallel.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "absl/strings/str_format.h"
#include "weft/collectives/ddp/distributed_data_parallel.h"
#include "weft/collectives/ddp/reduce_value.h"
#include "weft/collectives/process_group.h"
#include "weft/common/launch_info.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/examples/embedded_digits.h"
#include "weft/examples/loss_log.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

namespace ddp_rpc_hybrid {

using async_ps::Images;
using embedded_digits::dense_layers;
using embedded_digits::kBatchSize;
using embedded_digits::kHeldOut;
using embedded_digits::kRate;
using embedded_digits::kRows;
using embedded_digits::kTarget;
using embedded_digits::kWidth;
using embedded_digits::Table;
using embedded_digits::TableImpl;
using embedded_digits::tokens;

constexpr char kMaster[] = "master";
constexpr char kServer[] = "ps0";
constexpr int kTrainers = 2;

struct Options {
  std::string data;  // "": beside the program, ../share/weft/digits.csv
  int64_t epochs = 6;
  int64_t seed = 1;
};

// What a trainer is given, and what it answers.
struct Task {
  at::Tensor pixels;  // its share of the images: uint8, image x pixel
  at::Tensor labels;  // int64
  at::Tensor test_pixels;
  at::Tensor test_labels;
  int index = 0;  // of the trainer
  int64_t epochs = 0;
  int64_t seed = 0;
};
WEFT_STRUCT(Task, pixels, labels, test_pixels, test_labels, index, epochs, seed);

struct Result {
  double first_loss = 0;
  double last_loss = 0;
  double accuracy = 0;  // on the images held out
  at::Tensor dense;     // all parameters of its replica
};
WEFT_STRUCT(Result, first_loss, last_loss, accuracy, dense);

namespace {

// Runs at each trainer, called by the master.
Result run_trainer(weft::CallContext& call, const weft::RemoteModule<Table>& table,
                   const Task& task) {
  const weft::Worker& worker = call.worker();
  // The trainers alone; they meet where the workers have met.
  weft::ProcessGroup group =
      weft::init_process_group({.name = "trainers", .rank = task.index, .size = kTrainers});
  // Replicas begin apart, and equal once they are wrapped.
  torch::nn::Sequential dense = dense_layers();
  weft::DistributedDataParallel ddp(dense, group);

  std::vector<weft::RRef<at::Tensor>> parameters = table.parameters();
  for (const at::Tensor& own : dense->parameters()) {
    parameters.push_back(weft::RRef<at::Tensor>::local(worker, own));
  }
  // Takes dense gradients and sparse ones; of the table it touches the rows that have one. What
  // it steps with here is the mean over the trainers.
  weft::DistributedOptimizer<weft::optim::Adagrad> optimizer(worker, parameters, {.lr = kRate});

  const Images images{task.pixels, task.labels};
  const int64_t batches = images.size() / kBatchSize;
  examples::LossLog log(worker, task.epochs * batches, /*every=*/batches);
  for (int64_t epoch = 0; epoch < task.epochs; ++epoch) {
    const auto order = async_ps::shuffled(images.size(), task.seed * 1'000 + epoch);
    for (int64_t i = 0; i < batches; ++i) {
      const auto begin = order.begin() + i * kBatchSize;
      const Images batch = async_ps::select(images, {begin, begin + kBatchSize});
      weft::DistAutogradContext context(worker);
      const at::Tensor logits = ddp.forward(table.forward(tokens(batch.pixels)));
      const at::Tensor loss = at::cross_entropy_loss(logits, batch.labels);
      optimizer.backward_and_step(context, {loss});
      log.add(loss.item<double>());
    }
  }

  const at::NoGradGuard no_grad;
  const at::Tensor guess = dense->forward(table.forward(tokens(task.test_pixels))).argmax(1);
  std::vector<at::Tensor> flat;
  for (const at::Tensor& own : dense->parameters()) flat.push_back(own.detach().flatten());
  return {.first_loss = weft::reduce_value(group, log.first()),
          .last_loss = weft::reduce_value(group, log.last()),
          .accuracy = guess.eq(task.test_labels).to(at::kDouble).mean().item<double>(),
          .dense = at::cat(flat)};
}

weft::Library library() {
  weft::Library lib("ddp_rpc_hybrid");
  weft::module_<Table>(lib, "Table")
      .constructor<int64_t, int64_t>()
      .def("forward", &TableImpl::forward);
  lib.def("run_trainer", &run_trainer);
  return lib;
}

std::string trainer_name(int index) { return "trainer" + std::to_string(index); }

std::vector<Result> run_trainers(const weft::Worker& worker, const async_ps::Split& split,
                                 const Options& options) {
  const weft::RemoteModule<Table> table(worker, kServer, kRows, kWidth);
  std::vector<weft::Future<Result>> results;
  const std::vector<Images> shares = async_ps::deal(split.train, kTrainers);
  // Trainers take their steps together: all have equally many.
  int64_t size = split.train.size();
  for (const Images& share : shares) size = std::min(size, share.size());
  for (const Images& share : shares) {
    const int index = static_cast<int>(results.size());
    const Task task{.pixels = share.pixels.narrow(0, 0, size),
                    .labels = share.labels.narrow(0, 0, size),
                    .test_pixels = split.test.pixels,
                    .test_labels = split.test.labels,
                    .index = index,
                    .epochs = options.epochs,
                    .seed = options.seed * kTrainers + index};
    // Without a deadline: it takes as long as it takes, and a trainer that dies ends it all the
    // same.
    results.push_back(weft::rpc_async(worker, trainer_name(index), {.deadline = weft::kInfinite},
                                      &run_trainer, table, task));
  }
  return weft::when_all(results).wait(weft::kInfinite);
}

// Whether the trainers have learned, and ended equal.
bool lead(const weft::Worker& worker, const async_ps::Split& split, const Options& options) {
  absl::PrintF("%d images to train on, %d held out; a table of %d x %d for %d trainers\n",
               split.train.size(), split.test.size(), kRows, kWidth, kTrainers);
  std::fflush(stdout);
  const std::vector<Result> results = run_trainers(worker, split, options);
  const Result& first = results.front();
  double accuracy = 1;
  bool equal = true;
  for (const Result& one : results) {
    accuracy = std::min(accuracy, one.accuracy);
    equal = equal && one.dense.equal(first.dense);
  }
  const bool learned = first.last_loss < kTarget && equal;
  absl::PrintF(
      "ddp_rpc_hybrid: %s first_loss=%.3f last_loss=%.3f (%s %.2f) accuracy=%.3f replicas=%s\n",
      learned ? "ok" : "not learned", first.first_loss, first.last_loss,
      first.last_loss < kTarget ? "below" : "not below", kTarget, accuracy,
      equal ? "equal" : "different");
  std::fflush(stdout);
  return learned;
}

void print_help() {
  absl::PrintF(
      "usage: ddp_rpc_hybrid [options], on 4 processes\n"
      "\n"
      "Learns to read handwritten digits. Rank 0 leads, rank 1 has a table of embeddings, ranks 2\n"
      "and 3 train it and a classifier, of which each has a replica. For example\n"
      "\n"
      "  weftrun -n 4 ddp_rpc_hybrid\n"
      "  weftrun --role master:1 --role ps:1 --role trainer:2 ddp_rpc_hybrid\n"
      "  torchrun --no-python --nproc-per-node 4 ddp_rpc_hybrid\n"
      "\n"
      "It prints the first loss, the last one (the mean of the last ten steps), both means over "
      "the\n"
      "trainers, and the accuracy on images held out, and exits with 1 unless the last loss is\n"
      "below %.2f and the replicas are equal, bit for bit.\n"
      "\n"
      "  --data FILE   the images; read by rank 0 (digits.csv of the build)\n"
      "  --epochs N    times that each trainer goes through its images (%d)\n"
      "  --seed N      of the split, the first parameters and the order of batches (%d)\n"
      "  --help\n",
      kTarget, Options().epochs, Options().seed);
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv, {"--data", "--epochs", "--seed"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.data = line.text("--data", options.data);
  options.epochs = line.number("--epochs", options.epochs, 1, 100'000);
  options.seed = line.number("--seed", options.seed, 0, 1'000'000'000);

  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  constexpr int kProcesses = 2 + kTrainers;
  if (launch.world_size != kProcesses) {
    throw std::invalid_argument(
        absl::StrFormat("this program needs %d processes, a master, a server and %d trainers, and "
                        "was started as %d; try: weftrun -n %d ddp_rpc_hybrid",
                        kProcesses, kTrainers, launch.world_size, kProcesses));
  }
  const bool leads = launch.rank == 0;
  // Read before the join: without data no worker needs to wait.
  async_ps::Split split;
  if (leads) {
    const std::string data = async_ps::find_digits(options.data);
    split = async_ps::split_by_class(async_ps::read_digits(data), kHeldOut, options.seed);
  }
  at::set_num_threads(1);  // the model is too small to be worth more
  // Seeds the table and the first replicas.
  at::manual_seed(static_cast<uint64_t>(options.seed * kProcesses + launch.rank));

  const std::string name = leads              ? kMaster
                           : launch.rank == 1 ? kServer
                                              : trainer_name(launch.rank - 2);
  weft::JoinOptions join{.name = name, .library = library()};
  // A line per worker and phase would hide the progress; WEFT_LOG_LEVEL asks for them.
  if (environment.count("WEFT_LOG_LEVEL") == 0) join.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(join));
  // The others do what they are told: their shutdown waits until the master leaves, too.
  const bool learned = !leads || lead(worker, split, options);
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "ddp_rpc_hybrid: shutdown: %s\n", result.status.message());
  }
  return learned && result.status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace ddp_rpc_hybrid

int main(int argc, char** argv) {
  return examples::run_main("ddp_rpc_hybrid", &ddp_rpc_hybrid::run, argc, argv);
}
