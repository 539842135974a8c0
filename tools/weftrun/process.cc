#include "weft/tools/weftrun/process.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

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

// Everything that the child needs, prepared before the fork: weftrun may have threads (those of a
// store server), so between fork and exec only async-signal-safe functions are allowed.
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
  // weftrun may have died before prctl: then the signal would never be sent.
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
  pid_t pid = _Fork();  // not fork(): no library's atfork handlers
  if (pid == 0) run_child(plan);
  int fork_errno = errno;
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
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return exec_error(exec_errno, spec.path);
  }
  for (int fd : {out->read.get(), err->read.get()}) fcntl(fd, F_SETFL, O_NONBLOCK);
  return StartedProcess{.pid = pid, .out = std::move(out->read), .err = std::move(err->read)};
}

absl::StatusOr<Guard> Guard::start(const std::string& tag, const std::string& temporary_dir) {
  absl::StatusOr<Pipe> pipe = make_pipe();
  if (!pipe.ok()) return pipe.status();
  pid_t pid = fork();
  if (pid < 0) return os_error(errno, "fork");
  if (pid > 0) return Guard(pid, std::move(pipe->write));

  // A group of its own and every signal blocked: what ends weftrun must not end its guard.
  setpgid(0, 0);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  prctl(PR_SET_NAME, "weftrun-guard");
  // The guard of a weftrun inside another job must survive the sweep of that job: it takes the tag
  // of the outer one out of the memory that /proc/self/environ shows.
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (strncmp(*entry, kTagVariable.data(), kTagVariable.size()) == 0) {
      memset(*entry, 'x', strlen(*entry));
    }
  }
  // Holds nothing of weftrun's: a reader of its output must see the end when weftrun ends.
  int null = open("/dev/null", O_RDWR);
  int keep = fcntl(pipe->read.get(), F_DUPFD, 100);
  for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
  close_range(3, static_cast<unsigned>(keep) - 1, 0);
  close_range(static_cast<unsigned>(keep) + 1, ~0U, 0);

  char word = 0;
  ssize_t n;
  do {
    n = read(keep, &word, 1);
  } while (n < 0 && errno == EINTR);
  if (n == 0) {
    // A process that forks while it is looked for is found in the next round; a few rounds without
    // a find end it.
    for (int round = 0, quiet = 0; quiet < 2 && round < 1000; ++round) {
      std::vector<int> left = tagged_processes(tag);
      for (int pid_left : left) kill(pid_left, SIGKILL);
      quiet = left.empty() ? quiet + 1 : 0;
    }
    std::error_code ignored;
    if (!temporary_dir.empty()) std::filesystem::remove_all(temporary_dir, ignored);
  }
  _exit(0);
}

void Guard::dismiss() {
  if (pid_ < 0) return;
  char word = 'q';
  while (write(pipe_.get(), &word, 1) < 0 && errno == EINTR) {
  }
  pipe_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

}  // namespace weft::launch
