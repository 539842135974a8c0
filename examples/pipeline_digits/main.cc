// pipeline_digits: a network of eight layers in a pipeline over four workers. The schedule is a
// choice: it changes who computes what when, and not one bit of what is learned. --help says how to
// start it.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Parallel.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "weft/common/launch_info.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/examples/loss_log.h"
#include "weft/examples/pipeline_digits/model.h"
#include "weft/pipeline/partition.h"
#include "weft/pipeline/pipeline.h"
#include "weft/pipeline/profile.h"
#include "weft/pipeline/schedule.h"
#include "weft/pipeline/simulator.h"
#include "weft/pipeline/verifier.h"
#include "weft/rref/remote_module.h"
#include "weft/weft.h"

namespace digits {
namespace {

constexpr int kWorkers = 4;
constexpr int64_t kHeldOut = 360;
constexpr double kTarget = 0.15;

struct Options {
  std::string schedule = "1f1b";
  std::string partition = "uniform";
  std::string data;
  std::string profile;
  int64_t micro_batches = 8;
  int64_t batch = 128;
  int64_t steps = 110;
  int64_t seed = 1;
  bool keep_copies = false;
  int64_t kill = -1;
};

// Ends the process as a crash does.
void crash() { std::raise(SIGKILL); }

weft::Library library() {
  weft::Library lib("digits");
  weft::module_<PartImpl>(lib, "Part")
      .constructor<int64_t, int64_t, int64_t>()
      .def("forward", &PartImpl::forward);
  lib.def("loss", &loss);
  lib.def("crash", &crash);
  return lib;
}

at::Tensor pixels_of(const async_ps::Images& images) { return images.pixels.to(at::kFloat) / 16; }

// Which layers make up which stage: by a list, or by what each costs here for one micro-batch.
weft::pipeline::Partition divide(const weft::pipeline::Plan& plan, const Options& options,
                                 const async_ps::Images& images) {
  weft::pipeline::PartitionRequest request;
  request.stages = plan.stages();
  if (options.partition == "auto" || !options.profile.empty()) {
    std::vector<weft::pipeline::ProfiledLayer> layers;
    for (int64_t i = 0; i < kLayers; ++i) {
      const auto part = std::make_shared<PartImpl>(i, i + 1, options.seed);
      layers.push_back({absl::StrFormat("layer%d", i),
                        [part](const at::Tensor& x) { return part->forward(x); },
                        part->parameters()});
    }
    const at::Tensor sample = pixels_of(images).narrow(0, 0, options.batch / options.micro_batches);
    request.layers = weft::value_or_throw(weft::pipeline::profile_layers(layers, sample));
    if (!options.profile.empty()) {
      std::ofstream file(options.profile);
      file << weft::value_or_throw(weft::pipeline::layer_costs_to_text(request.layers));
      if (!file.flush()) throw std::invalid_argument("cannot write " + options.profile);
    }
  } else {
    for (int64_t i = 0; i < kLayers; ++i) {
      request.layers.push_back({.name = absl::StrFormat("layer%d", i)});
    }
  }
  const auto made = weft::pipeline::partition_by(options.partition, request);
  if (!made.ok()) throw std::invalid_argument(std::string(made.status().message()));
  return *made;
}

// The parts of the network, and where they are. A plan's worker whose process has ended moves to the
// next rank that is left.
class Parts {
 public:
  Parts(const weft::Worker& worker, const weft::pipeline::Plan& plan,
        const weft::pipeline::Partition& partition, int64_t seed)
      : worker_(worker), plan_(plan), partition_(partition), seed_(seed) {
    for (int w = 0; w < kWorkers; ++w) ranks_.push_back(w);
    for (int s = 0; s < plan.stages(); ++s) {
      at_.push_back(ranks_[plan.placement[s]]);
      parts_.push_back(make(s));
    }
  }
  const std::vector<weft::RemoteModule<PartImpl>>& all() const { return parts_; }

  // A stage that was at a process that has ended, anew.
  weft::pipeline::Stage replace(int stage) {
    int& rank = ranks_[plan_.placement[stage]];
    if (at_[stage] == rank) {  // the first stage of this worker
      gone_.insert(rank);
      while (gone_.count(rank) > 0) rank = (rank + 1) % kWorkers;
    }
    absl::PrintF("pipeline_digits: stage %d was at rank %d, and is at rank %d now\n", stage,
                 at_[stage], rank);
    at_[stage] = rank;
    parts_[stage] = make(stage);
    return parts_[stage];
  }

 private:
  weft::RemoteModule<PartImpl> make(int stage) const {
    return {worker_, absl::StrFormat("rank:%d", ranks_[plan_.placement[stage]]),
            int64_t{partition_.begins[stage]}, int64_t{partition_.begins[stage + 1]}, seed_};
  }

  const weft::Worker& worker_;
  const weft::pipeline::Plan& plan_;
  const weft::pipeline::Partition partition_;
  const int64_t seed_;
  std::vector<int> ranks_;  // by worker of the plan
  std::vector<int> at_;     // by stage
  std::set<int> gone_;
  std::vector<weft::RemoteModule<PartImpl>> parts_;
};

double accuracy(const std::vector<weft::RemoteModule<PartImpl>>& parts,
                const async_ps::Images& test) {
  at::Tensor x = pixels_of(test);
  for (const auto& part : parts) x = part.forward(x);
  return x.argmax(1).eq(test.labels).to(at::kDouble).mean().item<double>();
}

// Whether the network has learned.
bool train(const weft::Worker& worker, const weft::pipeline::Plan& plan, const Options& options,
           const async_ps::Split& data) {
  const auto partition = divide(plan, options, data.train);
  absl::PrintF("pipeline_digits: stages begin at layers %s\n",
               absl::StrJoin(partition.begins.begin(), partition.begins.end() - 1, ", "));
  Parts parts(worker, plan, partition, options.seed);
  weft::pipeline::Pipeline pipeline(
      worker, {parts.all().begin(), parts.all().end()}, plan,
      {.loss = "digits.loss",
       .optimizer = weft::optimizer_choice<weft::optim::SGD>({.lr = 0.02, .momentum = 0.9}),
       .keep_copies = options.keep_copies || options.kill >= 0});
  examples::LossLog log(worker, options.steps, /*every=*/20);
  const int64_t n = data.train.size();
  const int64_t per_epoch = std::max<int64_t>(1, n / options.batch);
  bool killed = false;
  for (int64_t step = 0; step < options.steps;) {
    // A function of the step alone, which may be repeated.
    const int64_t begin = step - step % per_epoch;
    const auto order = async_ps::shuffled(n, static_cast<uint64_t>(options.seed + begin));
    const auto at = order.begin() + (step - begin) * options.batch;
    const async_ps::Images batch = async_ps::select(data.train, {at, at + options.batch});
    auto result = pipeline.step_async({pixels_of(batch)}, batch.labels);
    if (step == options.kill && !killed) {
      killed = true;
      (void)weft::rpc_async(worker, 2, &crash);  // without an answer
    }
    const auto ended = result.try_wait();
    if (ended.ok()) {
      log.add(ended->loss);
      ++step;
      continue;
    }
    if (!options.keep_copies && options.kill < 0) weft::throw_if_error(ended.status());
    absl::PrintF("pipeline_digits: %s\n", ended.status().message());
    step = pipeline.rebuild([&](int stage) { return parts.replace(stage); });
    absl::PrintF("pipeline_digits: goes on with step %d\n", step);
    std::fflush(stdout);
  }
  pipeline.close();
  const bool learned = log.last() < kTarget;
  absl::PrintF("pipeline_digits: %s schedule=%s first_loss=%.9f last_loss=%.9f accuracy=%.4f\n",
               learned ? "ok" : "not learned", plan.schedule, log.first(), log.last(),
               accuracy(parts.all(), data.test));
  std::fflush(stdout);
  return learned;
}

void print_plan(const weft::pipeline::Plan& plan) {
  const auto predicted = weft::pipeline::simulate(
      plan, weft::pipeline::Costs::uniform(plan, 1200, 1200, 1200, 0, 1200));
  absl::PrintF(
      "%sa step of %d micro-batches takes %.2f units where %d are work; "
      "bubble %.1f %%\n",
      weft::pipeline::verify(plan).certificate(), plan.micro_batches,
      static_cast<double>(predicted.makespan) / 1200, 3 * plan.micro_batches,
      100 * predicted.makespan_bubble());
}

void print_help() {
  const Options o;
  absl::PrintF(
      "usage: pipeline_digits [options], on %d processes\n"
      "\n"
      "Learns the handwritten digits with a network of %d layers that is divided among the\n"
      "processes. For example\n"
      "\n"
      "  weftrun -n %d pipeline_digits --schedule zb-v\n"
      "\n"
      "It prints what was proved about the schedule, the first loss and the last one (the mean of\n"
      "the last ten steps), which are the same for every schedule, and exits with 1 unless the\n"
      "last is below %.2f.\n"
      "\n"
      "  --schedule NAME      %s (%s)\n"
      "  --partition HOW      layers of each stage: uniform, auto (the slowest stage as fast as\n"
      "                       possible, by what each layer takes here), or a list: 3,2,2,1 (%s)\n"
      "  --profile FILE       writes what each layer takes, for weft-plan pipeline --profile FILE\n"
      "  --micro-batches N    parts of a batch (%d)\n"
      "  --batch N            images of a step (%d)\n"
      "  --steps N            (%d)\n"
      "  --seed N             of the first parameters and the order of the images (%d)\n"
      "  --keep-copies 1      a neighbour keeps a copy of each stage: training goes on when a "
      "process\n"
      "                       ends, with its stages at another one (weftrun --may-die)\n"
      "  --kill STEP          the same, and rank 2 ends in that step, as by a crash\n"
      "  --data FILE          instead of ../share/weft/digits.csv, beside the program\n"
      "  --help\n",
      kWorkers, kLayers, kWorkers, kTarget, absl::StrJoin(weft::pipeline::schedule_names(), ", "),
      o.schedule, o.partition, o.micro_batches, o.batch, o.steps, o.seed);
}

int run(int argc, char** argv) {
  const examples::CommandLine line(
      argc, argv,
      {"--schedule", "--partition", "--micro-batches", "--batch", "--steps", "--seed", "--data",
       "--keep-copies", "--kill", "--profile"});
  if (line.help()) {
    print_help();
    return 0;
  }
  Options options;
  options.schedule = line.text("--schedule", options.schedule);
  options.partition = line.text("--partition", options.partition);
  options.profile = line.text("--profile", "");
  options.micro_batches = line.number("--micro-batches", options.micro_batches, 1, 1000);
  options.batch = line.number("--batch", options.batch, options.micro_batches, 1000);
  options.steps = line.number("--steps", options.steps, 1, 1'000'000);
  options.seed = line.number("--seed", options.seed, 0, 1'000'000'000);
  options.kill = line.number("--kill", options.kill, 0, options.steps - 1);
  options.keep_copies = line.number("--keep-copies", 0, 0, 1) != 0;
  options.data = line.text("--data", async_ps::default_digits());

  const auto plan = weft::pipeline::make_schedule(options.schedule, kWorkers,
                                                  static_cast<int>(options.micro_batches));
  if (!plan.ok()) throw std::invalid_argument(std::string(plan.status().message()));
  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size != kWorkers) {
    throw std::invalid_argument(absl::StrFormat(
        "this program needs %d processes, a stage or two at each, and was started as %d; try: "
        "weftrun -n %d pipeline_digits",
        kWorkers, launch.world_size, kWorkers));
  }
  async_ps::Split data;
  if (launch.rank == 0) {
    data = async_ps::split_by_class(async_ps::read_digits(options.data), kHeldOut,
                                    static_cast<uint64_t>(options.seed));
    print_plan(*plan);
  }
  at::set_num_threads(1);  // the layers are too small to be worth more

  weft::JoinOptions join{.library = library()};
  if (environment.count("WEFT_LOG_LEVEL") == 0) join.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(join));
  // The others have nothing to do but their stages: their shutdown waits until rank 0 leaves, too.
  const bool learned = launch.rank != 0 || train(worker, *plan, options, data);
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "pipeline_digits: shutdown: %s\n", result.status.message());
  }
  // That a process is missing is no failure where one may be lost.
  const bool may_lose = options.keep_copies || options.kill >= 0;
  return learned && (result.status.ok() || may_lose) ? 0 : 1;
}

}  // namespace
}  // namespace digits

int main(int argc, char** argv) {
  return examples::run_main("pipeline_digits", &digits::run, argc, argv);
}
