// Starting one process of a job.
//
// A child gets a process group of its own (a signal reaches what it started too), dies with the
// launcher (PR_SET_PDEATHSIG), and reads nothing from the launcher's terminal. start_process() is
// called on a thread that lives as long as the child: PR_SET_PDEATHSIG means the death of the thread
// that forked.
#ifndef WEFT_STORE_INTERNAL_LAUNCH_PROCESS_H_
#define WEFT_STORE_INTERNAL_LAUNCH_PROCESS_H_

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {

struct ProcessSpec {
  std::string path;
  std::vector<std::string> argv;
  std::vector<std::string> environment;  // "NAME=value"
  std::vector<int> cores = {};           // empty: as the launcher
  // What the launcher changed in itself and the program must not see.
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

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_PROCESS_H_
