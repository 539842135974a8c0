#include "weft/store/internal/launch/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::launch {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

// Everything that the child needs, prepared before the fork: the launcher may have threads, so
// between fork and exec only async-signal-safe functions are allowed.
struct ChildPlan {
  const char* path;
  char* const* argv;
  char* const* envp;
  const cpu_set_t* cores;
  size_t cores_size;
  const sigset_t* mask;
  bool ignore_sigpipe;
  int in, out, err, report;
  pid_t parent;
};

[[noreturn]] void run_child(const ChildPlan& plan) {
  int step_error = 0;
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) step_error = errno;
  // The launcher may have died before prctl: then the signal would never be sent.
  if (getppid() != plan.parent) _exit(128 + SIGKILL);
  if (step_error == 0 && setpgid(0, 0) != 0) step_error = errno;
  if (step_error == 0 && plan.cores != nullptr &&
      sched_setaffinity(0, plan.cores_size, plan.cores) != 0) {
    step_error = errno;
  }
  if (step_error == 0 && (dup2(plan.in, 0) < 0 || dup2(plan.out, 1) < 0 || dup2(plan.err, 2) < 0))
    step_error = errno;
  if (step_error == 0) {
    signal(SIGPIPE, plan.ignore_sigpipe ? SIG_IGN : SIG_DFL);
    sigprocmask(SIG_SETMASK, plan.mask, nullptr);
    execve(plan.path, plan.argv, plan.envp);
    step_error = errno;
  }
  ssize_t written = write(plan.report, &step_error, sizeof(step_error));
  (void)written;  // the parent sees the end of the pipe and the exit code all the same
  _exit(126);
}

absl::Status exec_error(int error_number, const std::string& path) {
  switch (error_number) {
    case ENOENT:
      return absl::NotFoundError(
          absl::StrCat(path, ": no such file, or the interpreter it names does not exist"));
    case ENOEXEC:
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": not a program for this machine; a script needs a first line such as #!/bin/sh"));
    case EACCES:
      return absl::PermissionDeniedError(absl::StrCat(path, ": ", strerror(error_number)));
    default: return absl::FailedPreconditionError(absl::StrCat(path, ": ", strerror(error_number)));
  }
}

}  // namespace

absl::StatusOr<StartedProcess> start_process(const ProcessSpec& spec) {
  absl::StatusOr<Pipe> out = make_pipe();
  if (!out.ok()) return out.status();
  absl::StatusOr<Pipe> err = make_pipe();
  if (!err.ok()) return err.status();
  absl::StatusOr<Pipe> report = make_pipe();
  if (!report.ok()) return report.status();
  UniqueFd in(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!in.valid()) return os_error(errno, "open /dev/null");

  std::vector<char*> argv = pointers(spec.argv);
  std::vector<char*> envp = pointers(spec.environment);
  cpu_set_t* cores = nullptr;
  size_t cores_size = 0;
  if (!spec.cores.empty()) {
    size_t count = static_cast<size_t>(spec.cores.back()) + 1;
    cores = CPU_ALLOC(count);
    cores_size = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(cores_size, cores);
    for (int core : spec.cores) CPU_SET_S(static_cast<size_t>(core), cores_size, cores);
  }
  ChildPlan plan = {.path = spec.path.c_str(),
                    .argv = argv.data(),
                    .envp = envp.data(),
                    .cores = cores,
                    .cores_size = cores_size,
                    .mask = &spec.signal_mask,
                    .ignore_sigpipe = spec.ignore_sigpipe,
                    .in = in.get(),
                    .out = out->write.get(),
                    .err = err->write.get(),
                    .report = report->write.get(),
                    .parent = getpid()};
  // A handler of the launcher's must not run in the child.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pid_t pid = _Fork();  // not fork(): no library's atfork handlers
  if (pid == 0) run_child(plan);
  int fork_errno = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (cores != nullptr) CPU_FREE(cores);
  if (pid < 0) return os_error(fork_errno, "fork");

  out->write.reset();
  err->write.reset();
  report->write.reset();
  int exec_errno = 0;
  ssize_t n;
  do {
    n = read(report->read.get(), &exec_errno, sizeof(exec_errno));
  } while (n < 0 && errno == EINTR);
  if (n == static_cast<ssize_t>(sizeof(exec_errno))) {
    wait_for(pid, nullptr);
    return exec_error(exec_errno, spec.path);
  }
  for (int fd : {out->read.get(), err->read.get()}) fcntl(fd, F_SETFL, O_NONBLOCK);
  return StartedProcess{.pid = pid, .out = std::move(out->read), .err = std::move(err->read)};
}

}  // namespace weft::launch
