// Looks after the processes of one node from their start to their end.
//
// One loop in poll() over the signals, the ends and the pipes of the processes; a death wakes it at
// once, nothing is asked for periodically. It ends when every process, and everything these started,
// is gone. Single-threaded.
//
// With SignalSetup the process is the job's launcher: it takes the signals, waits for any child and
// adopts what the ranks leave behind; run() belongs on the main thread, with no other thread that
// takes signals. Without, it is a program that has children, threads and signals of its own: all of
// these stay as they are, the ends of the ranks are heard of through pidfds, and run() may stand on
// any thread, which must live as long as the processes.
//
// States: running -> stopping (SIGTERM or the user's signal was sent, the grace runs) -> killing
// (SIGKILL was sent).
//
//   Supervisor supervisor(std::move(setup));
//   return supervisor.run();   // the exit code of the launcher
#ifndef WEFT_STORE_INTERNAL_LAUNCH_SUPERVISOR_H_
#define WEFT_STORE_INTERNAL_LAUNCH_SUPERVISOR_H_

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "weft/store/internal/launch/death_policy.h"
#include "weft/store/internal/launch/output.h"
#include "weft/store/internal/launch/output_queue.h"
#include "weft/store/internal/launch/plan.h"
#include "weft/store/internal/launch/process.h"
#include "weft/store/internal/launch/system.h"

namespace weft::launch {

// The end of the job as one node tells it to the others.
struct Failure {
  int exit_code = 0;
  std::string text;  // "rank 2 (trainer1, pid 77) on host a: killed by signal 9 (SIGKILL)"
};

// How a node of several hears of the others and tells them. All calls return at once.
class PeerLink {
 public:
  virtual ~PeerLink() = default;
  // Readable when failure() has something new.
  virtual int wake_fd() const = 0;
  virtual std::optional<Failure> failure() = 0;
  virtual void report(const Failure& failure) = 0;
};

// The signals as the launcher found them, for its children, and a descriptor that reads those it takes
// care of.
struct SignalSetup {
  sigset_t original_mask = {};
  bool ignored_sigpipe = false;
  UniqueFd fd;
};
// Before any other thread exists. Signals that were ignored (nohup, a background job of sh) stay
// ignored.
absl::StatusOr<SignalSetup> take_signals();

// How a supervisor treats its processes.
struct SupervisorOptions {
  std::vector<std::string> program;  // name and arguments, the same for all
  std::string log_dir = {};          // empty: what they write is printed
  bool tee = false;                  // with log_dir: printed, too
  bool prefix_output = true;         // lines stand behind the name of their process
  bool pin = false;
  bool quiet = false;
  bool announces = false;  // says what it starts also when that is one process
  absl::Duration grace = absl::Seconds(10);
  int nnodes = 1;
  std::vector<RoleSpec> may_die = {};
  std::vector<RoleSpec> restarts = {};
};

// How a process ended.
struct ProcessEnd {
  ProcessPlan plan;
  pid_t pid = -1;
  int wait_status = 0;  // as waitpid() gives it
  // Another part of the program took the status, or it has SIGCHLD ignored: the above is 0.
  bool status_lost = false;
  std::vector<std::string> last_lines = {};  // that it wrote
};

class Supervisor {
 public:
  struct Setup {
    SupervisorOptions options;
    std::string host;
    std::string program_path;
    std::vector<std::string> environment;  // without what is set per process
    std::string tag;                       // in kTagVariable of every process
    std::vector<ProcessPlan> plan;
    const SignalSetup* signals = nullptr;  // null: the program's signals stay its own
    Outputs* outputs = nullptr;
    std::function<void(absl::string_view)> say = nullptr;  // takes lines for the user
    // Whether a process that has ended with 0 has done what it was started for. Null: it has.
    std::function<bool(const ProcessPlan&)> done = nullptr;
    PeerLink* peers = nullptr;            // null with one node
    int restart_count = 0;                // lives before this one, whose logs are continued
    std::vector<std::string> notes = {};  // lines to say before the start
  };

  explicit Supervisor(Setup setup);

  // The exit code for the launcher.
  int run();
  // After run(): the processes were started and no user has ended them, so that all may start again
  // after a failure.
  bool may_restart() const { return start_error_.ok() && user_signal_ == 0 && !reader_gone_; }

  // ---- after run() ----
  // Why the processes could not be started; OK when they were.
  const absl::Status& start_error() const { return start_error_; }
  // The failure that ended the job, if one did, and those seen at the same time.
  std::optional<ProcessEnd> first_failure() const;
  std::vector<ProcessEnd> also_failed() const;
  // For all processes, by local rank.
  std::vector<ProcessEnd> ends() const;
  bool reader_gone() const { return reader_gone_; }  // of the output

 private:
  struct Stream {
    UniqueFd fd;
    UniqueFd log;
    OutputQueue* queue = nullptr;
    std::unique_ptr<LineSplitter> splitter;
  };
  struct Rank {
    ProcessPlan plan;
    pid_t pid = -1;
    UniqueFd pidfd;  // without SignalSetup
    bool running = false;
    int wait_status = 0;
    bool status_lost = false;
    int restarts = 0;  // of this process alone
    Stream out;
    Stream err;
    LastLines last;
  };
  enum class Phase { kRunning, kStopping, kKilling };

  // 0, or the exit code for a program that cannot be started.
  int start_all();
  absl::Status start_rank(Rank& rank);
  void wait_for_events();
  void on_signals();
  void on_stop_signal(int signal);
  void suspend();
  void on_peer_failure();
  void on_deadline();
  void begin_stopping(int signal);
  void signal_ranks(int signal);
  // ---- supervisor_deaths.cc ----
  void reap();
  std::vector<Rank*> reap_children();
  std::vector<Rank*> reap_ranks();
  bool has_failed(const Rank& rank) const;
  void on_deaths(const std::vector<Rank*>& dead);
  // Takes out those that the job outlives, and starts again those that it may.
  void forgive(std::vector<Rank*>* failed);
  const Rank* last_resort() const;
  // Whether processes are left that no rank answers for; asks them to leave, later kills them.
  bool sweep();
  void kill_all();
  // ---- supervisor_output.cc ----
  absl::Status open_streams(Rank& rank);
  void read_stream(Stream& stream);
  void close_stream(Stream& stream);
  void drain_output();
  void report();

  static ProcessEnd end_of_rank(const Rank& rank);
  bool any_running() const;
  std::string describe(const Rank& rank) const;
  void say(absl::string_view text);   // always
  void note(absl::string_view text);  // not with --quiet

  Setup setup_;
  OutputQueue& out_;
  OutputQueue& err_;  // out_ where both are one file
  bool color_out_;
  bool color_err_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  absl::Duration started_;
  Phase phase_ = Phase::kRunning;
  std::optional<absl::Duration> deadline_;  // of the grace, on the monotonic clock
  int user_signal_ = 0;                     // the first stop signal that the launcher got
  absl::Duration user_signal_at_;
  const Rank* first_ = nullptr;  // the rank whose failure ends the job
  DeathPolicy policy_;
  const Rank* first_forgiven_ = nullptr;  // the first that the job goes on without
  std::optional<Failure> remote_;
  bool heard_peers_ = false;
  std::vector<const Rank*> also_failed_;
  absl::Status start_error_;
  bool reader_gone_ = false;
  bool sweeping_ = false;
  bool give_up_output_ = false;
};

}  // namespace weft::launch

#endif  // WEFT_STORE_INTERNAL_LAUNCH_SUPERVISOR_H_
