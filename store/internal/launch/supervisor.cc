#include "weft/store/internal/launch/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "weft/common/error.h"

namespace weft::launch {
namespace {

// Signals that are only passed on. Arrays of a type that is deduced are no constants in g++ 12's code.
constexpr std::array<int, 3> kPassedSignals = {SIGUSR1, SIGUSR2, SIGCONT};

}  // namespace

absl::StatusOr<SignalSetup> take_signals() {
  SignalSetup setup;
  struct sigaction old = {};
  sigaction(SIGPIPE, nullptr, &old);
  setup.ignored_sigpipe = old.sa_handler == SIG_IGN;
  signal(SIGPIPE, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);  // ignored, it would make the exit codes of the children vanish

  sigset_t taken;
  sigemptyset(&taken);
  sigaddset(&taken, SIGCHLD);
  auto take = [&](int signal) {
    // A blocked signal is queued even when it is ignored, so one that was ignored must not be in
    // the set.
    if (sigaction(signal, nullptr, &old) == 0 && old.sa_handler != SIG_IGN)
      sigaddset(&taken, signal);
  };
  for (int signal : kStopSignals) take(signal);
  for (int signal : kPassedSignals) take(signal);
  take(SIGTSTP);
  if (sigprocmask(SIG_BLOCK, &taken, &setup.original_mask) != 0)
    return os_error(errno, "sigprocmask");
  // A parent that blocked SIGTERM around its own fork and forgot: the job must be stoppable.
  for (int signal : kStopSignals) sigdelset(&setup.original_mask, signal);
  sigdelset(&setup.original_mask, SIGCHLD);
  setup.fd.reset(signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!setup.fd.valid()) return os_error(errno, "signalfd");
  return setup;
}

Supervisor::Supervisor(Setup setup)
    : setup_(std::move(setup)),
      out_(setup_.outputs->out()),
      err_(setup_.outputs->err()),
      color_out_(wants_color(STDOUT_FILENO)),
      color_err_(wants_color(STDERR_FILENO)),
      policy_(setup_.options.restarts, setup_.options.may_die) {}

void Supervisor::say(absl::string_view text) {
  if (setup_.say) setup_.say(text);
}

void Supervisor::note(absl::string_view text) {
  if (!setup_.options.quiet) say(text);
}

std::string Supervisor::describe(const Rank& rank) const {
  return absl::StrCat("rank ", rank.plan.rank, " (", rank.plan.name, ", pid ", rank.pid,
                      ") on host ", setup_.host);
}

bool Supervisor::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->running; });
}

int Supervisor::start_all() {
  const SupervisorOptions& options = setup_.options;
  for (ProcessPlan& plan : setup_.plan) {
    ranks_.push_back(std::make_unique<Rank>());
    ranks_.back()->plan = std::move(plan);
    start_error_ = open_streams(*ranks_.back());
    if (!start_error_.ok()) {
      say(start_error_.message());
      return 1;
    }
  }
  if (ranks_.size() > 1 || options.announces) {
    std::vector<std::string> names;
    for (const auto& rank : ranks_) names.push_back(rank->plan.name);
    if (names.size() > 8) names = {names.front(), "...", names.back()};
    note(absl::StrCat("starting ", processes(ranks_.size()), " (", absl::StrJoin(names, " "),
                      ") of ", setup_.program_path));
  }
  started_ = monotonic_now();
  for (auto& rank : ranks_) {
    const absl::Status status = start_rank(*rank);
    if (!status.ok()) {
      start_error_ = annotate(status, absl::StrCat("cannot start ", rank->plan.name));
      say(start_error_.message());
      return absl::IsNotFound(status) ? 127 : 126;
    }
  }
  return 0;
}

absl::Status Supervisor::start_rank(Rank& rank) {
  const SupervisorOptions& options = setup_.options;
  ProcessSpec spec{.path = setup_.program_path,
                   .argv = options.program,
                   .environment = setup_.environment,
                   .signal_mask = {},
                   .ignore_sigpipe = false};
  if (setup_.signals != nullptr) {
    spec.signal_mask = setup_.signals->original_mask;
    spec.ignore_sigpipe = setup_.signals->ignored_sigpipe;
  } else {
    struct sigaction pipe = {};
    sigaction(SIGPIPE, nullptr, &pipe);
    spec.ignore_sigpipe = pipe.sa_handler == SIG_IGN;
    pthread_sigmask(SIG_SETMASK, nullptr, &spec.signal_mask);
  }
  for (const auto& [name, value] : rank.plan.environment) {
    spec.environment.push_back(absl::StrCat(name, "=", value));
  }
  spec.environment.push_back(absl::StrCat("WEFT_PROCESS_RESTARTS=", rank.restarts));
  if (options.pin) {
    spec.cores =
        share_of_cores(allowed_cores(), rank.plan.local_rank, static_cast<int>(ranks_.size()));
  }
  absl::StatusOr<StartedProcess> started = start_process(spec);
  if (!started.ok()) return started.status();
  rank.pid = started->pid;
  rank.running = true;
  rank.wait_status = 0;
  rank.status_lost = false;
  rank.out.fd = std::move(started->out);
  rank.err.fd = std::move(started->err);
  if (setup_.signals == nullptr) {
    // Not reaped yet, so that the number is still its own.
    rank.pidfd = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, rank.pid, 0)));
    if (!rank.pidfd.valid()) {
      const int error = errno;
      kill(-rank.pid, SIGKILL);
      wait_for(rank.pid, nullptr);
      rank.running = false;
      return os_error(error, "pidfd_open");
    }
  }
  return absl::OkStatus();
}

int Supervisor::run() {
  for (const std::string& line : setup_.notes) note(line);
  // What a rank leaves behind becomes a child of the launcher instead of vanishing to init.
  if (setup_.signals != nullptr) prctl(PR_SET_CHILD_SUBREAPER, 1);
  int start_code = start_all();
  if (start_code != 0) {
    if (setup_.peers != nullptr) {
      setup_.peers->report(
          {.exit_code = start_code, .text = absl::StrCat("cannot start on host ", setup_.host)});
    }
    kill_all();
  }
  while (any_running() || sweep()) {
    wait_for_events();
    on_deadline();
  }
  drain_output();
  if (start_code != 0) return start_code;
  first_ = last_resort();
  report();
  drain_output();
  if (first_ != nullptr) return exit_code_of(first_->wait_status);
  if (remote_) return remote_->exit_code;
  return reader_gone_ ? 128 + SIGPIPE : 0;
}

void Supervisor::wait_for_events() {
  enum class Kind { kSignals, kEnd, kPeers, kStream, kQueue };
  struct Target {
    Kind kind;
    Stream* stream;
    OutputQueue* queue;
  };
  std::vector<pollfd> fds;
  std::vector<Target> targets;
  auto watch = [&](int fd, short events, Target target) {
    fds.push_back({.fd = fd, .events = events, .revents = 0});
    targets.push_back(target);
  };
  if (setup_.signals != nullptr)
    watch(setup_.signals->fd.get(), POLLIN, {Kind::kSignals, nullptr, nullptr});
  if (setup_.peers != nullptr && !heard_peers_)
    watch(setup_.peers->wake_fd(), POLLIN, {Kind::kPeers, nullptr, nullptr});
  for (auto& rank : ranks_) {
    if (rank->running && rank->pidfd.valid())
      watch(rank->pidfd.get(), POLLIN, {Kind::kEnd, nullptr, nullptr});
    for (Stream* stream : {&rank->out, &rank->err}) {
      if (stream->fd.valid() && !stream->queue->full()) {
        watch(stream->fd.get(), POLLIN, {Kind::kStream, stream, nullptr});
      }
    }
  }
  watch(out_.progress_fd(), POLLIN, {Kind::kQueue, nullptr, &out_});
  if (&err_ != &out_) watch(err_.progress_fd(), POLLIN, {Kind::kQueue, nullptr, &err_});

  int timeout = -1;
  if (deadline_) {
    absl::Duration left = *deadline_ - monotonic_now();
    timeout =
        left <= absl::ZeroDuration() ? 0 : static_cast<int>(absl::ToInt64Milliseconds(left)) + 1;
  }
  // Processes that are not our children cannot be waited for: their end is looked for, briefly.
  if (sweeping_) timeout = timeout < 0 ? 20 : std::min(timeout, 20);
  int ready = poll(fds.data(), fds.size(), timeout);
  if (ready <= 0) return;  // EINTR or the deadline

  bool ended = false;
  for (size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents == 0) continue;
    switch (targets[i].kind) {
      case Kind::kSignals: on_signals(); break;
      case Kind::kEnd: ended = true; break;
      case Kind::kPeers: on_peer_failure(); break;
      case Kind::kStream: read_stream(*targets[i].stream); break;
      case Kind::kQueue:
        targets[i].queue->clear_progress();
        if (out_.broken() && !reader_gone_) {
          reader_gone_ = true;
          say("nobody reads the output any more (the pipe is closed)");
          if (phase_ == Phase::kRunning) begin_stopping(SIGTERM);
        }
        break;
    }
  }
  if (ended) reap();
}

void Supervisor::on_signals() {
  signalfd_siginfo info;
  while (read(setup_.signals->fd.get(), &info, sizeof(info)) ==
         static_cast<ssize_t>(sizeof(info))) {
    int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;
    if (signal == SIGTSTP) {
      suspend();
    } else if (is_stop_signal(signal)) {
      on_stop_signal(signal);
    } else {
      signal_ranks(signal);
    }
  }
  // After the signals: a rank that a forwarded signal ends did not fail by itself.
  reap();
}

void Supervisor::on_stop_signal(int signal) {
  absl::Duration now = monotonic_now();
  if (user_signal_ == 0) {
    user_signal_ = signal;
    user_signal_at_ = now;
    note(absl::StrCat("got ", signal_name(signal), ": passed on to ", processes(ranks_.size()),
                      ", SIGKILL follows after ", absl::FormatDuration(setup_.options.grace)));
    if (setup_.peers != nullptr) {
      setup_.peers->report({.exit_code = 128 + signal,
                            .text = absl::StrCat("weftrun on host ", setup_.host,
                                                 " was stopped by ", signal_name(signal))});
    }
    begin_stopping(signal);
  } else if (now - user_signal_at_ > absl::Seconds(1)) {
    // Not at once: timeout(1) and some shells deliver the same signal twice.
    say(absl::StrCat("got ", signal_name(signal), " again: killing everything now"));
    kill_all();
    give_up_output_ = true;
  } else {
    signal_ranks(signal);
  }
}

void Supervisor::suspend() {
  // The ranks have groups of their own, so the terminal's Ctrl-Z does not reach them.
  signal_ranks(SIGSTOP);
  raise(SIGSTOP);
  signal_ranks(SIGCONT);
}

void Supervisor::signal_ranks(int signal) {
  for (const auto& rank : ranks_) {
    // Only while the leader is not reaped: then no other group can have this number.
    if (rank->running) kill(-rank->pid, signal);
  }
}

void Supervisor::on_peer_failure() {
  heard_peers_ = true;  // there is only one first failure
  std::optional<Failure> failure = setup_.peers->failure();
  if (!failure || first_ != nullptr) return;  // when both nodes failed, each answers for its own
  remote_ = std::move(failure);
  say(absl::StrCat("another node: ", remote_->text, "; stopping ", processes(ranks_.size()),
                   " here"));
  if (phase_ == Phase::kRunning) begin_stopping(SIGTERM);
}

void Supervisor::begin_stopping(int signal) {
  if (phase_ == Phase::kRunning) {
    phase_ = Phase::kStopping;
    deadline_ = monotonic_now() + setup_.options.grace;
  }
  signal_ranks(signal);
}

void Supervisor::on_deadline() {
  if (!deadline_ || monotonic_now() < *deadline_) return;
  deadline_.reset();
  std::vector<std::string> names;
  for (const auto& rank : ranks_) {
    if (rank->running) names.push_back(rank->plan.name);
  }
  if (!names.empty()) {
    say(absl::StrCat("still there after ", absl::FormatDuration(setup_.options.grace),
                     ", killed now: ", absl::StrJoin(names, " ")));
  }
  kill_all();
}

}  // namespace weft::launch
