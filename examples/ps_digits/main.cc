// ps_digits: the handwritten digits of async_ps on tables of weft::ps, over several servers and in
// whatever consistency. --help says how to start it; examples/README.md explains it.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/command_line.h"
#include "weft/examples/ps_digits/training.h"
#include "weft/weft.h"

namespace ps_digits {
namespace {

constexpr int64_t kHeldOut = 360;
constexpr double kWanted = 0.95;

const char kUsage[] =
    "usage: ps_digits [options], on 2 or more processes\n"
    "\n"
    "Trains a classifier of handwritten digits with parameter servers: the first processes serve "
    "a\n"
    "table, the others train. For example\n"
    "\n"
    "  weftrun -n 4 ps_digits --servers 2 --compare 1\n"
    "  weftrun -n 3 ps_digits --consistency ssp:3\n"
    "\n"
    "  --servers N        how many of the processes serve (1)\n"
    "  --replicas N       copies of each part of the table, 1 or 2 (1); 2 want 2 servers\n"
    "  --kill 1           the last server is killed in mid-training, and training goes on; wants\n"
    "                     --replicas 2, and a launcher that lets it: weftrun -n 5 --may-die "
    "worker:1\n"
    "  --consistency C    asp, bsp, ssp:S, batch:K, or hogwild: the trainers, all on one host, "
    "write\n"
    "                     one memory, and servers only add up the results (asp)\n"
    "  --compare 1        asp, bsp, ssp:3, batch:K and hogwild in turn, and a table at the end\n"
    "  --snapshot FOLDER  snapshots of the table are written there while it is trained, five in "
    "all,\n"
    "                     and the last one's values as digits.safetensors, for other programs\n"
    "  --resume FOLDER    goes on from the newest one there, with as many trainers, on any number "
    "of\n"
    "                     servers\n"
    "  --epochs N         times through the training images (30)\n"
    "  --seed N           of the split, the first values and the order of batches (1)\n"
    "  --data FILE        the images (digits.csv of the build)\n"
    "  --help\n";

bool leave(const weft::Worker& worker) {
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "ps_digits: shutdown: %s\n", result.status.message());
  }
  return result.status.ok();
}

std::string trainer_name(int trainer) { return "trainer" + std::to_string(trainer); }

// Until each of them has been a member, and has left or died.
void wait_for_trainers(const weft::Worker& worker, int trainers) {
  std::promise<void> over;
  std::atomic_flag told = ATOMIC_FLAG_INIT;
  const auto look = [&] {
    for (int t = 0; t < trainers; ++t) {
      const auto info = worker.try_get_worker_info(trainer_name(t));
      if (weft::error_kind(info.status()) != weft::ErrorKind::kPeerLost) return;
    }
    if (!told.test_and_set()) over.set_value();
  };
  const auto subscription = worker.subscribe([&](const weft::MembershipChange&) { look(); });
  look();
  over.get_future().wait();
}

std::vector<std::string> modes_of(const examples::CommandLine& line, int trainers) {
  if (line.number("--compare", 0, 0, 1) == 0) return {line.text("--consistency", "asp")};
  return {"asp", "bsp", "ssp:3", "batch:" + std::to_string(std::max(1, trainers - 1)), "hogwild"};
}

int run_trainer(const weft::Worker& worker, const examples::CommandLine& line,
                const std::vector<std::string>& servers, const Plan& plan) {
  const std::string data = line.text("--data", async_ps::default_digits());
  const async_ps::Split split =
      async_ps::split_by_class(async_ps::read_digits(data), kHeldOut, plan.seed);
  const weft::ps::Client client(worker, {.servers = servers});
  std::vector<Result> results;
  bool learned = true;
  Plan next = plan;
  if (const std::string folder = line.text("--resume", ""); !folder.empty()) {
    const Mode mode = parse_mode(modes_of(line, plan.trainers).at(0), plan.trainers);
    next.first = resume(client, mode, plan, split, folder);
  }
  for (const std::string& text : modes_of(line, plan.trainers)) {
    results.push_back(train(worker, client, parse_mode(text, plan.trainers), next, split));
    learned &= results.back().accuracy >= kWanted;
    if (plan.trainer != 0) continue;
    if (!next.victim.empty()) {
      absl::PrintF("server %s was killed in mid-training: %d parts found at another\n", next.victim,
                   results.back().moves);
      next.victim.clear();
    }
    absl::PrintF("%s over %d servers: %d trainers, accuracy=%.4f\n", text, servers.size(),
                 plan.trainers, results.back().accuracy);
    std::fflush(stdout);
  }
  if (plan.trainer == 0) {
    absl::PrintF("%s", table_of(results));
    absl::PrintF("ps_digits: %s, accuracy %s %.2f in each\n", learned ? "ok" : "not learned",
                 learned ? "at least" : "below", kWanted);
    std::fflush(stdout);
  }
  return leave(worker) && learned ? 0 : 1;
}

int run(int argc, char** argv) {
  const examples::CommandLine line(
      argc, argv,
      {"--servers", "--replicas", "--kill", "--consistency", "--compare", "--snapshot", "--resume",
       "--epochs", "--seed", "--data"});
  if (line.help()) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  at::set_num_threads(1);
  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size < 2) {
    throw std::invalid_argument(
        "this program needs at least 2 processes, a server and a trainer, and was started as one; "
        "try: weftrun -n 4 ps_digits --servers 2 --compare 1");
  }
  const auto servers = static_cast<int>(line.number("--servers", 1, 1, launch.world_size - 1));
  Plan plan;
  plan.trainers = launch.world_size - servers;
  plan.trainer = launch.rank - servers;
  plan.epochs = line.number("--epochs", 30, 1, 100'000);
  plan.replicas = static_cast<uint32_t>(line.number("--replicas", 1, 1, std::min(servers, 2)));
  plan.seed = static_cast<uint64_t>(line.number("--seed", 1, 0, 1'000'000'000));
  const bool kill = line.number("--kill", 0, 0, 1) == 1;
  if (kill && plan.replicas != 2) {
    throw std::invalid_argument(
        "--kill 1 wants --replicas 2: with one copy the killed server's part of the table is gone");
  }
  plan.snapshots = line.text("--snapshot", "");
  if (!(plan.snapshots + line.text("--resume", "")).empty() &&
      line.number("--compare", 0, 0, 1) == 1) {
    throw std::invalid_argument(
        "--snapshot and --resume are of one training, --compare has several");
  }
  const bool of_tables = kill || !(plan.snapshots + line.text("--resume", "")).empty();
  for (const std::string& text : modes_of(line, plan.trainers)) {
    if (parse_mode(text, plan.trainers).hogwild && of_tables &&
        line.number("--compare", 0, 0, 1) == 0) {
      throw std::invalid_argument(
          "--kill, --snapshot and --resume are of tables, and hogwild has none");
    }
  }
  std::vector<std::string> names;
  for (int i = 0; i < servers; ++i) names.push_back("ps" + std::to_string(i));

  if (kill) plan.victim = names.back();
  const bool serves = plan.trainer < 0;
  weft::JoinOptions options;
  options.name = serves ? names[static_cast<size_t>(launch.rank)] : trainer_name(plan.trainer);
  options.library = library();
  // A job that outlives one of its processes is a dynamic group: shutdown() waits for no other there.
  options.dynamic = kill;
  if (environment.count("WEFT_LOG_LEVEL") == 0) options.log_level = weft::Severity::kWarning;
  const weft::Worker worker = weft::join(std::move(options));
  if (!serves) return run_trainer(worker, line, names, plan);
  const weft::ps::Server server(worker);
  if (kill) wait_for_trainers(worker, plan.trainers);
  return leave(worker) ? 0 : 1;  // when all trainers have finished
}

}  // namespace
}  // namespace ps_digits

int main(int argc, char** argv) {
  return examples::run_main("ps_digits", &ps_digits::run, argc, argv);
}
