#include "weft/tools/weftrun/options.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weft::launch {
namespace {

constexpr absl::string_view kUsage =
    R"(weftrun: starts the processes of a job on this machine and looks after them

  weftrun [options] [--] program [arguments of the program]

  weftrun ca DIR [NAME]...       certificates for several nodes; weftrun ca --help

  weftrun -n 4 ./train --rate 0.1
  weftrun --role ps:1 --role trainer:2 ./async_ps
  weftrun --nnodes 2 --node-rank 0 --rdzv tcp://10.0.0.1:29400 --tls tls -n 8 ./train      (--node-rank 1 on the other)

What to start
  -n, --nproc N          processes on this node (default 1)
  --role NAME:COUNT      that many processes of this role; repeat for more roles; ranks follow their order
Several nodes
  --nnodes N             how many nodes (weftrun once on each) make the job (default 1)
  --node-rank R          which one this is, 0 to N-1
  --rdzv URL             where they meet: tcp://host:port (node 0 hosts it), file:///shared/path, etcd://host:port/prefix
  --rdzv-id ID           tells jobs that share a meeting place apart; the same on all nodes
  --rdzv-timeout T       how long to wait for the other nodes (default 300 s)
  --addr ADDRESS         how the other nodes reach this one, when weftrun should not find out by itself
  --allow-insecure       the meeting place and the programs may listen beyond this machine without credentials
  --tls auto|DIR         TLS between the processes: auto makes an authority and certificates for this job alone; a
                         directory has ca.pem and for each process NAME.pem and NAME.key (docs/security.md)
  --standalone           one node with a store of its own (the default)
Output
  --log-dir DIR          the output of each process goes to DIR/<name>.out and DIR/<name>.err, unprefixed
  --tee                  with --log-dir: print it too
  -q, --quiet            weftrun itself speaks only when something is wrong
Behaviour
  --grace T              time between SIGTERM and SIGKILL when processes are stopped (default 10 s)
  --max-restarts K       after a failure all processes on all nodes start again, at most K times (default 0); programs
                         go on from their last checkpoint and find the count in WEFT_RESTART_COUNT
  --restart ROLE:N       a process of this role that fails is started again under its name, N times in all on this
                         node; it finds its count in WEFT_PROCESS_RESTARTS (repeat for more roles)
  --may-die ROLE:N       the job goes on after the failure of N processes of this role on this node (repeat for more
                         roles); with --restart, of those that no restart is left for
  --pin                  bind each process to its share of the cores
  --debug-attach         long leases, so that a process held in a debugger is not taken for dead
  --help, --version

Times are seconds (10, 0.5) or have a unit (500ms, 2m). Without --nnodes and --node-rank, and when weftrun itself
was started by torchrun, Slurm (srun), Open MPI or an Indexed Job of Kubernetes (with WORLD_SIZE) with one weftrun per
node, their variables say which node this is.

Exit code: 0 when every process ended with 0 (in the last life, with --max-restarts; but for those that --may-die and
--restart name), else that of the first process that failed (128 + signal when a signal
ended it); 2 for a wrong command line, 127 when the program is not found, 126 when it cannot be executed, 1 when
weftrun itself fails (for example when a node does not come).
)";

absl::Status usage_error(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(what, " (weftrun --help lists the options)"));
}

absl::StatusOr<int> parse_int(absl::string_view flag, absl::string_view text, int low, int high) {
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < low || value > high) {
    return usage_error(
        absl::StrCat(flag, " wants an integer from ", low, " to ", high, ", got '", text, "'"));
  }
  return value;
}

absl::StatusOr<absl::Duration> parse_time(absl::string_view flag, absl::string_view text) {
  double seconds = 0;
  absl::Duration value;
  if (absl::SimpleAtod(text, &seconds)) {
    value = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &value)) {
    return usage_error(
        absl::StrCat(flag, " wants a time such as 10, 0.5 or 500ms, got '", text, "'"));
  }
  // A week is longer than any sensible grace and keeps the arithmetic of poll() far from its
  // limits.
  if (!(value >= absl::ZeroDuration() && value <= absl::Hours(24 * 7))) {
    return usage_error(absl::StrCat(flag, " wants a time from 0 to a week, got '", text, "'"));
  }
  return value;
}

absl::StatusOr<RoleSpec> parse_role(absl::string_view flag, absl::string_view text, int most) {
  // The last colon, because a colon is legal inside the name of a worker.
  size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) {
    return usage_error(absl::StrCat(flag, " wants NAME:COUNT, got '", text, "'"));
  }
  RoleSpec role{.name = std::string(text.substr(0, colon))};
  absl::StatusOr<int> count =
      parse_int(absl::StrCat(flag, " NAME:COUNT"), text.substr(colon + 1), 1, most);
  if (!count.ok()) return count.status();
  role.count = *count;
  auto legal = [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_' || c == ':'; };
  if (role.name.empty() || role.name.size() > 100 ||
      !std::all_of(role.name.begin(), role.name.end(), legal)) {
    return usage_error(absl::StrCat(
        flag, ": a name has 1 to 100 letters, digits, '-', '_' or ':', got '", role.name, "'"));
  }
  return role;
}

// One launcher that may have started weftrun: which variables give the index and the number of its
// tasks. Each task is one weftrun, so a task of theirs is a node of ours.
struct OuterLauncher {
  absl::string_view name;
  absl::string_view marker;
  absl::string_view rank;
  absl::string_view size;
};
constexpr std::array<OuterLauncher, 4> kOuterLaunchers = {{
    {"Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    // In a batch script (no step of its own) the job's variables are set too, but one weftrun runs
    // there.
    {"Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
    {"torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"},
    {"Kubernetes", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX", "WORLD_SIZE"},
}};

absl::Status read_outer_launcher(const GetEnv& env, Options& options) {
  // A process of a weftrun job that starts a job of its own is not a node of the outer job.
  if (env("WEFT_JOB_ID").has_value()) return absl::OkStatus();
  for (const OuterLauncher& outer : kOuterLaunchers) {
    if (!env(outer.marker).has_value()) continue;
    // Pods of an Indexed Job without WORLD_SIZE are independent of each other.
    if (outer.name == "Kubernetes" && !env(outer.size).has_value()) continue;
    std::optional<std::string> rank = env(outer.rank);
    std::optional<std::string> size = env(outer.size);
    int rank_value = 0;
    int size_value = 0;
    if (!rank || !size || !absl::SimpleAtoi(*rank, &rank_value) ||
        !absl::SimpleAtoi(*size, &size_value) || size_value < 1 || rank_value < 0 ||
        rank_value >= size_value) {
      return usage_error(absl::StrCat("started by ", outer.name, ", but ", outer.rank, "='",
                                      rank.value_or(""), "' and ", outer.size, "='",
                                      size.value_or(""),
                                      "' do not name a node; give --nnodes and --node-rank"));
    }
    options.nnodes = size_value;
    options.node_rank = rank_value;
    options.node_source = std::string(outer.name);
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status check(const Options& options, bool standalone) {
  if (options.node_rank >= options.nnodes) {
    return usage_error(
        absl::StrCat("--node-rank ", options.node_rank, " is not below --nnodes ", options.nnodes));
  }
  if (standalone && (options.nnodes > 1 || !options.rdzv.empty())) {
    return usage_error(
        "--standalone is for one node with a store of its own; leave out --nnodes and --rdzv");
  }
  if (options.nnodes > 1 && options.rdzv.empty()) {
    return usage_error(absl::StrCat(
        options.nnodes, " nodes",
        options.node_source.empty() ? "" : absl::StrCat(" (from ", options.node_source, ")"),
        " need a meeting place: --rdzv tcp://host:port, file:///shared/path or "
        "etcd://host:port/prefix"));
  }
  if (!options.rdzv.empty()) {
    size_t scheme_end = options.rdzv.find("://");
    absl::string_view scheme = absl::string_view(options.rdzv).substr(0, scheme_end);
    if (scheme_end == std::string::npos ||
        (scheme != "tcp" && scheme != "file" && scheme != "etcd")) {
      return usage_error(absl::StrCat(
          "--rdzv wants tcp://host:port, file:///path or etcd://host:port/prefix, got '",
          options.rdzv, "'"));
    }
    if (scheme == "file" && !absl::StartsWith(options.rdzv, "file:///")) {
      return usage_error(absl::StrCat("--rdzv file:// wants an absolute path (file:///path), got '",
                                      options.rdzv, "'"));
    }
  }
  if (options.tls == "auto" && options.nnodes > 1) {
    return usage_error(
        absl::StrCat("--tls auto is for one node, and there are ", options.nnodes,
                     ": give every node a directory with certificates of one authority"));
  }
  for (const auto& [flag, list] :
       {std::pair("--may-die", &options.may_die), std::pair("--restart", &options.restarts)}) {
    for (const RoleSpec& role : *list) {
      std::vector<std::string> names;
      for (const RoleSpec& known : options.roles) names.push_back(known.name);
      if (std::find(names.begin(), names.end(), role.name) != names.end()) continue;
      return usage_error(absl::StrCat(flag, " ", role.name,
                                      ": this node starts no such role; it has ",
                                      absl::StrJoin(names, ", ")));
    }
  }
  if (options.tee && options.log_dir.empty()) return usage_error("--tee wants --log-dir");
  if (options.program.empty())
    return usage_error("which program? weftrun [options] program [arguments]");
  return absl::OkStatus();
}

// Reads --flag=value, --flag value, -n4 and -n 4, one argument after the other.
class ArgumentReader {
 public:
  explicit ArgumentReader(const std::vector<std::string>& args) : args_(args) {}

  // False: the options end here, and rest() is the program.
  bool next() {
    if (at_ >= args_.size()) return false;
    const absl::string_view arg = args_[at_];
    if (arg.size() < 2 || arg[0] != '-') return false;
    ++at_;
    if (arg == "--") return false;
    flag_ = std::string(arg);
    attached_.reset();
    if (absl::StartsWith(arg, "--")) {
      if (size_t equals = arg.find('='); equals != absl::string_view::npos) {
        flag_ = std::string(arg.substr(0, equals));
        attached_ = std::string(arg.substr(equals + 1));
      }
    } else if (arg.size() > 2) {
      flag_ = std::string(arg.substr(0, 2));
      attached_ = std::string(arg.substr(2));
    }
    std::replace(flag_.begin() + std::min<size_t>(2, flag_.size()), flag_.end(), '_', '-');
    return true;
  }
  const std::string& flag() const { return flag_; }
  std::vector<std::string> rest() const {
    return {args_.begin() + static_cast<std::ptrdiff_t>(at_), args_.end()};
  }

  absl::Status set(bool& target) {
    if (attached_) {
      return usage_error(absl::StrCat(flag_, " takes no value, got '", *attached_, "'"));
    }
    target = true;
    return absl::OkStatus();
  }
  absl::Status set(std::optional<int>& target, int low, int high) {
    absl::StatusOr<std::string> text = value();
    if (!text.ok()) return text.status();
    absl::StatusOr<int> number = parse_int(flag_, *text, low, high);
    if (!number.ok()) return number.status();
    target = *number;
    return absl::OkStatus();
  }
  absl::Status set(absl::Duration& target) {
    absl::StatusOr<std::string> text = value();
    if (!text.ok()) return text.status();
    absl::StatusOr<absl::Duration> time = parse_time(flag_, *text);
    if (!time.ok()) return time.status();
    target = *time;
    return absl::OkStatus();
  }
  absl::Status set(std::string& target) {
    absl::StatusOr<std::string> text = value();
    if (!text.ok()) return text.status();
    if (text->empty()) return usage_error(absl::StrCat(flag_, " wants a value that is not empty"));
    target = *std::move(text);
    return absl::OkStatus();
  }
  absl::Status add_role(std::vector<RoleSpec>& target, int most) {
    absl::StatusOr<std::string> text = value();
    if (!text.ok()) return text.status();
    absl::StatusOr<RoleSpec> role = parse_role(flag_, *text, most);
    if (!role.ok()) return role.status();
    for (const RoleSpec& known : target) {
      if (known.name == role->name) {
        return usage_error(absl::StrCat(flag_, " ", role->name, " is given twice"));
      }
    }
    target.push_back(*std::move(role));
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<std::string> value() {
    if (attached_) return *attached_;
    if (at_ >= args_.size()) return usage_error(absl::StrCat(flag_, " wants a value"));
    return args_[at_++];
  }

  const std::vector<std::string>& args_;
  size_t at_ = 0;
  std::string flag_;
  std::optional<std::string> attached_;
};

// What only parse_options() needs of the arguments.
struct Given {
  std::optional<int> nproc;
  std::optional<int> nnodes;
  std::optional<int> node_rank;
  bool standalone = false;
};

absl::Status read_flag(ArgumentReader& args, Options& options, Given& given) {
  const std::string& flag = args.flag();
  if (flag == "-h" || flag == "--help") return args.set(options.help);
  if (flag == "--version") return args.set(options.version);
  if (flag == "-n" || flag == "--nproc" || flag == "--nproc-per-node")
    return args.set(given.nproc, 1, kMaxLocalSize);
  if (flag == "--role") return args.add_role(options.roles, kMaxLocalSize);
  if (flag == "--may-die") return args.add_role(options.may_die, kMaxLocalSize);
  if (flag == "--restart") return args.add_role(options.restarts, kMaxRestarts);
  if (flag == "--nnodes") return args.set(given.nnodes, 1, 65536);
  if (flag == "--node-rank") return args.set(given.node_rank, 0, 65535);
  if (flag == "--rdzv") return args.set(options.rdzv);
  if (flag == "--rdzv-id") return args.set(options.rdzv_id);
  if (flag == "--rdzv-timeout") return args.set(options.rdzv_timeout);
  if (flag == "--addr") return args.set(options.address);
  if (flag == "--standalone") return args.set(given.standalone);
  if (flag == "--log-dir") return args.set(options.log_dir);
  if (flag == "--tee") return args.set(options.tee);
  if (flag == "-q" || flag == "--quiet") return args.set(options.quiet);
  if (flag == "--allow-insecure") return args.set(options.allow_insecure);
  if (flag == "--tls") return args.set(options.tls);
  if (flag == "--grace") return args.set(options.grace);
  if (flag == "--max-restarts") {
    std::optional<int> restarts;
    const absl::Status status = args.set(restarts, 0, kMaxRestarts);
    options.max_restarts = restarts.value_or(0);
    return status;
  }
  if (flag == "--pin") return args.set(options.pin);
  if (flag == "--debug-attach") return args.set(options.debug_attach);
  return usage_error(absl::StrCat("unknown option '", flag, "'"));
}

}  // namespace

int Options::local_size() const {
  int sum = 0;
  for (const RoleSpec& role : roles) sum += role.count;
  return sum;
}

std::string usage() { return std::string(kUsage); }

absl::StatusOr<Options> parse_options(const std::vector<std::string>& args, const GetEnv& env) {
  Options options;
  Given given;
  ArgumentReader reader(args);
  while (reader.next()) {
    if (absl::Status status = read_flag(reader, options, given); !status.ok()) return status;
    if (options.help || options.version) return options;
  }
  options.program = reader.rest();

  options.explicit_roles = !options.roles.empty();
  if (options.explicit_roles && given.nproc)
    return usage_error("-n and --role exclude each other: roles carry their counts");
  if (!options.explicit_roles)
    options.roles.push_back({.name = "worker", .count = given.nproc.value_or(1)});
  if (options.local_size() > kMaxLocalSize) {
    return usage_error(absl::StrCat("the roles add up to ", options.local_size(),
                                    " processes, at most ", kMaxLocalSize));
  }

  if (given.nnodes || given.node_rank || given.standalone) {
    options.nnodes = given.nnodes.value_or(1);
    if (options.nnodes > 1 && !given.node_rank) return usage_error("--nnodes wants --node-rank");
    options.node_rank = given.node_rank.value_or(0);
  } else if (absl::Status status = read_outer_launcher(env, options); !status.ok()) {
    return status;
  }
  if (absl::Status status = check(options, given.standalone); !status.ok()) return status;
  return options;
}

}  // namespace weft::launch
