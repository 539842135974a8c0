#include "weft/tests/integration/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "weft/tests/testing/loopback.h"

extern char** environ;

namespace weft::integration {
namespace {

using std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(absl::StrCat(what, ": ", std::strerror(errno)));
}

std::vector<std::string> environment_of(const ProcessOptions& options) {
  static const std::vector<std::string> kHidden = {
      "WEFT_",   "RANK=", "WORLD_SIZE=", "LOCAL_", "GROUP_",        "ROLE_",
      "MASTER_", "OMPI_", "SLURM_",      "PMI",    "TORCHELASTIC_", "OMP_NUM_THREADS="};
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const bool hidden = std::any_of(kHidden.begin(), kHidden.end(), [entry](const auto& prefix) {
      return absl::StartsWith(*entry, prefix);
    });
    if (!hidden) out.emplace_back(*entry);
  }
  out.emplace_back("OMP_NUM_THREADS=1");
  for (const auto& [name, value] : options.environment) out.push_back(name + "=" + value);
  return out;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (const std::string& s : strings) out.push_back(const_cast<char*>(s.c_str()));
  out.push_back(nullptr);
  return out;
}

int millis_until(steady_clock::time_point end) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(end - steady_clock::now()).count();
  return static_cast<int>(std::max<int64_t>(0, left + 1));
}

// The number behind `name` in /proc/<pid>/status.
int64_t status_field(pid_t pid, const std::string& name) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, name + ":")) return std::atoll(line.c_str() + name.size() + 1);
  }
  return 0;
}

}  // namespace

Process::Process(const ProcessOptions& options) {
  const std::vector<std::string> environment = environment_of(options);
  const std::vector<char*> argv = pointers(options.command);
  const std::vector<char*> envp = pointers(environment);
  // A socket, so that writing to a child that has ended is an error and no signal.
  int in[2];
  int out[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0) fail("socketpair");
  if (pipe2(out, O_CLOEXEC) != 0) fail("pipe");
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    // Only what may be called between fork and exec.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    const int log = open(options.error_file.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    dup2(in[1], 0);
    dup2(out[1], 1);
    dup2(log, 2);
    close_range(3, ~0U, 0);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  if (pid_ < 0) fail("fork");
  close(in[1]);
  close(out[1]);
  input_ = in[0];
  output_ = out[0];
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      input_(std::exchange(other.input_, -1)),
      output_(std::exchange(other.output_, -1)),
      buffer_(std::move(other.buffer_)) {}

Process::~Process() {
  if (input_ >= 0) close(input_);
  if (output_ >= 0) close(output_);
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);  // works on a stopped one too
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool Process::write_line(const std::string& line) {
  const std::string text = line + "\n";
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = send(input_, text.data() + at, text.size() - at, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

bool Process::read_some(steady_clock::time_point end) {
  while (output_ >= 0) {
    pollfd fd = {output_, POLLIN, 0};
    const int ready = poll(&fd, 1, millis_until(end));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    char block[1 << 16];
    const ssize_t n = read(output_, block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      buffer_.append(block, static_cast<size_t>(n));
      return true;
    }
    close(std::exchange(output_, -1));
  }
  return false;
}

std::optional<std::string> Process::read_line(std::chrono::milliseconds limit) {
  const auto end = steady_clock::now() + limit;
  while (true) {
    const size_t at = buffer_.find('\n');
    if (at != std::string::npos) {
      std::string line = buffer_.substr(0, at);
      buffer_.erase(0, at + 1);
      return line;
    }
    if (!read_some(end)) return std::nullopt;
  }
}

std::string Process::read_all(std::chrono::milliseconds limit) {
  const auto end = steady_clock::now() + limit;
  while (read_some(end)) {
  }
  return std::exchange(buffer_, std::string());
}

void Process::send_signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

bool Process::stop() {
  if (pid_ <= 0 || kill(pid_, SIGSTOP) != 0) return false;
  int status = 0;
  while (waitpid(pid_, &status, WUNTRACED) < 0) {
    if (errno != EINTR) return false;
  }
  if (WIFSTOPPED(status)) return true;
  pid_ = -1;  // it had ended before
  return false;
}

std::optional<int> Process::wait_exit(std::chrono::milliseconds limit) {
  if (pid_ <= 0) return std::nullopt;
  const auto end = steady_clock::now() + limit;
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  if (fd < 0) fail("pidfd_open");
  pollfd ended = {fd, POLLIN, 0};
  int ready = 0;
  do {
    ready = poll(&ended, 1, millis_until(end));
  } while (ready < 0 && errno == EINTR);
  close(fd);
  if (ready <= 0) return std::nullopt;
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int64_t Process::resident_kib() const { return status_field(pid_, "VmRSS"); }
int64_t Process::threads() const { return status_field(pid_, "Threads"); }

int64_t Process::peak_kib() const { return status_field(pid_, "VmHWM"); }
void Process::forget_peak() const {
  std::ofstream file("/proc/" + std::to_string(pid_) + "/clear_refs");
  file << "5" << std::flush;
  if (!file) fail("clear_refs");
}

TempDir::TempDir() {
  const char* base = getenv("TMPDIR");
  path_ = absl::StrCat(base != nullptr ? base : "/tmp", "/weft-integration-XXXXXX");
  if (mkdtemp(path_.data()) == nullptr) fail("mkdtemp");
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

QuietPort::QuietPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in in = testing::loopback(0);
  socklen_t size = sizeof in;
  const int on = 1;  // a server that sets it too may take the port while we hold it
  setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (fd_ < 0 || bind(fd_, reinterpret_cast<sockaddr*>(&in), size) != 0 ||
      getsockname(fd_, reinterpret_cast<sockaddr*>(&in), &size) != 0) {
    fail("a port of our own");
  }
  port_ = ntohs(in.sin_port);
}

QuietPort::~QuietPort() { close(fd_); }

void QuietPort::listen() {
  if (::listen(fd_, 1) != 0) fail("listen");
}

}  // namespace weft::integration
