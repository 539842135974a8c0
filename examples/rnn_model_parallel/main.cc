// rnn_model_parallel: a language model whose parts live at two workers. The tables with one row per
// character, embedding and decoder, are at a parameter server, the LSTM between them is at the
// trainer. Every step goes there and back twice, forward and backward. --help says how to start it.

#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include "ATen/Context.h"
#include "ATen/Parallel.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/command_line.h"
#include "weft/examples/loss_log.h"
#include "weft/examples/rnn_model_parallel/text.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

namespace rnn {
namespace {

constexpr char kServer[] = "ps0";
constexpr char kTrainer[] = "trainer0";

constexpr int64_t kWidth = 64;    // of a character's embedding
constexpr int64_t kHidden = 128;  // of the LSTM
constexpr double kRate = 5e-3;
constexpr double kMaxNorm = 1.0;

constexpr int64_t kSteps = 240;
constexpr double kTarget = 1.8;

struct Options {
  std::string text;
  int64_t steps = kSteps;
  int64_t seed = 1;
};

// What the server lets others make and call: two modules of LibTorch, as they are.
weft::Library library() {
  weft::Library lib("rnn");
  weft::module_<torch::nn::EmbeddingImpl>(lib, "Embedding")
      .constructor<int64_t, int64_t>()
      .def("forward", &torch::nn::EmbeddingImpl::forward);
  weft::module_<torch::nn::LinearImpl>(lib, "Decoder")
      .constructor<int64_t, int64_t>()
      .def("forward", &torch::nn::LinearImpl::forward);
  return lib;
}

// The whole model, as the trainer sees it.
class Model {
 public:
  // State of the LSTM: its output and its cells after the last character.
  using State = std::tuple<at::Tensor, at::Tensor>;

  Model(const weft::Worker& worker, int64_t symbols)
      : embedding_(worker, kServer, symbols, kWidth), lstm_(kWidth, kHidden) {
    // A RemoteModule is made in the background. Asking the first for its parameters waits for it;
    // so both draw theirs from the server's generator in this order, and equal seeds give equal
    // runs.
    parameters_ = embedding_.parameters();
    decoder_ = weft::RemoteModule<torch::nn::LinearImpl>(worker, kServer, kHidden, symbols);
    for (auto& one : decoder_.parameters()) parameters_.push_back(std::move(one));
    for (const at::Tensor& own : lstm_->parameters()) {
      parameters_.push_back(weft::RRef<at::Tensor>::local(worker, own));
    }
  }

  // Characters (time x stream) to logits of those that follow (time x stream x symbols). `state` is
  // what the last chunk left, or undefined tensors.
  at::Tensor forward(const at::Tensor& characters, State* state) {
    std::optional<State> before;
    if (std::get<0>(*state).defined()) before = *state;
    auto [output, after] = lstm_->forward(embedding_.forward(characters), before);
    *state = after;
    return decoder_.forward(output);
  }

  // References to all parameters: each stays where it is, and is updated there.
  const std::vector<weft::RRef<at::Tensor>>& parameters() const { return parameters_; }

 private:
  weft::RemoteModule<torch::nn::EmbeddingImpl> embedding_;
  torch::nn::LSTM lstm_;
  weft::RemoteModule<torch::nn::LinearImpl> decoder_;
  std::vector<weft::RRef<at::Tensor>> parameters_;
};

struct Losses {
  double first = 0;
  double last = 0;
};

Losses train(const weft::Worker& worker, const Text& text, int64_t steps) {
  Model model(worker, text.symbols());
  weft::DistributedOptimizer<weft::optim::Adam> optimizer(worker, model.parameters(),
                                                          {.lr = kRate});
  examples::LossLog log(worker, steps, /*every=*/20);
  Model::State state;
  for (int64_t step = 0; step < steps; ++step) {
    const Chunk chunk = text.chunk(step);
    // The values go on from chunk to chunk, the graph does not: a backward ends where its chunk
    // began, and its context has forgotten the calls of the chunks before.
    state = chunk.fresh ? Model::State()
                        : Model::State(std::get<0>(state).detach(), std::get<1>(state).detach());
    weft::DistAutogradContext context(worker);
    const at::Tensor logits = model.forward(chunk.inputs, &state);
    const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), chunk.targets.flatten());
    context.backward({loss});
    context.clip_grad_norm(kMaxNorm);  // of the gradients at both workers, as of one vector
    optimizer.step(context);
    log.add(loss.item<double>());
  }
  return {.first = log.first(), .last = log.last()};
}

// Whether the model has learned.
bool lead(const weft::Worker& worker, const Text& text, const Options& options) {
  absl::PrintF("%d characters, %d different ones; to guess blindly costs %.2f nats per character\n",
               text.size(), text.symbols(), std::log(static_cast<double>(text.symbols())));
  const Losses losses = train(worker, text, options.steps);
  const bool learned = losses.last < kTarget;
  absl::PrintF(
      "rnn_model_parallel: %s first_loss=%.3f last_loss=%.3f (%s %.2f nats per character)\n",
      learned ? "ok" : "not learned", losses.first, losses.last, learned ? "below" : "not below",
      kTarget);
  std::fflush(stdout);
  return learned;
}

void print_help() {
  absl::PrintF(
      "usage: rnn_model_parallel [options], on 2 processes\n"
      "\n"
      "Learns to predict the next character of a text. Rank 0 has the embedding and the decoder,\n"
      "rank 1 the LSTM and the text. For example\n"
      "\n"
      "  weftrun -n 2 rnn_model_parallel\n"
      "  weftrun --role ps:1 --role trainer:1 rnn_model_parallel\n"
      "  torchrun --no-python --nproc-per-node 2 rnn_model_parallel\n"
      "\n"
      "It prints the first loss and the last one (the mean of the last ten steps), and exits with\n"
      "1 unless the last is below %.2f nats per character.\n"
      "\n"
      "  --text FILE   what to learn; without it the first that is there of\n"
      "                %s\n"
      "  --steps N     chunks of 16 x 32 characters (%d)\n"
      "  --seed N      of the first parameters (%d)\n"
      "  --help\n",
      kTarget, default_texts("\n                "), Options().steps, Options().seed);
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv, {"--text", "--steps", "--seed"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.text = line.text("--text", options.text);
  options.steps = line.number("--steps", options.steps, 1, 1'000'000);
  options.seed = line.number("--seed", options.seed, 0, 1'000'000'000);

  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size != 2) {
    throw std::invalid_argument(absl::StrFormat(
        "this program needs 2 processes, a server and a trainer, and was started as %d; try: "
        "weftrun -n 2 rnn_model_parallel",
        launch.world_size));
  }
  const bool serves = launch.rank == 0;
  // Read before the join: a process without a text fails before another process waits for it.
  std::optional<Text> text;
  if (!serves) text = read_text(options.text);
  at::set_num_threads(1);  // the model is too small to be worth more
  at::manual_seed(static_cast<uint64_t>(options.seed));

  weft::JoinOptions join{.name = serves ? kServer : kTrainer, .library = library()};
  // A line per worker and phase would drown the progress; a user who sets a level gets it.
  if (environment.count("WEFT_LOG_LEVEL") == 0) join.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(join));
  // The server has nothing to do but to answer: its shutdown waits until the trainer leaves, too.
  const bool learned = serves || lead(worker, *text, options);
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "rnn_model_parallel: shutdown: %s\n", result.status.message());
  }
  return learned && result.status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace rnn

int main(int argc, char** argv) {
  return examples::run_main("rnn_model_parallel", &rnn::run, argc, argv);
}
