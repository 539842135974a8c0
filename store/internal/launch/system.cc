#include "weft/store/internal/launch/system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "weft/common/error.h"
#include "weft/store/internal/launch/proc.h"

namespace weft::launch {

absl::Status os_error(int error_number, absl::string_view what) {
  return absl::ErrnoToStatus(error_number, what);
}

bool is_deadline(const absl::Status& status) {
  return error_kind(status) == ErrorKind::kDeadline || absl::IsDeadlineExceeded(status);
}

absl::StatusOr<Pipe> make_pipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return os_error(errno, "pipe2");
  return Pipe{.read = UniqueFd(fds[0]), .write = UniqueFd(fds[1])};
}

namespace {

// OK when `path` is a file that this user may execute.
absl::Status executable(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR)
      return absl::NotFoundError(absl::StrCat(path, ": no such file"));
    return absl::PermissionDeniedError(absl::StrCat(path, ": ", strerror(errno)));
  }
  if (S_ISDIR(info.st_mode))
    return absl::PermissionDeniedError(absl::StrCat(path, " is a directory"));
  if (access(path.c_str(), X_OK) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(path, " is not executable (", strerror(errno), ")"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> find_program(const std::string& program,
                                         absl::string_view path_variable) {
  if (program.find('/') != std::string::npos) {
    absl::Status status = executable(program);
    if (!status.ok()) return status;
    return program;
  }
  absl::Status worst =
      absl::NotFoundError(absl::StrCat(program, ": not found on PATH (", path_variable, ")"));
  for (absl::string_view dir : absl::StrSplit(path_variable, ':')) {
    std::string path = dir.empty() ? absl::StrCat("./", program) : absl::StrCat(dir, "/", program);
    absl::Status status = executable(path);
    if (status.ok()) return path;
    if (!absl::IsNotFound(status) && absl::IsNotFound(worst)) worst = status;
  }
  // The most common mistake: a program of the current directory without "./".
  if (absl::IsNotFound(worst) && executable(absl::StrCat("./", program)).ok()) {
    return absl::NotFoundError(
        absl::StrCat(worst.message(), "; there is one in this directory: ./", program));
  }
  return worst;
}

std::string random_hex(size_t bytes) {
  std::string raw(bytes, '\0');
  size_t done = 0;
  while (done < bytes) {
    ssize_t n = getrandom(raw.data() + done, bytes - done, 0);
    if (n > 0) done += static_cast<size_t>(n);
  }
  return absl::BytesToHexString(raw);
}

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

std::vector<int> allowed_cores() {
  // More cores than a cpu_set_t holds: ask with larger and larger sets.
  for (size_t count = CPU_SETSIZE; count <= (1U << 20); count *= 4) {
    cpu_set_t* set = CPU_ALLOC(count);
    size_t size = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(size, set);
    std::vector<int> cores;
    bool ok = sched_getaffinity(0, size, set) == 0;
    for (size_t i = 0; ok && i < count; ++i) {
      if (CPU_ISSET_S(i, size, set)) cores.push_back(static_cast<int>(i));
    }
    CPU_FREE(set);
    if (ok) return cores;
  }
  return {0};
}

absl::Duration monotonic_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::DurationFromTimespec(now);
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? absl::StrCat("SIG", name) : absl::StrCat("signal ", signal);
}

std::string end_of(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return absl::StrCat("exit code ", WEXITSTATUS(wait_status));
  const int signal = WTERMSIG(wait_status);
  return absl::StrCat("killed by signal ", signal, " (", signal_name(signal), ")",
                      WCOREDUMP(wait_status) ? ", core dumped" : "");
}

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string processes(size_t count) {
  return count == 1 ? "1 process" : absl::StrCat(count, " processes");
}

pid_t wait_for(pid_t pid, int* wait_status) {
  pid_t ended;
  do {
    ended = waitpid(pid, wait_status, 0);
  } while (ended < 0 && errno == EINTR);
  return ended;
}

bool is_stop_signal(int signal) {
  return std::find(kStopSignals.begin(), kStopSignals.end(), signal) != kStopSignals.end();
}

absl::StatusOr<HeldPort> hold_port() {
  for (int family : {AF_INET6, AF_INET}) {
    UniqueFd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd.valid()) continue;  // a kernel without IPv6
    int on = 1;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_storage address = {};
    address.ss_family = static_cast<sa_family_t>(family);
    socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (family == AF_INET6) {
      int off = 0;  // the IPv4 side too
      setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    }
    if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) continue;
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) continue;
    int port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
    return HeldPort{.fd = std::move(fd), .port = port};
  }
  return os_error(errno, "cannot bind a TCP port for MASTER_PORT");
}

absl::StatusOr<std::string> make_private_dir(const std::string& name) {
  const char* base = std::getenv("TMPDIR");
  std::string path =
      absl::StrCat(base != nullptr && *base == '/' ? base : "/tmp", "/", name, "-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) return os_error(errno, absl::StrCat("mkdtemp ", path));
  return path;  // mkdtemp makes it 0700
}

std::string shell_quote(absl::string_view text) {
  auto plain = [](unsigned char c) {
    return isalnum(c) != 0 || (c != '\0' && strchr("_-+=./:,@%", c) != nullptr);
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return std::string(text);
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

namespace {

// Every process there is now.
std::vector<int> all_processes() {
  std::vector<int> found;
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return found;
  while (dirent* entry = readdir(proc)) {
    int pid = 0;
    if (absl::SimpleAtoi(entry->d_name, &pid)) found.push_back(pid);
  }
  closedir(proc);
  return found;
}

// Empty when it cannot be read, also when the process ends meanwhile.
std::string read_proc(int pid, const char* what) {
  const UniqueFd file(open(absl::StrCat("/proc/", pid, "/", what).c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char buffer[16384];
  while (file.valid()) {
    const ssize_t n = read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
  }
  return text;
}

}  // namespace

std::vector<int> tagged_processes(absl::string_view tag) {
  std::vector<int> found;
  visit_tagged(
      std::string(tag).c_str(),
      [](int pid, void* all) { static_cast<std::vector<int>*>(all)->push_back(pid); }, &found);
  return found;
}

bool has_child_in_transit() {
  const std::vector<int> all = all_processes();
  return std::any_of(all.begin(), all.end(), [](int pid) {
    // proc(5): "pid (name) state ppid ...".
    const std::string text = read_proc(pid, "stat");
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) return false;
    const std::vector<absl::string_view> fields =
        absl::StrSplit(absl::string_view(text).substr(name_end + 1), ' ', absl::SkipEmpty());
    int parent = 0;
    return fields.size() > 1 && fields[0] != "Z" && absl::SimpleAtoi(fields[1], &parent) &&
           parent == getpid() && read_proc(pid, "cmdline").empty();
  });
}

}  // namespace weft::launch
