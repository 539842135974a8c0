// weft::spawn: the process that starts ranks, and the ranks.

#include "weft/store/spawn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "weft/common/config.h"
#include "weft/common/runtime.h"
#include "weft/store/internal/launch/guard.h"
#include "weft/store/internal/launch/output_queue.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/store/internal/launch/proc.h"
#include "weft/store/internal/launch/spawn_report.h"
#include "weft/store/internal/launch/supervisor.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {
namespace {

constexpr char kParentVariable[] = "WEFT_SPAWN_PARENT";
constexpr char kDirectoryVariable[] = "WEFT_SPAWN_DIR";
constexpr char kCallVariable[] = "WEFT_SPAWN_CALL";

Status check_arguments(int nprocs, const SpawnOptions& options) {
  const auto refuse = [](std::string why) {
    return make_error(ErrorKind::kInvalidArgument, absl::StrCat("weft::spawn: ", why));
  };
  if (nprocs < 1 || nprocs > kMaxLocalSize) {
    return refuse(absl::StrCat(nprocs, " ranks: expected 1 to ", kMaxLocalSize));
  }
  constexpr size_t kLongestName = 1000;
  if (options.name.size() > kLongestName) {
    return refuse(
        absl::StrCat("a name of ", options.name.size(), " bytes: expected at most ", kLongestName));
  }
  const auto control = [](unsigned char c) { return std::iscntrl(c) != 0; };
  if (std::any_of(options.name.begin(), options.name.end(), control)) {
    return refuse("the name has control characters");
  }
  if (options.grace < absl::ZeroDuration()) {
    return refuse(absl::StrCat("a grace of ", absl::FormatDuration(options.grace)));
  }
  return absl::OkStatus();
}

// What a call of spawn() and the ranks that it started know it by.
std::string name_of_call(int nprocs, const SpawnOptions& options, internal::SpawnCall call) {
  return absl::StrCat(call.file, ":", call.line, " with ", nprocs, " ranks",
                      options.name.empty() ? "" : ", name ", options.name);
}

// ---- A rank ----

// Which call of spawn() has started this process, if one did.
struct SpawnedRank {
  std::string directory;
  std::string call;
  int rank = 0;
};

std::optional<SpawnedRank> spawned_rank(const Environment& environment) {
  const auto value = [&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? std::string() : found->second;
  };
  int parent = 0;
  SpawnedRank self{.directory = value(kDirectoryVariable), .call = value(kCallVariable)};
  // Programs that a rank starts inherit its variables, and are none.
  if (!absl::SimpleAtoi(value(kParentVariable), &parent) || parent != getppid() ||
      !absl::SimpleAtoi(value("RANK"), &self.rank)) {
    return std::nullopt;
  }
  return self;
}

// Runs the function and ends the process.
[[noreturn]] void run_rank(const SpawnedRank& self, SpawnReports& reports,
                           const std::function<int(int rank)>& function) {
  throw_if_error(reports.begin(self.rank));
  SpawnReport report;
  int code = 1;
  try {
    code = function(self.rank);
    if (code != 0) {
      report.status = make_error(ErrorKind::kUser, absl::StrCat("its function returned ", code));
    }
  } catch (...) {
    report.status = status_from_current_exception();
  }
  constexpr int kMostCode = 255;
  report.exit_code = code < 0 || code > kMostCode ? 1 : code;
  report.at_ns = absl::ToInt64Nanoseconds(monotonic_now());
  if (const Status written = reports.end(self.rank, report); !written.ok()) {
    // The last lines of a rank without a report stand in the error of the process that started it.
    std::fprintf(stderr, "weft::spawn: cannot report %s: %s\n", report.status.ToString().c_str(),
                 written.ToString().c_str());
    std::exit(1);
  }
  std::exit(report.exit_code);
}

// ---- The process that starts them ----

struct TemporaryDirectory {
  explicit TemporaryDirectory(std::string where) : path(std::move(where)) {}
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() { remove_tree(path.c_str()); }

  const std::string path;
};

// No room for processes, descriptors or memory is one kind of error, whatever the system calls it.
Status start_failure(const Status& status, int nprocs) {
  const std::string what = absl::StrCat("weft::spawn: ", nprocs, " ranks: ", status.message());
  const bool no_room = absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
  return make_error(no_room ? ErrorKind::kResource : ErrorKind::kState, what);
}

// This program, by its own name where that still leads to it.
std::string own_program() {
  constexpr char kSelf[] = "/proc/self/exe";
  char path[4096];
  const ssize_t length = readlink(kSelf, path, sizeof path);
  if (length > 0 && static_cast<size_t>(length) < sizeof path) {
    std::string name(path, static_cast<size_t>(length));
    struct stat by_name = {};
    struct stat running = {};
    if (stat(name.c_str(), &by_name) == 0 && stat(kSelf, &running) == 0 &&
        by_name.st_ino == running.st_ino && by_name.st_dev == running.st_dev) {
      return name;
    }
  }
  return kSelf;
}

StatusOr<std::vector<std::string>> own_arguments(Files& files) {
  WEFT_ASSIGN_OR_RETURN(std::string text, files.read("/proc/self/cmdline"));
  if (!text.empty() && text.back() == '\0') text.pop_back();
  std::vector<std::string> arguments = absl::StrSplit(text, '\0');
  return arguments;
}

// How the ranks of a call have ended, together with what they said themselves.
class Verdict {
 public:
  Verdict(const Supervisor& supervisor, SpawnReports& reports);

  bool ok() const { return failed_.empty(); }
  // REQUIRES: !ok().
  [[noreturn]] void throw_error() const;

 private:
  bool threw(int rank) const {
    const auto found = reports_.find(rank);
    return found != reports_.end() && !found->second.status.ok();
  }
  // How the rank ended, behind its name.
  Status status_of(const ProcessEnd& end) const;

  size_t nprocs_ = 0;
  std::map<int, SpawnReport> reports_;
  std::vector<ProcessEnd> failed_;  // the cause first
};

Verdict::Verdict(const Supervisor& supervisor, SpawnReports& reports) {
  const std::optional<ProcessEnd> first = supervisor.first_failure();
  if (!first) return;
  const std::vector<ProcessEnd> all = supervisor.ends();
  nprocs_ = all.size();
  for (const ProcessEnd& end : all) {
    StatusOr<SpawnReport> report = reports.read(end.plan.rank);
    if (report.ok()) reports_.emplace(end.plan.rank, *std::move(report));
  }
  // A rank whose function threw may need longer to end than one that failed for its sake: what
  // threw, in the order of time, and ranks that lost a peer at the end, since they may have learned
  // of its failure before it was caught. One that ended first without a word is the cause all the
  // same.
  for (const ProcessEnd& end : all) {
    if (threw(end.plan.rank)) failed_.push_back(end);
  }
  std::stable_sort(failed_.begin(), failed_.end(), [this](const auto& a, const auto& b) {
    const SpawnReport& one = reports_.at(a.plan.rank);
    const SpawnReport& other = reports_.at(b.plan.rank);
    const bool one_lost = error_kind(one.status) == ErrorKind::kPeerLost;
    const bool other_lost = error_kind(other.status) == ErrorKind::kPeerLost;
    return one_lost != other_lost ? other_lost : one.at_ns < other.at_ns;
  });
  if (!threw(first->plan.rank)) failed_.insert(failed_.begin(), *first);
  for (const ProcessEnd& end : supervisor.also_failed()) {
    if (!threw(end.plan.rank)) failed_.push_back(end);
  }
}

Status Verdict::status_of(const ProcessEnd& end) const {
  const int rank = end.plan.rank;
  Status why;
  if (threw(rank)) {
    why = reports_.at(rank).status;
  } else {
    std::string text;
    if (end.status_lost) {
      text =
          "ended, and another part of this program took its exit status (a waitpid() for any "
          "child, or SIGCHLD is ignored)";
    } else if (end.wait_status == 0) {
      text =
          "exit code 0, before its function had returned: the program ended inside of it, or "
          "before it came to this call";
    } else {
      text = absl::StrCat(end_of(end.wait_status),
                          reports_.count(rank) != 0 ? ", after its function had returned" : "");
    }
    absl::StrAppend(&text, end.last_lines.empty() ? "; it wrote nothing" : "; its last lines:");
    for (const std::string& line : end.last_lines) absl::StrAppend(&text, "\n| ", line);
    why = make_error(ErrorKind::kPeerLost, text);
  }
  return annotate(why, absl::StrCat("rank ", rank, " of ", nprocs_, " (", end.plan.name, ", pid ",
                                    end.pid, ")"));
}

void Verdict::throw_error() const {
  constexpr size_t kMostTold = 8;
  const ProcessEnd& first = failed_.front();
  const Status cause = status_of(first);
  std::string text(cause.message());
  for (size_t i = 1; i < std::min(failed_.size(), kMostTold); ++i) {
    absl::StrAppend(&text, "\nfailed as well: ", status_of(failed_[i]).message());
  }
  if (failed_.size() > kMostTold) {
    absl::StrAppend(&text, "\nfailed as well: ", failed_.size() - kMostTold, " more");
  }
  ErrorDetails details = error_details(cause);
  if (details.origin.empty()) details.origin = first.plan.name;
  const Status whole = with_details(make_error(cause.code(), details.kind, text), details);
  const int rank = first.plan.rank;
  if (threw(rank)) throw SpawnError(whole, rank, reports_.at(rank).exit_code, 0);
  throw SpawnError(whole, rank, exit_code_of(first.wait_status),
                   WIFSIGNALED(first.wait_status) ? WTERMSIG(first.wait_status) : 0);
}

// One call, from its private directory to the end of all ranks.
void start_ranks(int nprocs, const std::string& call, const SpawnOptions& options) {
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  const auto started = [nprocs](auto result) {
    if (!result.ok()) weft::throw_error(start_failure(result.status(), nprocs));
    return *std::move(result);
  };
  const TemporaryDirectory directory(started(make_private_dir("weft-spawn")));
  SpawnReports reports(&runtime->files(), directory.path);
  const std::string tag = random_hex(8);
  Guard guard = started(Guard::start("weft-guard", tag, directory.path));
  const HeldPort master_port = started(hold_port());
  const std::unique_ptr<Outputs> outputs = started(Outputs::open());

  const Job job{.id = random_hex(16),
                .store_url = options.store.empty()
                                 ? absl::StrCat("file://", directory.path, "/store")
                                 : options.store,
                .master_addr = "127.0.0.1",
                .master_port = master_port.port,
                .nodes = {{.host = host_name(), .roles = {{.name = "worker", .count = nprocs}}}}};
  std::vector<std::string> environment = inherited_environment(tag, {});
  environment.push_back(absl::StrCat(kParentVariable, "=", getpid()));
  environment.push_back(absl::StrCat(kDirectoryVariable, "=", directory.path));
  environment.push_back(absl::StrCat(kCallVariable, "=", call));
  if (getenv("OMP_NUM_THREADS") == nullptr) {
    environment.push_back(
        absl::StrCat("OMP_NUM_THREADS=", threads_per_process(allowed_cores().size(), nprocs)));
  }
  Supervisor supervisor({.options = {.program = started(own_arguments(runtime->files())),
                                     .prefix_output = options.prefix_output,
                                     .grace = options.grace},
                         .host = host_name(),
                         .program_path = own_program(),
                         .environment = std::move(environment),
                         .tag = tag,
                         .plan = started(make_plan(job, 0)),
                         .outputs = outputs.get(),
                         .done = [&reports](const ProcessPlan& plan) {
                           const StatusOr<SpawnReport> report = reports.read(plan.rank);
                           return report.ok() && report->status.ok();
                         }});
  supervisor.run();
  const Verdict verdict(supervisor, reports);
  guard.dismiss();
  if (!supervisor.start_error().ok()) {
    weft::throw_error(start_failure(supervisor.start_error(), nprocs));
  }
  if (!verdict.ok()) verdict.throw_error();
  if (supervisor.reader_gone()) {
    weft::throw_error(make_error(ErrorKind::kCancelled,
                                 "weft::spawn: the output of this program has no reader any more; "
                                 "its ranks were ended"));
  }
}

}  // namespace
}  // namespace weft::launch

namespace weft::internal {

void spawn_ranks(int nprocs, const std::function<int(int rank)>& function,
                 const SpawnOptions& options, SpawnCall call) {
  throw_if_error(launch::check_arguments(nprocs, options));
  const std::string name = launch::name_of_call(nprocs, options, call);
  const std::optional<launch::SpawnedRank> self = launch::spawned_rank(process_environment());
  if (!self) return launch::start_ranks(nprocs, name, options);
  const std::shared_ptr<Runtime> runtime = make_system_runtime();
  launch::SpawnReports reports(&runtime->files(), self->directory);
  if (reports.begun(self->rank)) {
    throw_error(make_error(ErrorKind::kState,
                           absl::StrCat("weft::spawn: rank ", self->rank, " runs the function of ",
                                        self->call, " and cannot start ranks of its own")));
  }
  if (self->call == name) launch::run_rank(*self, reports, function);
}

}  // namespace weft::internal
