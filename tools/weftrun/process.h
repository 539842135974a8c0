// Starting one process of a job, and the guard that outlives weftrun.
//
// A child gets a process group of its own (a signal reaches what it started too), dies with weftrun
// (PR_SET_PDEATHSIG), and reads nothing from weftrun's terminal. start_process and Guard::start are
// called on the thread that lives as long as weftrun: PR_SET_PDEATHSIG means the death of the
// thread that forked.
#ifndef WEFT_TOOLS_WEFTRUN_PROCESS_H_
#define WEFT_TOOLS_WEFTRUN_PROCESS_H_

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "weft/tools/weftrun/system.h"

namespace weft::launch {

struct ProcessSpec {
  std::string path;
  std::vector<std::string> argv;
  std::vector<std::string> environment;  // "NAME=value"
  std::vector<int> cores = {};           // empty: as weftrun
  // What weftrun changed in itself and the program must not see.
  sigset_t signal_mask = {};
  bool ignore_sigpipe = false;
};

struct StartedProcess {
  pid_t pid = -1;
  UniqueFd out;  // non-blocking
  UniqueFd err;  // non-blocking
};

// Returns once the program runs (or could not be executed: not_found, permission_denied or
// failed_precondition with the system's reason).
absl::StatusOr<StartedProcess> start_process(const ProcessSpec& spec);

// A small process that waits for the end of weftrun. When weftrun ends without saying so (SIGKILL,
// a crash), it kills every process that still carries the tag in its environment and removes the
// temporary directory: PR_SET_PDEATHSIG covers the ranks themselves, but not what they started.
class Guard {
 public:
  // Before anything else is started and before there are threads.
  static absl::StatusOr<Guard> start(const std::string& tag, const std::string& temporary_dir);

  Guard(Guard&&) = default;
  Guard& operator=(Guard&&) = default;

  pid_t pid() const { return pid_; }
  // Everything is in order; waits for the guard to leave.
  void dismiss();

 private:
  Guard(pid_t pid, UniqueFd pipe) : pid_(pid), pipe_(std::move(pipe)) {}

  pid_t pid_ = -1;
  UniqueFd pipe_;
};

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_PROCESS_H_
