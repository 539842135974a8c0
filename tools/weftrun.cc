// weftrun: starts the processes of a job on this machine and looks after them (docs/launch.md).

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "weft/tools/weftrun/options.h"
#include "weft/tools/weftrun/plan.h"
#include "weft/tools/weftrun/process.h"
#include "weft/tools/weftrun/supervisor.h"
#include "weft/tools/weftrun/system.h"

extern char** environ;

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
                                            int cores, std::vector<std::string>& notes) {
  std::vector<std::string> result;
  std::set<std::string> own = {"RANK",
                               "LOCAL_RANK",
                               "WORLD_SIZE",
                               "LOCAL_WORLD_SIZE",
                               "GROUP_RANK",
                               "GROUP_WORLD_SIZE",
                               "ROLE_RANK",
                               "ROLE_NAME",
                               "ROLE_WORLD_SIZE",
                               "MASTER_ADDR",
                               "MASTER_PORT",
                               "WEFT_JOB_ID",
                               "WEFT_STORE",
                               "WEFT_ROLE",
                               "WEFT_NAME",
                               std::string(kTagVariable)};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    absl::string_view text = *entry;
    absl::string_view name = text.substr(0, text.find('='));
    if (!is_foreign_variable(name) && own.count(std::string(name)) == 0) result.emplace_back(text);
  }
  std::optional<std::string> outer_tags = get_env(kTagVariable);
  result.push_back(
      absl::StrCat(kTagVariable, "=", outer_tags ? absl::StrCat(*outer_tags, ":", tag) : tag));

  if (!get_env("OMP_NUM_THREADS")) {
    int threads = std::max(1, cores / options.local_size());
    result.push_back(absl::StrCat("OMP_NUM_THREADS=", threads));
    notes.push_back(absl::StrCat("OMP_NUM_THREADS=", threads, " for each process (", cores,
                                 " cores, ", options.local_size(),
                                 " local ranks); set it yourself to change that"));
  }
  if (options.debug_attach && !get_env("WEFT_LEASE")) {
    result.push_back("WEFT_LEASE=24h");
    notes.push_back("--debug-attach: WEFT_LEASE=24h, a stopped process is not taken for dead");
  }
  return result;
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
  if (!program.ok()) {
    int code = absl::IsNotFound(program.status()) ? kExitNotFound : kExitNotExecutable;
    return fail(
        code, absl::StrCat("cannot start ", options->program[0], ": ", program.status().message()));
  }
  if (!options->log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options->log_dir, error);
    if (error)
      return fail(kExitFailed,
                  absl::StrCat("cannot make ", options->log_dir, ": ", error.message()));
  }

  Job job;
  job.id = random_hex(16);
  job.nodes = {{.host = host_name(), .roles = options->roles}};
  absl::StatusOr<std::string> private_dir;
  if (options->rdzv.empty()) {
    private_dir = make_private_dir();
    if (!private_dir.ok()) return fail(kExitFailed, private_dir.status().message());
    job.store_url = absl::StrCat("file://", *private_dir, "/store");
  } else {
    job.store_url = options->rdzv;
  }
  TemporaryDir temporary(private_dir.ok() ? *private_dir : "");

  const std::string tag = random_hex(8);
  absl::StatusOr<SignalSetup> signals = take_signals();
  if (!signals.ok()) return fail(kExitFailed, signals.status().message());
  absl::StatusOr<Guard> guard = Guard::start(tag, temporary.path());
  if (!guard.ok()) return fail(kExitFailed, guard.status().message());

  absl::StatusOr<HeldPort> port = hold_port();
  if (!port.ok()) return fail(kExitFailed, port.status().message());
  job.master_addr = "127.0.0.1";
  job.master_port = port->port;

  absl::StatusOr<std::vector<ProcessPlan>> plan = make_plan(job, options->node_rank);
  if (!plan.ok()) return fail(kExitUsage, plan.status().message());

  std::vector<std::string> notes;
  std::vector<std::string> environment =
      common_environment(*options, tag, static_cast<int>(allowed_cores().size()), notes);
  Supervisor supervisor({.options = *options,
                         .host = job.nodes[options->node_rank].host,
                         .program_path = *program,
                         .environment = std::move(environment),
                         .tag = tag,
                         .plan = *std::move(plan),
                         .signals = *std::move(signals),
                         .peers = nullptr,
                         .notes = std::move(notes)});
  int code = supervisor.run();
  guard->dismiss();
  return code;
}

}  // namespace
}  // namespace weft::launch

int main(int argc, char** argv) {
  return weft::launch::run(std::vector<std::string>(argv + 1, argv + argc));
}
