// rl: reinforcement learning over RRefs, as one program for all roles. One agent has the policy,
// several observers play CartPole and ask it what to do. --help says how to start it;
// examples/README.md explains it.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/examples/command_line.h"
#include "weft/examples/rl/agent.h"
#include "weft/examples/rl/observer.h"
#include "weft/examples/rl/options.h"
#include "weft/examples/rl/report.h"
#include "weft/weft.h"

namespace rl {
namespace {

// Learning from fewer episodes at a time is too noisy.
constexpr int kEpisodesPerUpdate = 4;

// What this process is in the job.
struct Role {
  bool leads = false;
  std::string name;
  int observers = 0;
};

Role find_role(const weft::Environment& environment, const weft::LaunchInfo& launch,
               const Options& options) {
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  Role role;
  role.observers = launch.world_size - 1;
  if (role.observers < 1 || role.observers != options.observers.value_or(role.observers)) {
    throw std::invalid_argument(absl::StrFormat(
        "one process is the agent and each other one an observer, and there are %d processes%s",
        launch.world_size,
        options.observers ? absl::StrFormat(" with --observers %d", *options.observers) : ""));
  }
  // "worker" is what weftrun -n says; the other launchers say nothing.
  if (config.role.empty() || config.role == "worker") {
    role.leads = launch.rank == 0;
    role.name = role.leads ? "agent0" : "observer" + std::to_string(launch.rank - 1);
  } else {
    role.leads = config.role == "agent";
    role.name = config.name;
    if (role.leads ? role.name != "agent0" : config.role != "observer") {
      throw std::invalid_argument("worker " + role.name + " has role " + config.role +
                                  ": one process is agent and all others are observer, as in "
                                  "weftrun --role agent:1 --role observer:4 rl");
    }
  }
  return role;
}

// Becomes weftrun, which starts the agent and the observers. Returns only by an exception.
[[noreturn]] void start_all(const Options& options, int argc, char** argv) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path weftrun = program.parent_path() / "weftrun";
  std::vector<std::string> words = {
      weftrun.string(),
      "--role",
      "agent:1",
      "--role",
      absl::StrFormat("observer:%d", options.observers.value_or(kObservers)),
      "--",
      program.string()};
  words.insert(words.end(), argv + 1, argv + argc);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  setenv("OMP_NUM_THREADS", "1", 0);
  execv(weftrun.c_str(), arguments.data());
  throw std::runtime_error("cannot start " + weftrun.string() + ": " + std::strerror(errno));
}

weft::Worker join(const Role& role, const weft::Environment& environment) {
  weft::JoinOptions options{.name = role.name, .library = library()};
  // As weft::join does, but an RRef that is still held at the end is an error here.
  options.services = {weft::group_service(), weft::rref_service({.fail_on_leak = true})};
  // One line per worker and phase would drown the progress line; a user who sets a level gets it.
  if (environment.count("WEFT_LOG_LEVEL") == 0) options.log_level = weft::Severity::kWarning;
  weft::Worker worker = weft::Worker::join(std::move(options));
  // An observer calls back to the agent while it serves the agent's call. So the agent's first call
  // comes after the observer's join, which may end later than its own.
  weft::barrier(worker);
  return worker;
}

// True when every worker left in good order, and no RRef was left.
bool leave(const weft::Worker& worker) {
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) absl::FPrintF(stderr, "rl: shutdown: %s\n", result.status.message());
  return result.status.ok();
}

// One episode by each observer; throws when one is lost.
void play_round(const std::vector<weft::RRef<Observer>>& observers,
                const weft::RRef<Agent>& agent) {
  agent.local_value()->begin_round();
  std::vector<weft::Future<void>> episodes;
  for (const weft::RRef<Observer>& observer : observers) {
    episodes.push_back(observer.rpc_async(&Observer::run_episode, agent));
  }
  const weft::Status status = weft::when_all(episodes).try_wait();
  if (status.ok()) return;
  // In a batch the others wait for it.
  agent.local_value()->fail(status);
  weft::throw_error(status);
}

int lead(const Role& role, const weft::Environment& environment, const Options& options) {
  const weft::Worker worker = join(role, environment);
  auto learner = std::make_shared<Agent>(
      AgentOptions{.observers = role.observers, .seed = options.seed, .batch = options.batch});
  LearningCurve curve;
  const absl::Time begun = worker.now();
  ProgressLine line(begun);
  {
    std::vector<weft::RRef<Observer>> observers;
    for (int64_t i = 0; i < role.observers; ++i) {
      observers.push_back(
          weft::remote<Observer>(worker, "observer" + std::to_string(i), i, options.seed));
    }
    const auto agent = weft::RRef<Agent>::local(worker, learner);
    while (!curve.solved() && curve.episodes() < options.episodes) {
      for (int played = 0; played < kEpisodesPerUpdate; played += role.observers) {
        play_round(observers, agent);
        for (const double value : learner->returns()) curve.add(value);
      }
      learner->learn();
      line.show(curve, worker.now());
    }
  }  // gives the RRefs back
  const absl::Time ended = worker.now();
  line.end(curve, ended);
  absl::PrintF("%d observers asked for %d actions; the policy was evaluated %d times\n",
               role.observers, learner->answers(), learner->evaluations());
  const std::string result =
      absl::StrFormat("mean_return=%.1f episodes=%d seconds=%.1f", curve.mean(), curve.episodes(),
                      absl::ToDoubleSeconds(ended - begun));
  if (!options.svg.empty()) {
    write_file(options.svg, curve.svg("CartPole: " + result));
    absl::PrintF("learning curve: %s\n", options.svg);
  }
  std::fflush(stdout);
  const bool in_order = leave(worker);
  absl::PrintF("rl: %s %s\n", !curve.solved() ? "not solved" : in_order ? "ok" : "failed", result);
  std::fflush(stdout);
  return curve.solved() && in_order ? 0 : 1;
}

// An observer does what the agent's calls want, until all leave.
int observe(const Role& role, const weft::Environment& environment) {
  const weft::Worker worker = join(role, environment);
  return leave(worker) ? 0 : 1;
}

int run(int argc, char** argv) {
  const Options options = parse_options(argc, argv);
  if (options.help) {
    std::fputs(usage().c_str(), stdout);
    return 0;
  }
  const weft::Environment environment = weft::process_environment();
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.launcher == weft::Launcher::kNone) start_all(options, argc, argv);
  const Role role = find_role(environment, launch, options);
  // The network is so small that handing its operations to other threads costs more than it saves.
  at::set_num_threads(1);
  return role.leads ? lead(role, environment, options) : observe(role, environment);
}

}  // namespace
}  // namespace rl

int main(int argc, char** argv) { return examples::run_main("rl", &rl::run, argc, argv); }
