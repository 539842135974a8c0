// remote_embedding: a table of embeddings that several trainers share lies at a server; their dense
// layers are their own. The numbers of rows and what the rows add up to travel, never the table,
// and its gradient, in the context and for the optimizer there, has just the rows that a batch
// asked for. --help says how to start it.

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
#include "ATen/ops/cross_entropy_loss.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/examples/embedded_digits.h"
#include "weft/examples/loss_log.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

namespace remote_embedding {

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
  int64_t epochs = 0;
  int64_t seed = 0;
};
WEFT_STRUCT(Task, pixels, labels, test_pixels, test_labels, epochs, seed);

struct Result {
  double first_loss = 0;
  double last_loss = 0;
  double accuracy = 0;  // on the images held out
};
WEFT_STRUCT(Result, first_loss, last_loss, accuracy);

namespace {

// Runs at each trainer, called by the server. The trainers' dense layers never meet, since to keep
// them equal would be data-parallel training: these are two classifiers with one table, which
// learns from the images of both.
Result run_trainer(weft::CallContext& call, const weft::RemoteModule<Table>& table,
                   const Task& task) {
  const weft::Worker& worker = call.worker();
  torch::nn::Sequential dense = dense_layers();

  std::vector<weft::RRef<at::Tensor>> parameters = table.parameters();
  for (const at::Tensor& own : dense->parameters()) {
    parameters.push_back(weft::RRef<at::Tensor>::local(worker, own));
  }
  // Takes dense gradients and sparse ones; of the table it touches the rows that have one.
  weft::DistributedOptimizer<weft::optim::Adagrad> optimizer(worker, parameters, {.lr = kRate});

  const Images images{task.pixels, task.labels};
  const int64_t batches = std::max<int64_t>(1, images.size() / kBatchSize);
  const int64_t batch_size = std::min(kBatchSize, images.size());
  examples::LossLog log(worker, task.epochs * batches, /*every=*/batches);
  for (int64_t epoch = 0; epoch < task.epochs; ++epoch) {
    const auto order = async_ps::shuffled(images.size(), task.seed * 1'000 + epoch);
    for (int64_t i = 0; i < batches; ++i) {
      const auto begin = order.begin() + i * batch_size;
      const Images batch = async_ps::select(images, {begin, begin + batch_size});
      weft::DistAutogradContext context(worker);
      const at::Tensor logits = dense->forward(table.forward(tokens(batch.pixels)));
      const at::Tensor loss = at::cross_entropy_loss(logits, batch.labels);
      optimizer.backward_and_step(context, {loss});  // one message to the server, and one back
      log.add(loss.item<double>());
    }
  }

  at::NoGradGuard no_grad;
  const at::Tensor guess = dense->forward(table.forward(tokens(task.test_pixels))).argmax(1);
  return {.first_loss = log.first(),
          .last_loss = log.last(),
          .accuracy = guess.eq(task.test_labels).to(at::kDouble).mean().item<double>()};
}

weft::Library library() {
  weft::Library lib("remote_embedding");
  weft::module_<Table>(lib, "Table")
      .constructor<int64_t, int64_t>()
      .def("forward", &TableImpl::forward);
  lib.def("run_trainer", &run_trainer);
  return lib;
}

std::string trainer_name(int index) { return "trainer" + std::to_string(index); }

// The server also leads: it makes the table, here, and tells the trainers what to do with it.
std::vector<Result> run_trainers(const weft::Worker& worker, const async_ps::Split& split,
                                 const Options& options) {
  const weft::RemoteModule<Table> table(worker, kServer, kRows, kWidth);
  std::vector<weft::Future<Result>> results;
  for (const Images& share : async_ps::deal(split.train, kTrainers)) {
    const int index = static_cast<int>(results.size());
    const Task task{.pixels = share.pixels,
                    .labels = share.labels,
                    .test_pixels = split.test.pixels,
                    .test_labels = split.test.labels,
                    .epochs = options.epochs,
                    .seed = options.seed * kTrainers + index};
    // Without a deadline: it takes as long as it takes, and a trainer that dies ends it all the
    // same.
    results.push_back(weft::rpc_async(worker, trainer_name(index), {.deadline = weft::kInfinite},
                                      &run_trainer, table, task));
  }
  return weft::when_all(results).wait(weft::kInfinite);
}

// Whether all trainers have learned.
bool lead(const weft::Worker& worker, const async_ps::Split& split, const Options& options) {
  absl::PrintF("%d images to train on, %d held out; a table of %d x %d for %d trainers\n",
               split.train.size(), split.test.size(), kRows, kWidth, kTrainers);
  std::fflush(stdout);
  Result worst{.accuracy = 1};
  for (const Result& one : run_trainers(worker, split, options)) {
    worst.first_loss = std::max(worst.first_loss, one.first_loss);
    worst.last_loss = std::max(worst.last_loss, one.last_loss);
    worst.accuracy = std::min(worst.accuracy, one.accuracy);
  }
  const bool learned = worst.last_loss < kTarget;
  absl::PrintF("remote_embedding: %s first_loss=%.3f last_loss=%.3f (%s %.2f) accuracy=%.3f\n",
               learned ? "ok" : "not learned", worst.first_loss, worst.last_loss,
               learned ? "below" : "not below", kTarget, worst.accuracy);
  std::fflush(stdout);
  return learned;
}

void print_help() {
  absl::PrintF(
      "usage: remote_embedding [options], on 3 processes\n"
      "\n"
      "Learns to read handwritten digits. Rank 0 has a table of embeddings, ranks 1 and 2 each a\n"
      "classifier of their own, and both train the table. For example\n"
      "\n"
      "  weftrun -n 3 remote_embedding\n"
      "  weftrun --role ps:1 --role trainer:2 remote_embedding\n"
      "  torchrun --no-python --nproc-per-node 3 remote_embedding\n"
      "\n"
      "It prints the first loss, the last one (the mean of the last ten steps) and the accuracy "
      "on\n"
      "images held out, of both trainers the worse, and exits with 1 unless the last loss is "
      "below\n"
      "%.2f.\n"
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
  if (launch.world_size != 1 + kTrainers) {
    throw std::invalid_argument(
        absl::StrFormat("this program needs %d processes, a server and %d trainers, and was "
                        "started as %d; try: weftrun -n %d remote_embedding",
                        1 + kTrainers, kTrainers, launch.world_size, 1 + kTrainers));
  }
  const bool leads = launch.rank == 0;
  // Read before the join: without data no process needs to wait.
  async_ps::Split split;
  if (leads) {
    const std::string data = async_ps::find_digits(options.data);
    split = async_ps::split_by_class(async_ps::read_digits(data), kHeldOut, options.seed);
  }
  at::set_num_threads(1);  // the model is too small to be worth more
  // Seeds the table and the two classifiers.
  at::manual_seed(static_cast<uint64_t>(options.seed * (1 + kTrainers) + launch.rank));

  weft::JoinOptions join{.name = leads ? kServer : trainer_name(launch.rank - 1),
                         .library = library()};
  // A line per worker and phase would drown the progress; a user who sets a level gets it.
  if (environment.count("WEFT_LOG_LEVEL") == 0) join.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(join));
  // A trainer does what it is told: its shutdown waits until the server leaves, too.
  const bool learned = !leads || lead(worker, split, options);
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "remote_embedding: shutdown: %s\n", result.status.message());
  }
  return learned && result.status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace remote_embedding

int main(int argc, char** argv) {
  return examples::run_main("remote_embedding", &remote_embedding::run, argc, argv);
}
