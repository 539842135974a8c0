// The guard: a small process that outlives the launcher.
#ifndef WEFT_STORE_INTERNAL_LAUNCH_GUARD_H_
#define WEFT_STORE_INTERNAL_LAUNCH_GUARD_H_

#include <sys/types.h>

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {

// Waits for the end of the launcher. When that ends without saying so (SIGKILL, a crash), the guard
// kills every process that still carries the tag in its environment and removes the temporary
// directory: PR_SET_PDEATHSIG covers the ranks themselves, but not what they started. The launcher
// may have threads. Not thread-safe.
//
//   absl::StatusOr<Guard> guard = Guard::start("weftrun-guard", tag, directory);
//   ...
//   guard->dismiss();
class Guard {
 public:
  // Before any process that carries the tag is started. `name` is that of the process, at most 15
  // bytes; no directory is removed where `temporary_dir` is empty.
  static absl::StatusOr<Guard> start(const std::string& name, const std::string& tag,
                                     const std::string& temporary_dir);

  Guard(Guard&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), line_(std::move(other.line_)) {}
  Guard& operator=(Guard&&) = delete;
  // Without dismiss() the guard does its work; waits until it is done.
  ~Guard();

  pid_t pid() const { return pid_; }
  // Everything is in order; waits for the guard to leave.
  void dismiss();

 private:
  Guard(pid_t pid, UniqueFd line) : pid_(pid), line_(std::move(line)) {}

  pid_t pid_ = -1;
  UniqueFd line_;
};

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_GUARD_H_
