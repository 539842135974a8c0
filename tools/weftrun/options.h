// The command line of weftrun.
//
// Everything before the name of the program belongs to weftrun, everything after it to the program,
// so `weftrun -n 2 prog --help` asks the program for help. A small parser of our own keeps that
// rule and lets weftrun start in milliseconds. Plain functions on values: safe on any thread.
//
//   absl::StatusOr<Options> options = parse_options({"-n", "4", "./prog", "--rate", "0.1"}, env);
//   // options->local_size == 4, options->program == {"./prog", "--rate", "0.1"}
#ifndef WEFT_TOOLS_WEFTRUN_OPTIONS_H_
#define WEFT_TOOLS_WEFTRUN_OPTIONS_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "weft/store/internal/launch/plan.h"

namespace weft::launch {

struct Options {
  std::vector<RoleSpec>
      roles;  // never empty after parsing; one unnamed-by-the-user role "worker" for -n
  bool explicit_roles = false;  // true when --role was given
  int nnodes = 1;
  int node_rank = 0;
  std::string
      node_source;   // which launcher's variables gave nnodes and node_rank; empty when flags did
  std::string rdzv;  // empty means standalone
  std::string rdzv_id;  // equal on all nodes of one job; empty: "default"
  absl::Duration rdzv_timeout = absl::Seconds(300);
  bool allow_insecure = false;
  std::string tls;      // "": plain text; "auto"; or the directory with the credentials
  std::string address;  // how other nodes reach this one; empty: found by weftrun
  std::string log_dir;
  bool tee = false;
  bool pin = false;
  bool quiet = false;
  bool debug_attach = false;
  absl::Duration grace = absl::Seconds(10);
  int max_restarts = 0;  // how often all processes are started again after a failure
  // For each role: how many processes may fail without ending the job, and how many failures are
  // answered by starting the process again.
  std::vector<RoleSpec> may_die;
  std::vector<RoleSpec> restarts;
  bool help = false;
  bool version = false;
  std::vector<std::string> program;  // name and arguments; empty only with help or version

  int local_size() const;
};

inline constexpr int kMaxRestarts = 1'000'000;

using GetEnv = std::function<std::optional<std::string>(absl::string_view)>;

// Parses `args` (without argv[0]). `env` answers for the variables of an outer launcher (torchrun,
// Slurm, Open MPI), which give the number and the index of the node when the flags do not. Errors:
// invalid_argument with a sentence for the user.
absl::StatusOr<Options> parse_options(const std::vector<std::string>& args, const GetEnv& env);

// The text of --help.
std::string usage();

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_OPTIONS_H_
