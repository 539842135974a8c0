// async_ps: an asynchronous parameter server on real data, as one program for all roles. --help
// says how to start it; examples/README.md explains it.

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

#include "ATen/Parallel.h"
#include "absl/strings/str_format.h"
#include "weft/common/launch_info.h"
#include "weft/dist_autograd/service.h"
#include "weft/dist_optim/service.h"
#include "weft/examples/async_ps/digits.h"
#include "weft/examples/async_ps/options.h"
#include "weft/examples/async_ps/report.h"
#include "weft/examples/async_ps/server.h"
#include "weft/examples/async_ps/trainer.h"
#include "weft/examples/command_line.h"
#include "weft/rref/service.h"

namespace async_ps {
namespace {

constexpr int64_t kHeldOut = 360;

// What this process is in the job.
struct Role {
  bool serves = false;
  std::string name;
  int trainers = 0;
};

Role find_role(const weft::Environment& environment) {
  const weft::Config config = weft::value_or_throw(weft::Config::from_environment(environment));
  const weft::LaunchInfo launch = weft::value_or_throw(weft::launch_info(config, environment));
  if (launch.world_size < 2) {
    throw std::invalid_argument(
        "this program needs at least 2 processes, a server and a trainer, and was started as one; "
        "try: weftrun -n 3 async_ps");
  }
  Role role;
  role.trainers = launch.world_size - 1;
  // "worker" is what weftrun -n says; the other launchers say nothing.
  if (config.role.empty() || config.role == "worker") {
    role.serves = launch.rank == 0;
    role.name = role.serves ? kServer : "trainer" + std::to_string(launch.rank - 1);
  } else {
    role.serves = config.role == "ps";
    role.name = config.name;
    if (role.serves ? role.name != kServer : config.role != "trainer") {
      throw std::invalid_argument("worker " + role.name + " has role " + config.role +
                                  ": one process is ps and all others are trainer, as in "
                                  "weftrun --role ps:1 --role trainer:2 async_ps");
    }
  }
  return role;
}

weft::Worker join(const Role& role, const weft::Environment& environment,
                  std::shared_ptr<ParameterServer> server) {
  weft::JoinOptions options{.name = role.name, .library = library(std::move(server))};
  // One line per worker and phase would drown the progress line; a user who sets a level gets it.
  if (environment.count("WEFT_LOG_LEVEL") == 0) options.log_level = weft::Severity::kWarning;
  // weft::join() of weft/weft.h lists every service; here are those that this program uses.
  options.library.merge(weft::dist_optim_library());
  options.services = {weft::rref_service(), weft::dist_autograd_service(),
                      weft::dist_optim_service()};
  return weft::Worker::join(std::move(options));
}

// True when every worker left in good order.
bool leave(const weft::Worker& worker) {
  const weft::ShutdownResult result = worker.shutdown();
  if (!result.status.ok()) {
    absl::FPrintF(stderr, "async_ps: shutdown: %s\n", result.status.message());
  }
  return result.status.ok();
}

int serve(const Role& role, const weft::Environment& environment, const Options& options) {
  const Images all = read_digits(options.data.empty() ? default_digits() : options.data);
  const Split split = split_by_class(all, kHeldOut, options.seed);
  auto server = std::make_shared<ParameterServer>(
      split.train,
      ServerOptions{.trainers = role.trainers, .epochs = options.epochs, .seed = options.seed});
  const weft::Worker worker = join(role, environment, server);
  auto lost = worker.subscribe([server](const weft::MembershipChange& change) {
    if (change.kind == weft::MembershipChange::Kind::kJoined) return;
    server->trainer_lost(change.worker.name, change.reason.empty() ? "it left" : change.reason);
  });
  if (worker.worker_infos().size() != static_cast<size_t>(role.trainers) + 1) {
    throw std::runtime_error("a trainer was lost before the training began");
  }
  absl::PrintF("%s serves %d trainers; %d images to train on, %d held out here\n", worker.name(),
               role.trainers, split.train.size(), split.test.size());
  std::fflush(stdout);

  const absl::Time begun = worker.now();
  ProgressLine line(begun);
  const weft::Future<void> finished = server->finished();
  while (!finished.done()) {
    // Ends with a deadline each time that there is something to show; what matters is done().
    (void)finished.try_wait(line.interval());
    line.show(server->progress(), worker.now());
  }
  finished.wait();
  const absl::Time ended = worker.now();
  line.end(server->progress(), ended);

  const Parameters parameters = options.autograd ? server->take_layers() : server->parameters();
  save(parameters, options.checkpoint);
  const double test_accuracy = accuracy(parameters, split.test);
  absl::PrintF("%scheckpoint: %s (dict(torch.load(...)) in Python)\n",
               closing_block(server->progress(), ended - begun), options.checkpoint);
  std::fflush(stdout);
  lost.reset();
  const bool in_order = leave(worker);
  absl::PrintF("accuracy=%.3f\n", test_accuracy);
  std::fflush(stdout);
  return in_order ? 0 : 1;
}

int train(const Role& role, const weft::Environment& environment, const Options& options) {
  const weft::Worker worker = join(role, environment, nullptr);
  if (options.autograd) {
    run_split_trainer(worker);
  } else {
    run_trainer(worker);
  }
  return leave(worker) ? 0 : 1;
}

int run(int argc, char** argv) {
  const Options options = parse_options(argc, argv);
  if (options.help) {
    std::fputs(usage().c_str(), stdout);
    return 0;
  }
  const weft::Environment environment = weft::process_environment();
  const Role role = find_role(environment);
  // The model is so small that handing its operations to other threads costs more than it saves.
  at::set_num_threads(1);
  return role.serves ? serve(role, environment, options) : train(role, environment, options);
}

}  // namespace
}  // namespace async_ps

int main(int argc, char** argv) {
  return examples::run_main("async_ps", &async_ps::run, argc, argv);
}
