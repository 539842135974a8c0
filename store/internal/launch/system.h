// Small questions to the operating system: file descriptors, programs, cores, random names, ports.
//
// Launchers use POSIX directly: processes are outside of simulation. Free functions, safe on any
// thread.
#ifndef WEFT_STORE_INTERNAL_LAUNCH_SYSTEM_H_
#define WEFT_STORE_INTERNAL_LAUNCH_SYSTEM_H_

#include <signal.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "weft/common/posix.h"

namespace weft::launch {

using internal::UniqueFd;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};
// Both ends are closed on exec.
absl::StatusOr<Pipe> make_pipe();

// "open /x: Permission denied" with the canonical code of `error_number`.
absl::Status os_error(int error_number, absl::string_view what);

// Where `program` lies: itself when it has a slash, else found on PATH. Errors: not_found, or
// permission_denied when there is only something that cannot be executed.
absl::StatusOr<std::string> find_program(const std::string& program,
                                         absl::string_view path_variable);

// `bytes` random bytes from the kernel, in hexadecimal.
std::string random_hex(size_t bytes);

std::string host_name();

// The cores this process may use, ascending.
std::vector<int> allowed_cores();

// A time that never jumps.
absl::Duration monotonic_now();

// "SIGSEGV" for 11; "signal 35" where there is no name.
std::string signal_name(int signal);
// "exit code 3", "killed by signal 9 (SIGKILL)": of a status as waitpid() gives it.
std::string end_of(int wait_status);

// The same as a shell gives it: 128 + signal after a signal.
int exit_code_of(int wait_status);
// "1 process", "3 processes".
std::string processes(size_t count);
// waitpid() of one child, whatever signals come meanwhile.
pid_t wait_for(pid_t pid, int* wait_status);

// SIGINT, SIGTERM, SIGHUP and SIGQUIT: they end the job.
inline constexpr std::array<int, 4> kStopSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
bool is_stop_signal(int signal);

// A TCP port that the system gives to no other process while `fd` is open, and that a program which
// binds with SO_REUSEADDR (as servers do) can still bind and listen on: bound, not listening.
struct HeldPort {
  UniqueFd fd;
  int port = 0;
};
absl::StatusOr<HeldPort> hold_port();

// A new directory below TMPDIR (default /tmp) that only this user can enter: `name`, a dash and
// random letters.
absl::StatusOr<std::string> make_private_dir(const std::string& name);

// `text` as a shell would need it.
std::string shell_quote(absl::string_view text);

// The variable that marks everything that a launcher started, directly or not: the tags of the
// launchers above it, outermost first, between colons.
inline constexpr absl::string_view kTagVariable = "WEFTRUN_TAG";

// Whether a wait ended by its deadline, in a store or in a launcher.
bool is_deadline(const absl::Status& status);

// Every process but this one that carries `tag`, zombies excepted.
std::vector<int> tagged_processes(absl::string_view tag);
// A child that is in execve(), or on its way to be a zombie: at this moment it has no environment, so
// that its tag cannot be seen.
bool has_child_in_transit();

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_SYSTEM_H_
