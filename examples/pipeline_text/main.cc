// pipeline_text: a character transformer in a pipeline over three workers, with a skip from its first
// stage to its last one, past the one between. --help says how to start it.

#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/command_line.h"
#include "weft/examples/loss_log.h"
#include "weft/examples/pipeline_text/model.h"
#include "weft/examples/rnn_model_parallel/text.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/verifier.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

namespace pipeline_text {
namespace {

constexpr int kStages = 3;
constexpr int kMicroBatches = 4;
constexpr double kTarget = 2.4;

struct Options {
  std::string text;
  std::string schedule = "1f1b";
  int64_t steps = 150;
  int64_t seed = 1;
};

weft::Library library() {
  weft::Library lib("text");
  weft::module_<StageImpl>(lib, "Stage")
      .constructor<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>()
      .def("forward", &StageImpl::forward);
  lib.def("loss", &loss);
  return lib;
}

// A schedule of a chain, with one edge more: the second output of the first stage goes straight to
// the last one. The transfers are inserted anew.
weft::pipeline::Plan with_skip(weft::pipeline::Plan plan) {
  using weft::pipeline::ActionKind;
  const int last = plan.stages() - 1;
  plan.edges[0].output = 0;
  plan.edges.push_back({.from = 0, .to = last, .output = 1});
  for (auto& list : plan.workers) {
    std::erase_if(list, [](const weft::pipeline::Action& a) {
      return a.kind >= ActionKind::kSendForward && a.kind <= ActionKind::kReceiveBackward;
    });
  }
  weft::throw_if_error(weft::pipeline::insert_transfers(&plan));
  return plan;
}

// Whether the network has learned.
bool train(const weft::Worker& worker, const rnn::Text& text, const Options& options) {
  const weft::pipeline::Plan plan = with_skip(weft::value_or_throw(
      weft::pipeline::make_schedule(options.schedule, kStages, kMicroBatches)));
  if (plan.stages() != kStages) {
    throw std::invalid_argument("--schedule " + options.schedule +
                                " has more than one stage per worker");
  }
  std::fputs(weft::pipeline::verify(plan).certificate().c_str(), stdout);
  const ModelSizes sizes{.symbols = text.symbols()};
  const std::vector<int64_t> begins = {0, 1, 3, sizes.layers};
  std::vector<weft::RemoteModule<StageImpl>> stages;
  for (int s = 0; s < kStages; ++s) {
    stages.emplace_back(worker, absl::StrFormat("rank:%d", s), begins[static_cast<size_t>(s)],
                        begins[static_cast<size_t>(s) + 1], sizes.symbols, sizes.context,
                        sizes.width, sizes.heads, sizes.layers, options.seed);
  }
  weft::pipeline::Pipeline pipeline(
      worker, {stages.begin(), stages.end()}, plan,
      {.loss = "text.loss", .optimizer = weft::optimizer_choice<weft::optim::Adam>({.lr = 3e-3})});
  examples::LossLog log(worker, options.steps, /*every=*/20);
  for (int64_t step = 0; step < options.steps; ++step) {
    const rnn::Chunk chunk = text.chunk(step);
    // Time x stream there, sequence x time here.
    const at::Tensor inputs = chunk.inputs.t().contiguous();
    log.add(pipeline.step({inputs}, chunk.targets.t().contiguous()).loss);
  }
  pipeline.close();
  const bool learned = log.last() < kTarget;
  absl::PrintF("pipeline_text: %s schedule=%s first_loss=%.6f last_loss=%.6f (%s %.2f nats)\n",
               learned ? "ok" : "not learned", plan.schedule, log.first(), log.last(),
               learned ? "below" : "not below", kTarget);
  std::fflush(stdout);
  return learned;
}

void print_help() {
  const Options o;
  absl::PrintF(
      "usage: pipeline_text [options], on %d processes\n"
      "\n"
      "Learns to predict the next character of a text with a small transformer that is divided\n"
      "among the processes. For example\n"
      "\n"
      "  weftrun -n %d pipeline_text --schedule zb-h1\n"
      "\n"
      "It prints what was proved about the plan, the first loss and the last one (the mean of the\n"
      "last ten steps), and exits with 1 unless the last is below %.2f nats per character.\n"
      "\n"
      "  --text FILE      what to learn; without it the first that is there of\n"
      "                   %s\n"
      "  --schedule NAME  of one stage per worker (%s)\n"
      "  --steps N        chunks of 16 x 32 characters (%d)\n"
      "  --seed N         of the first parameters (%d)\n"
      "  --help\n",
      kStages, kStages, kTarget, rnn::default_texts("\n                   "), o.schedule, o.steps,
      o.seed);
}

int run(int argc, char** argv) {
  const examples::CommandLine line(argc, argv, {"--text", "--schedule", "--steps", "--seed"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.text = line.text("--text", options.text);
  options.schedule = line.text("--schedule", options.schedule);
  options.steps = line.number("--steps", options.steps, 1, 1'000'000);
  options.seed = line.number("--seed", options.seed, 0, 1'000'000);

  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size != kStages) {
    throw std::invalid_argument(
        absl::StrFormat("this program needs %d processes, a stage at each, and was started as %d; "
                        "try: weftrun -n %d pipeline_text",
                        kStages, launch.world_size, kStages));
  }
  std::optional<rnn::Text> text;
  if (launch.rank == 0) text = rnn::read_text(options.text);
  at::set_num_threads(1);  // the layers are too small to be worth more

  weft::JoinOptions join{.library = library()};
  if (environment.count("WEFT_LOG_LEVEL") == 0) join.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(join));
  const bool learned = launch.rank != 0 || train(worker, *text, options);
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "pipeline_text: shutdown: %s\n", result.status.message());
  }
  return learned && result.status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace pipeline_text

int main(int argc, char** argv) {
  return examples::run_main("pipeline_text", &pipeline_text::run, argc, argv);
}
