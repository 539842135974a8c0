// weftrun: starts the processes of a job on this machine and looks after them (docs/launch.md).

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "weft/store/internal/launch/guard.h"
#include "weft/store/internal/launch/output_queue.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/store/internal/launch/process.h"
#include "weft/store/internal/launch/supervisor.h"
#include "weft/store/internal/launch/system.h"
#include "weft/tools/weftrun/ca.h"
#include "weft/tools/weftrun/options.h"
#include "weft/tools/weftrun/session.h"
#include "weft/tools/weftrun/tls.h"

namespace weft::launch {
namespace {

constexpr int kExitUsage = 2;
constexpr int kExitFailed = 1;
constexpr int kExitNotExecutable = 126;
constexpr int kExitNotFound = 127;

std::optional<std::string> get_env(absl::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

int fail(int code, absl::string_view what) {
  std::fprintf(stderr, "weftrun: %s\n", std::string(what).c_str());
  return code;
}

// The environment that every process gets, before what differs between them.
std::vector<std::string> common_environment(const Options& options, const std::string& tag,
                                            size_t cores, std::vector<std::string>& notes) {
  std::vector<std::string> result = inherited_environment(
      tag, options.tls.empty() ? std::vector<std::string>() : tls_variables());
  if (!get_env("OMP_NUM_THREADS")) {
    int threads = threads_per_process(cores, options.local_size());
    result.push_back(absl::StrCat("OMP_NUM_THREADS=", threads));
    notes.push_back(absl::StrCat("OMP_NUM_THREADS=", threads, " for each process (", cores,
                                 " cores, ", options.local_size(),
                                 " local ranks); set it yourself to change that"));
  }
  if (options.allow_insecure) result.push_back("WEFT_ALLOW_INSECURE=1");
  if (options.debug_attach && !get_env("WEFT_LEASE")) {
    result.push_back("WEFT_LEASE=24h");
    notes.push_back("--debug-attach: WEFT_LEASE=24h, a stopped process is not taken for dead");
  }
  return result;
}

// How long a weftrun may be silent before the others take it for dead: as for the programs.
absl::Duration lease_of(const Options& options) {
  absl::Duration lease;
  if (absl::ParseDuration(get_env("WEFT_LEASE").value_or(""), &lease) &&
      lease > absl::ZeroDuration()) {
    return lease;
  }
  return options.debug_attach ? absl::Hours(24) : absl::Seconds(15);
}

SupervisorOptions supervision_of(const Options& options) {
  return {.program = options.program,
          .log_dir = options.log_dir,
          .tee = options.tee,
          .pin = options.pin,
          .quiet = options.quiet,
          .announces = options.explicit_roles || options.nnodes > 1,
          .grace = options.grace,
          .nnodes = options.nnodes,
          .may_die = options.may_die,
          .restarts = options.restarts};
}

// A directory that ends with this object.
class TemporaryDir {
 public:
  explicit TemporaryDir(std::string path) : path_(std::move(path)) {}
  TemporaryDir(const TemporaryDir&) = delete;
  TemporaryDir& operator=(const TemporaryDir&) = delete;
  ~TemporaryDir() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove_all(path_, error);
    if (error) fail(0, absl::StrCat("cannot remove ", path_, ": ", error.message()));
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The lives of a job on this node: each begins with a meeting (with several nodes) and ends with the
// end of all processes.
class Launch {
 public:
  struct Setup {
    Options options;
    std::string host;
    absl::StatusOr<std::string> program;
    int program_code = 0;  // when there is no such program
    std::string tag;
    std::string directory;  // of this user alone
    int master_port = 0;
    int store_port = 0;
    const SignalSetup* signals = nullptr;
    Outputs* outputs = nullptr;
  };

  explicit Launch(Setup setup) : setup_(std::move(setup)) {
    if (setup_.options.nnodes > 1) {
      session_ = std::make_unique<Session>(setup_.options, lease_of(setup_.options),
                                           setup_.signals->fd.get(), setup_.outputs);
    }
  }

  // The exit code.
  int run() {
    const int most = setup_.options.max_restarts;
    int restarts = 0;
    SessionEnd end = live(restarts);
    while (end.code != 0 && end.restart && restarts < most) {
      ++restarts;
      setup_.outputs->say(absl::StrCat("restart ", restarts, " of ", most));
      end = live(restarts);
    }
    return end.code;
  }

 private:
  SessionEnd live(int restarts) {
    absl::StatusOr<Job> job = meet(restarts);
    if (!job.ok()) {
      const int stopped_by = session_->stopped_by();
      const int code = stopped_by != 0 ? 128 + stopped_by : kExitFailed;
      return {.code = say(code, absl::StrCat(setup_.options.nnodes,
                                             " nodes did not meet: ", job.status().message()))};
    }
    bool may_restart = false;
    const int code = start(*job, &may_restart);
    if (code != 0 && may_restart && restarts > 0 && restarts == setup_.options.max_restarts) {
      say(code, absl::StrCat("no restart is left of ", restarts));
    }
    if (session_ != nullptr) return session_->finish(code, may_restart);
    return {.code = code, .restart = may_restart};
  }

  absl::StatusOr<Job> meet(int restarts) {
    if (session_ != nullptr) {
      return session_->meet(setup_.host, setup_.master_port, setup_.store_port, restarts);
    }
    // A life finds nothing of the one before it.
    const std::string own_store = absl::StrCat("file://", setup_.directory, "/store", restarts);
    return Job{.id = random_hex(16),
               .store_url = setup_.options.rdzv.empty() ? own_store : setup_.options.rdzv,
               .master_addr = "127.0.0.1",
               .master_port = setup_.master_port,
               .nodes = {{.host = setup_.host, .roles = setup_.options.roles}},
               .restart_count = restarts};
  }

  // To the end of all processes of this node.
  int start(const Job& job, bool* may_restart) {
    const Options& options = setup_.options;
    absl::StatusOr<std::vector<ProcessPlan>> plan = make_plan(job, options.node_rank);
    if (!plan.ok()) return say(kExitUsage, plan.status().message());
    absl::Status tls;
    if (options.tls == "auto") {
      tls = make_credentials(absl::StrCat(setup_.directory, "/tls", job.restart_count), job.id,
                             *plan);
    } else if (!options.tls.empty()) {
      tls = use_credentials(options.tls, *plan);
    }
    if (!tls.ok()) {
      tell_nodes(kExitFailed, absl::StrCat(": ", tls.message()));
      return say(kExitFailed, tls.message());
    }
    if (!setup_.program.ok()) {
      tell_nodes(setup_.program_code, absl::StrCat(" cannot start ", options.program[0], ": ",
                                                   setup_.program.status().message()));
      return setup_.program_code;
    }
    std::vector<std::string> notes;
    if (session_ != nullptr) {
      notes.push_back(absl::StrCat("node ", options.node_rank, " of ", options.nnodes, ", job ",
                                   job.id, ", store ", job.store_url));
    }
    std::vector<std::string> environment =
        common_environment(options, setup_.tag, allowed_cores().size(), notes);
    Supervisor supervisor({.options = supervision_of(options),
                           .host = setup_.host,
                           .program_path = *setup_.program,
                           .environment = std::move(environment),
                           .tag = setup_.tag,
                           .plan = *std::move(plan),
                           .signals = setup_.signals,
                           .outputs = setup_.outputs,
                           .say = [this](absl::string_view text) { setup_.outputs->say(text); },
                           .peers = session_ != nullptr ? session_->peers() : nullptr,
                           .restart_count = job.restart_count,
                           .notes = std::move(notes)});
    const int code = supervisor.run();
    *may_restart = supervisor.may_restart();
    return code;
  }

  // Returns `code`.
  int say(int code, absl::string_view what) {
    setup_.outputs->say(what);
    return code;
  }

  void tell_nodes(int code, const std::string& what) {
    if (session_ == nullptr) return;
    session_->peers()->report({.exit_code = code,
                               .text = absl::StrCat("node ", setup_.options.node_rank, " (host ",
                                                    setup_.host, ")", what)});
  }

  const Setup setup_;
  std::unique_ptr<Session> session_;  // with several nodes
};

int run(const std::vector<std::string>& args) {
  absl::StatusOr<Options> options = parse_options(args, get_env);
  if (!options.ok()) return fail(kExitUsage, options.status().message());
  if (options->help) {
    std::fputs(usage().c_str(), stdout);
    return std::fflush(stdout) == 0 ? 0 : kExitFailed;
  }
  if (options->version) {
    std::printf("weftrun %s\n", WEFT_VERSION);
    return std::fflush(stdout) == 0 ? 0 : kExitFailed;
  }
  absl::StatusOr<std::string> program =
      find_program(options->program[0], get_env("PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  int program_code = absl::IsNotFound(program.status()) ? kExitNotFound : kExitNotExecutable;
  if (!program.ok()) {
    fail(program_code,
         absl::StrCat("cannot start ", options->program[0], ": ", program.status().message()));
    // With several nodes the others must hear of it, so the meeting comes first.
    if (options->nnodes == 1) return program_code;
  }
  if (!options->log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options->log_dir, error);
    if (error) {
      return fail(kExitFailed,
                  absl::StrCat("cannot make ", options->log_dir, ": ", error.message()));
    }
  }

  absl::StatusOr<std::string> private_dir;
  if (options->rdzv.empty() || options->tls == "auto") {
    private_dir = make_private_dir("weftrun");
    if (!private_dir.ok()) return fail(kExitFailed, private_dir.status().message());
  }
  TemporaryDir temporary(private_dir.ok() ? *private_dir : "");
  const std::string tag = random_hex(8);
  absl::StatusOr<SignalSetup> signals = take_signals();
  if (!signals.ok()) return fail(kExitFailed, signals.status().message());
  absl::StatusOr<Guard> guard = Guard::start("weftrun-guard", tag, temporary.path());
  if (!guard.ok()) return fail(kExitFailed, guard.status().message());
  // After the guard has forked: the queues have threads.
  absl::StatusOr<std::unique_ptr<Outputs>> outputs = Outputs::open();
  if (!outputs.ok()) return fail(kExitFailed, outputs.status().message());
  int code = kExitFailed;
  absl::StatusOr<HeldPort> master_port = hold_port();
  absl::StatusOr<HeldPort> store_port = hold_port();
  if (!master_port.ok() || !store_port.ok()) {
    (*outputs)->say((master_port.ok() ? store_port : master_port).status().message());
    (*outputs)->flush(signals->fd.get());
    guard->dismiss();
    return code;
  }

  Launch launch({.options = *options,
                 .host = host_name(),
                 .program = std::move(program),
                 .program_code = program_code,
                 .tag = tag,
                 .directory = temporary.path(),
                 .master_port = master_port->port,
                 .store_port = store_port->port,
                 .signals = &*signals,
                 .outputs = outputs->get()});
  code = launch.run();
  (*outputs)->flush(signals->fd.get());
  guard->dismiss();
  return code;
}

// weftrun ca: the exit code.
int certify(const std::vector<std::string>& args) {
  const absl::StatusOr<CaOptions> options = parse_ca_options(args);
  if (!options.ok()) return fail(kExitUsage, options.status().message());
  if (options->help) {
    std::fputs(ca_usage().c_str(), stdout);
    return 0;
  }
  const absl::StatusOr<std::vector<std::string>> lines = run_ca(*options, absl::Now());
  if (!lines.ok()) return fail(kExitFailed, lines.status().message());
  for (const std::string& line : *lines) std::printf("%s\n", line.c_str());
  return 0;
}

}  // namespace
}  // namespace weft::launch

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  if (!args.empty() && args[0] == "ca") {
    return weft::launch::certify({args.begin() + 1, args.end()});
  }
  return weft::launch::run(std::move(args));
}
