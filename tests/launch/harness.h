// Runs the built weftrun for a test: its output, its exit code, signals at a chosen moment.
//
// Nothing here waits for a time to pass: a test waits for a line of output or for the end of a
// process, and a bound of a minute stands against hanging. Not thread-safe.
//
//   Running run = Running::start({"-n", "2", "sh", "-c", "echo up; exec sleep 1000"});
//   ASSERT_TRUE(run.wait_for("[worker1] up"));
//   run.send(SIGTERM);
//   EXPECT_EQ(run.finish().code, 143);
#ifndef WEFT_TESTS_LAUNCH_HARNESS_H_
#define WEFT_TESTS_LAUNCH_HARNESS_H_

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace weft::launch {

struct Result {
  int code = -1;  // 128 + signal when a signal ended weftrun itself; -1 when it had to be killed
                  // for hanging
  std::string out;
  std::string err;
};

struct RunOptions {
  std::map<std::string, std::string> set = {};
  std::vector<std::string> unset = {};
  bool terminal = false;      // standard output is a terminal
  int both_outputs = -1;      // a descriptor for standard output and error, instead of pipes
  bool close_output = false;  // standard output has no reader
  std::vector<int> ignored_signals = {};
  std::string program = {};  // default: weftrun
};

class Running {
 public:
  static Running start(const std::vector<std::string>& args, const RunOptions& options = {});

  Running(Running&& other) noexcept;
  Running& operator=(Running&&) = delete;
  ~Running();

  pid_t pid() const { return pid_; }
  void send(int signal) const;
  // Reads until standard output or error contains `text`; false when weftrun ends or the bound
  // passes before.
  bool wait_for(const std::string& text);
  // Reads to the end.
  Result finish();

  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

 private:
  Running() = default;
  bool read_some();

  pid_t pid_ = -1;
  int out_fd_ = -1;
  int err_fd_ = -1;
  std::string out_;
  std::string err_;
};

Result run(const std::vector<std::string>& args, const RunOptions& options = {});

// Watches a process that is not a child: a pidfd, opened while the process lives.
class Watched {
 public:
  explicit Watched(pid_t pid);
  Watched(Watched&& other) noexcept;
  ~Watched();

  bool valid() const { return fd_ >= 0; }
  // True when the process has ended, at once or within the bound against hanging.
  bool ended() const;
  // True when it is running now.
  bool alive() const;

 private:
  int fd_ = -1;
};

// A directory for one test.
class TestDir {
 public:
  TestDir();
  TestDir(const TestDir&) = delete;
  TestDir& operator=(const TestDir&) = delete;
  ~TestDir();

  std::string path(const std::string& name) const;

 private:
  std::string path_;
};

// The arguments that start `sh -c script` under these options.
std::vector<std::string> sh(std::vector<std::string> options, const std::string& script);
std::vector<std::string> lines_of(const std::string& text);
// The numbers behind every `word` in `text`, in order: numbers_after("pid", "[a] pid 17\n") is
// {17}.
std::vector<int> numbers_after(const std::string& word, const std::string& text);
std::string read_file(const std::string& path);
// The processes whose parent is `pid` and whose short name is `name`.
std::vector<int> children_named(pid_t pid, const std::string& name);

}  // namespace weft::launch

#endif  // WEFT_TESTS_LAUNCH_HARNESS_H_
