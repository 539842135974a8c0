#include "weft/tests/launch/harness.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>

extern char** environ;

namespace weft::launch {
namespace {

constexpr int kHangMs = 30'000;

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_of(const RunOptions& options) {
  // What a launcher around the test itself may have set must not reach weftrun.
  static const std::vector<std::string> kHidden = {
      "OMP_NUM_THREADS", "TORCHELASTIC_", "OMPI_", "SLURM_", "PMI", "WEFT_", "NO_COLOR"};
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    std::string text = *entry;
    std::string name = text.substr(0, text.find('='));
    bool hidden = options.set.count(name) > 0;
    for (const std::string& prefix : kHidden) hidden = hidden || name.rfind(prefix, 0) == 0;
    for (const std::string& gone : options.unset) hidden = hidden || name == gone;
    if (!hidden) result.push_back(text);
  }
  for (const auto& [name, value] : options.set) result.push_back(name + "=" + value);
  return result;
}

bool append_available(int& fd, std::string& target) {
  char buffer[65536];
  ssize_t n = read(fd, buffer, sizeof(buffer));
  if (n < 0 && errno == EINTR) return true;
  if (n <= 0) {  // a terminal reports EIO at its end
    close(fd);
    fd = -1;
    return false;
  }
  target.append(buffer, static_cast<size_t>(n));
  return true;
}

}  // namespace

Running Running::start(const std::vector<std::string>& args, const RunOptions& options) {
  std::string program = options.program.empty() ? WEFT_TEST_WEFTRUN : options.program;
  std::vector<std::string> words = {program};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> environment = environment_of(options);
  std::vector<char*> argv = pointers(words);
  std::vector<char*> envp = pointers(environment);

  int out[2];
  int err[2];
  if (options.terminal) {
    if (openpty(&out[0], &out[1], nullptr, nullptr, nullptr) != 0) abort();
  } else if (pipe2(out, O_CLOEXEC) != 0) {
    abort();
  }
  if (pipe2(err, O_CLOEXEC) != 0) abort();
  Running running;
  running.pid_ = fork();
  if (running.pid_ == 0) {
    dup2(options.both_outputs >= 0 ? options.both_outputs : out[1], 1);
    dup2(options.both_outputs >= 0 ? options.both_outputs : err[1], 2);
    close_range(3, ~0U, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    signal(SIGPIPE, SIG_DFL);
    for (int ignored : options.ignored_signals) signal(ignored, SIG_IGN);
    execve(program.c_str(), argv.data(), envp.data());
    _exit(125);
  }
  close(out[1]);
  close(err[1]);
  running.out_fd_ = out[0];
  running.err_fd_ = err[0];
  if (options.close_output) {
    close(running.out_fd_);
    running.out_fd_ = -1;
  }
  return running;
}

Running::Running(Running&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      out_fd_(std::exchange(other.out_fd_, -1)),
      err_fd_(std::exchange(other.err_fd_, -1)),
      out_(std::move(other.out_)),
      err_(std::move(other.err_)) {}

Running::~Running() {
  if (out_fd_ >= 0) close(out_fd_);
  if (err_fd_ >= 0) close(err_fd_);
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

void Running::send(int signal) const { kill(pid_, signal); }

// False when both streams have ended or nothing came within the bound.
bool Running::read_some() {
  pollfd fds[2] = {{out_fd_, POLLIN, 0}, {err_fd_, POLLIN, 0}};
  if (out_fd_ < 0 && err_fd_ < 0) return false;
  int ready = poll(fds, 2, kHangMs);
  if (ready == 0) return false;
  if (out_fd_ >= 0 && fds[0].revents != 0) append_available(out_fd_, out_);
  if (err_fd_ >= 0 && fds[1].revents != 0) append_available(err_fd_, err_);
  return true;
}

bool Running::wait_for(const std::string& text) {
  while (out_.find(text) == std::string::npos && err_.find(text) == std::string::npos) {
    if (!read_some()) return false;
  }
  return true;
}

Result Running::finish() {
  while (read_some()) {
  }
  Result result;
  bool hanging = out_fd_ >= 0 || err_fd_ >= 0;
  if (hanging) kill(pid_, SIGKILL);
  int status = 0;
  waitpid(std::exchange(pid_, -1), &status, 0);
  if (!hanging) result.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  result.out = out_;
  result.err = err_;
  return result;
}

Result run(const std::vector<std::string>& args, const RunOptions& options) {
  return Running::start(args, options).finish();
}

Watched::Watched(pid_t pid) : fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

Watched::Watched(Watched&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Watched::~Watched() {
  if (fd_ >= 0) close(fd_);
}

bool Watched::ended() const {
  pollfd fd = {fd_, POLLIN, 0};
  return poll(&fd, 1, kHangMs) == 1;
}

bool Watched::alive() const {
  pollfd fd = {fd_, POLLIN, 0};
  return poll(&fd, 1, 0) == 0;
}

TestDir::TestDir() {
  const char* base = getenv("TMPDIR");
  path_ = std::string(base != nullptr ? base : "/tmp") + "/weft-launch-test-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) abort();
}

TestDir::~TestDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TestDir::path(const std::string& name) const { return path_ + "/" + name; }

std::vector<std::string> sh(std::vector<std::string> options, const std::string& script) {
  options.insert(options.end(), {"sh", "-c", script});
  return options;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

std::vector<int> numbers_after(const std::string& word, const std::string& text) {
  std::vector<int> result;
  for (size_t at = text.find(word + " "); at != std::string::npos;
       at = text.find(word + " ", at + 1)) {
    result.push_back(atoi(text.c_str() + at + word.size() + 1));
  }
  return result;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<int> children_named(pid_t pid, const std::string& name) {
  std::vector<int> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    int child = atoi(entry.path().filename().c_str());
    if (child <= 0) continue;
    // pid (name) state ppid ...
    std::string stat = read_file(entry.path().string() + "/stat");
    size_t open = stat.find('(');
    size_t end = stat.rfind(')');
    if (open == std::string::npos || end == std::string::npos) continue;
    std::istringstream rest(stat.substr(end + 1));
    char state = 0;
    int parent = 0;
    rest >> state >> parent;
    if (parent == pid && stat.substr(open + 1, end - open - 1) == name) result.push_back(child);
  }
  return result;
}

}  // namespace weft::launch
