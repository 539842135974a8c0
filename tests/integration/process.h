#ifndef WEFT_TESTS_INTEGRATION_PROCESS_H_
#define WEFT_TESTS_INTEGRATION_PROCESS_H_

// A child process that a test talks to in lines: standard input and output are ours, standard error
// goes to a file. It dies with the test (PR_SET_PDEATHSIG) and with this object, also when stopped.
//
//   Process p({.command = {"/bin/cat"}, .error_file = dir.path("cat.log")});
//   p.write_line("hello");
//   EXPECT_EQ(p.read_line(), "hello");
//
// Nothing here waits for a time to pass: it waits for a line or for an end, and `limit` stands
// against hanging. Not thread-safe.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace weft::integration {

// Against hanging only; generous, because many processes may share few cores.
inline constexpr std::chrono::seconds kLimit{90};

struct ProcessOptions {
  std::vector<std::string> command = {};
  // The variables of weft and of launchers are hidden from the child; these are added.
  std::map<std::string, std::string> environment = {};
  std::string error_file = "/dev/null";
};

class Process {
 public:
  explicit Process(const ProcessOptions& options);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process();

  pid_t pid() const { return pid_; }
  // False: the child does not read any more.
  bool write_line(const std::string& line);
  // Without its end; nothing when the output ended or the limit passed.
  std::optional<std::string> read_line(std::chrono::milliseconds limit = kLimit);
  // Everything until the end of the output.
  std::string read_all(std::chrono::milliseconds limit = kLimit);
  void send_signal(int signal) const;
  // SIGSTOP, and back only when it stands still; SIGCONT ends that.
  bool stop();
  // Exit code, or 128 + signal; nothing when it has not ended within the limit. Once.
  std::optional<int> wait_exit(std::chrono::milliseconds limit = kLimit);

  // From /proc: resident memory in KiB and number of threads; 0 when the process has ended.
  int64_t resident_kib() const;
  int64_t threads() const;
  // The most that was resident since forget_peak(), in KiB.
  int64_t peak_kib() const;
  void forget_peak() const;

 private:
  bool read_some(std::chrono::steady_clock::time_point end);

  pid_t pid_ = -1;
  int input_ = -1;   // ours to write
  int output_ = -1;  // ours to read
  std::string buffer_;
};

// A directory for one test, removed with what is in it.
class TempDir {
 public:
  TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir();

  std::string path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// A loopback port without a listener. Kept bound without listening as long as the object lives, so
// that the system gives it to no other process.
class QuietPort {
 public:
  QuietPort();
  QuietPort(const QuietPort&) = delete;
  QuietPort& operator=(const QuietPort&) = delete;
  ~QuietPort();

  int port() const { return port_; }
  // From now on the port has a listener, which never answers.
  void listen();

 private:
  int fd_ = -1;
  int port_ = 0;
};

}  // namespace weft::integration

#endif  // WEFT_TESTS_INTEGRATION_PROCESS_H_
