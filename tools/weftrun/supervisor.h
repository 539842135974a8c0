// Looks after the processes of one node from their start to their end.
//
// One loop in poll() over a signalfd and the pipes of the processes; a death wakes it at once
// (SIGCHLD), nothing is asked for periodically. It ends when every process, and everything these
// started, is gone. Single-threaded: run() belongs on the main thread, with no other thread that
// takes signals.
//
// States: running -> stopping (SIGTERM or the user's signal was sent, the grace runs) -> killing
// (SIGKILL was sent).
//
//   Supervisor supervisor(std::move(setup));
//   return supervisor.run();   // the exit code of weftrun
#ifndef WEFT_TOOLS_WEFTRUN_SUPERVISOR_H_
#define WEFT_TOOLS_WEFTRUN_SUPERVISOR_H_

#include <signal.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "weft/tools/weftrun/death_policy.h"
#include "weft/tools/weftrun/options.h"
#include "weft/tools/weftrun/output.h"
#include "weft/tools/weftrun/output_queue.h"
#include "weft/tools/weftrun/plan.h"
#include "weft/tools/weftrun/process.h"
#include "weft/tools/weftrun/system.h"

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

// The signals as weftrun found them, for its children, and a descriptor that reads those it takes
// care of.
struct SignalSetup {
  sigset_t original_mask = {};
  bool ignored_sigpipe = false;
  UniqueFd fd;
};
// Before any other thread exists. Signals that were ignored (nohup, a background job of sh) stay
// ignored.
absl::StatusOr<SignalSetup> take_signals();

class Supervisor {
 public:
  struct Setup {
    Options options;
    std::string host;
    std::string program_path;
    std::vector<std::string> environment;  // of weftrun, without what is set per process
    std::string tag;                       // in kTagVariable of every process
    std::vector<ProcessPlan> plan;
    const SignalSetup* signals = nullptr;
    Outputs* outputs = nullptr;
    PeerLink* peers = nullptr;       // null with one node
    int restart_count = 0;           // lives before this one, whose logs are continued
    std::vector<std::string> notes;  // lines to say before the start
  };

  explicit Supervisor(Setup setup);

  // The exit code for weftrun.
  int run();
  // After run(): the processes were started and no user has ended them, so that all may start again
  // after a failure.
  bool may_restart() const { return started_all_ && user_signal_ == 0 && !reader_gone_; }

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
    bool running = false;
    int wait_status = 0;
    int restarts = 0;  // of this process alone
    Stream out;
    Stream err;
    LastLines last;
  };
  enum class Phase { kRunning, kStopping, kKilling };

  absl::Status open_streams(Rank& rank);
  // 0, or the exit code for a program that cannot be started.
  int start_all();
  absl::Status start_rank(Rank& rank);
  void wait_for_events();
  void read_stream(Stream& stream);
  void on_signals();
  void on_stop_signal(int signal);
  void suspend();
  void reap();
  void on_deaths(const std::vector<Rank*>& dead);
  // ---- supervisor_deaths.cc ----
  // Takes out those that the job outlives, and starts again those that it may.
  void forgive(std::vector<Rank*>* failed);
  void close_stream(Stream& stream);
  const Rank* last_resort() const;
  void on_peer_failure();
  void on_deadline();
  // Whether processes are left that no rank answers for; asks them to leave, later kills them.
  bool sweep();
  void begin_stopping(int signal);
  void kill_all();
  void signal_ranks(int signal);
  void drain_output();
  void report();

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
  int user_signal_ = 0;                     // the first stop signal that weftrun got
  absl::Duration user_signal_at_;
  const Rank* first_ = nullptr;  // the rank whose failure ends the job
  DeathPolicy policy_;
  const Rank* first_forgiven_ = nullptr;  // the first that the job goes on without
  std::optional<Failure> remote_;
  bool heard_peers_ = false;
  std::vector<const Rank*> also_failed_;
  bool started_all_ = false;
  bool reader_gone_ = false;
  bool sweeping_ = false;
  bool give_up_output_ = false;
};

}  // namespace weft::launch

#endif  // WEFT_TOOLS_WEFTRUN_SUPERVISOR_H_
