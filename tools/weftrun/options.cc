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

}  // namespace

int Options::local_size() const {
  int sum = 0;
  for (const RoleSpec& role : roles) sum += role.count;
  return sum;
}

std::string usage() { return std::string(kUsage); }

absl::StatusOr<Options> parse_options(const std::vector<std::string>& args, const GetEnv& env) {
  Options options;
  std::optional<int> nproc;
  std::optional<int> nnodes;
  std::optional<int> node_rank;
  bool standalone = false;
  size_t at = 0;
  for (; at < args.size(); ++at) {
    absl::string_view arg = args[at];
    if (arg == "--") {
      ++at;
      break;
    }
    if (arg.size() < 2 || arg[0] != '-') break;  // the program

    // --flag=value, --flag value, -n4 and -n 4.
    std::string flag(arg);
    std::optional<std::string> attached;
    if (absl::StartsWith(arg, "--")) {
      if (size_t equals = arg.find('='); equals != absl::string_view::npos) {
        flag = std::string(arg.substr(0, equals));
        attached = std::string(arg.substr(equals + 1));
      }
    } else if (arg.size() > 2) {
      flag = std::string(arg.substr(0, 2));
      attached = std::string(arg.substr(2));
    }
    std::replace(flag.begin() + std::min<size_t>(2, flag.size()), flag.end(), '_', '-');

    auto set_switch = [&](bool& target) -> absl::Status {
      if (attached)
        return usage_error(absl::StrCat(flag, " takes no value, got '", *attached, "'"));
      target = true;
      return absl::OkStatus();
    };
    auto value = [&]() -> absl::StatusOr<std::string> {
      if (attached) return *attached;
      if (at + 1 >= args.size()) return usage_error(absl::StrCat(flag, " wants a value"));
      return args[++at];
    };
    auto set_int = [&](std::optional<int>& target, int low, int high) -> absl::Status {
      absl::StatusOr<std::string> text = value();
      if (!text.ok()) return text.status();
      absl::StatusOr<int> number = parse_int(flag, *text, low, high);
      if (!number.ok()) return number.status();
      target = *number;
      return absl::OkStatus();
    };
    auto set_time = [&](absl::Duration& target) -> absl::Status {
      absl::StatusOr<std::string> text = value();
      if (!text.ok()) return text.status();
      absl::StatusOr<absl::Duration> time = parse_time(flag, *text);
      if (!time.ok()) return time.status();
      target = *time;
      return absl::OkStatus();
    };
    auto add_role = [&](std::vector<RoleSpec>& target, int most) -> absl::Status {
      absl::StatusOr<std::string> text = value();
      if (!text.ok()) return text.status();
      absl::StatusOr<RoleSpec> role = parse_role(flag, *text, most);
      if (!role.ok()) return role.status();
      for (const RoleSpec& known : target) {
        if (known.name == role->name) {
          return usage_error(absl::StrCat(flag, " ", role->name, " is given twice"));
        }
      }
      target.push_back(*std::move(role));
      return absl::OkStatus();
    };
    auto set_text = [&](std::string& target) -> absl::Status {
      absl::StatusOr<std::string> text = value();
      if (!text.ok()) return text.status();
      if (text->empty()) return usage_error(absl::StrCat(flag, " wants a value that is not empty"));
      target = *std::move(text);
      return absl::OkStatus();
    };

    absl::Status status;
    if (flag == "-h" || flag == "--help") {
      status = set_switch(options.help);
    } else if (flag == "--version") {
      status = set_switch(options.version);
    } else if (flag == "-n" || flag == "--nproc" || flag == "--nproc-per-node") {
      status = set_int(nproc, 1, kMaxLocalSize);
    } else if (flag == "--role") {
      status = add_role(options.roles, kMaxLocalSize);
    } else if (flag == "--may-die") {
      status = add_role(options.may_die, kMaxLocalSize);
    } else if (flag == "--restart") {
      status = add_role(options.restarts, kMaxRestarts);
    } else if (flag == "--nnodes") {
      status = set_int(nnodes, 1, 65536);
    } else if (flag == "--node-rank") {
      status = set_int(node_rank, 0, 65535);
    } else if (flag == "--rdzv") {
      status = set_text(options.rdzv);
    } else if (flag == "--rdzv-id") {
      status = set_text(options.rdzv_id);
    } else if (flag == "--rdzv-timeout") {
      status = set_time(options.rdzv_timeout);
    } else if (flag == "--addr") {
      status = set_text(options.address);
    } else if (flag == "--standalone") {
      status = set_switch(standalone);
    } else if (flag == "--log-dir") {
      status = set_text(options.log_dir);
    } else if (flag == "--tee") {
      status = set_switch(options.tee);
    } else if (flag == "-q" || flag == "--quiet") {
      status = set_switch(options.quiet);
    } else if (flag == "--allow-insecure") {
      status = set_switch(options.allow_insecure);
    } else if (flag == "--tls") {
      status = set_text(options.tls);
    } else if (flag == "--grace") {
      status = set_time(options.grace);
    } else if (flag == "--max-restarts") {
      std::optional<int> restarts;
      status = set_int(restarts, 0, kMaxRestarts);
      options.max_restarts = restarts.value_or(0);
    } else if (flag == "--pin") {
      status = set_switch(options.pin);
    } else if (flag == "--debug-attach") {
      status = set_switch(options.debug_attach);
    } else {
      return usage_error(absl::StrCat("unknown option '", flag, "'"));
    }
    if (!status.ok()) return status;
    if (options.help || options.version) return options;
  }
  options.program.assign(args.begin() + static_cast<std::ptrdiff_t>(std::min(at, args.size())),
                         args.end());

  options.explicit_roles = !options.roles.empty();
  if (options.explicit_roles && nproc)
    return usage_error("-n and --role exclude each other: roles carry their counts");
  if (!options.explicit_roles)
    options.roles.push_back({.name = "worker", .count = nproc.value_or(1)});
  if (options.local_size() > kMaxLocalSize) {
    return usage_error(absl::StrCat("the roles add up to ", options.local_size(),
                                    " processes, at most ", kMaxLocalSize));
  }

  if (nnodes || node_rank || standalone) {
    options.nnodes = nnodes.value_or(1);
    if (options.nnodes > 1 && !node_rank) return usage_error("--nnodes wants --node-rank");
    options.node_rank = node_rank.value_or(0);
  } else if (absl::Status status = read_outer_launcher(env, options); !status.ok()) {
    return status;
  }
  if (absl::Status status = check(options, standalone); !status.ok()) return status;
  return options;
}

}  // namespace weft::launch
