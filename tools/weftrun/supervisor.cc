#include "weft/tools/weftrun/supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace weft::launch {
namespace {

// Signals that are only passed on.
constexpr std::array kPassedSignals = {SIGUSR1, SIGUSR2, SIGCONT};

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string processes(size_t count) {
  return count == 1 ? "1 process" : absl::StrCat(count, " processes");
}

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

void Supervisor::say(absl::string_view text) { setup_.outputs->say(text); }

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

absl::Status Supervisor::open_streams(Rank& rank) {
  const Options& options = setup_.options;
  bool printed = options.log_dir.empty() || options.tee;
  for (Stream* stream : {&rank.out, &rank.err}) {
    bool is_out = stream == &rank.out;
    stream->queue = is_out ? &out_ : &err_;
    bool color = is_out ? color_out_ : color_err_;
    std::string first = line_prefix(rank.plan.name, rank.plan.rank, color, false);
    std::string next = line_prefix(rank.plan.name, rank.plan.rank, color, true);
    auto sink = [&rank, queue = stream->queue, printed, first, next](absl::string_view line,
                                                                     bool continued) {
      rank.last.add(line);
      if (printed) queue->add(absl::StrCat(continued ? next : first, line, "\n"));
    };
    stream->splitter = std::make_unique<LineSplitter>(std::move(sink));
    if (!options.log_dir.empty()) {
      std::string path =
          absl::StrCat(options.log_dir, "/", rank.plan.name, is_out ? ".out" : ".err");
      const int how = setup_.restart_count == 0 ? O_TRUNC : O_APPEND;
      stream->log.reset(open(path.c_str(), O_WRONLY | O_CREAT | how | O_CLOEXEC, 0644));
      if (!stream->log.valid()) return os_error(errno, absl::StrCat("cannot open ", path));
    }
  }
  return absl::OkStatus();
}

int Supervisor::start_all() {
  const Options& options = setup_.options;
  for (ProcessPlan& plan : setup_.plan) {
    ranks_.push_back(std::make_unique<Rank>());
    ranks_.back()->plan = std::move(plan);
    if (absl::Status status = open_streams(*ranks_.back()); !status.ok()) {
      say(status.message());
      return 1;
    }
  }
  if (ranks_.size() > 1 || options.explicit_roles || options.nnodes > 1) {
    std::vector<std::string> names;
    for (const auto& rank : ranks_) names.push_back(rank->plan.name);
    if (names.size() > 8) names = {names.front(), "...", names.back()};
    note(absl::StrCat("starting ", processes(ranks_.size()), " (", absl::StrJoin(names, " "),
                      ") of ", setup_.program_path));
  }
  started_ = monotonic_now();
  for (auto& rank : ranks_) {
    if (absl::Status status = start_rank(*rank); !status.ok()) {
      say(absl::StrCat("cannot start ", rank->plan.name, ": ", status.message()));
      return absl::IsNotFound(status) ? 127 : 126;
    }
  }
  return 0;
}

absl::Status Supervisor::start_rank(Rank& rank) {
  const Options& options = setup_.options;
  ProcessSpec spec{.path = setup_.program_path,
                   .argv = options.program,
                   .environment = setup_.environment,
                   .signal_mask = setup_.signals->original_mask,
                   .ignore_sigpipe = setup_.signals->ignored_sigpipe};
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
  rank.out.fd = std::move(started->out);
  rank.err.fd = std::move(started->err);
  return absl::OkStatus();
}

int Supervisor::run() {
  for (const std::string& line : setup_.notes) note(line);
  // What a rank leaves behind becomes a child of weftrun instead of vanishing to init.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  int start_code = start_all();
  started_all_ = start_code == 0;
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
  enum class Kind { kSignals, kPeers, kStream, kQueue };
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
  watch(setup_.signals->fd.get(), POLLIN, {Kind::kSignals, nullptr, nullptr});
  if (setup_.peers != nullptr && !heard_peers_)
    watch(setup_.peers->wake_fd(), POLLIN, {Kind::kPeers, nullptr, nullptr});
  for (auto& rank : ranks_) {
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

  for (size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents == 0) continue;
    switch (targets[i].kind) {
      case Kind::kSignals: on_signals(); break;
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
}

void Supervisor::read_stream(Stream& stream) {
  std::array<char, 64 * 1024> buffer;
  ssize_t n = read(stream.fd.get(), buffer.data(), buffer.size());
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    stream.splitter->finish();
    stream.fd.reset();
    return;
  }
  absl::string_view bytes(buffer.data(), static_cast<size_t>(n));
  stream.splitter->feed(bytes);
  while (stream.log.valid() && !bytes.empty()) {
    ssize_t written = write(stream.log.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      say(absl::StrCat("writing to ", setup_.options.log_dir, ": ", strerror(errno),
                       "; this file ends here"));
      stream.log.reset();
      break;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
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

void Supervisor::reap() {
  std::vector<Rank*> dead;
  while (true) {
    // First a look, so that the process still holds its number while its group gets a signal.
    siginfo_t info = {};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) break;
    auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
      return rank->running && rank->pid == info.si_pid;
    });
    if (found != ranks_.end())
      kill(-info.si_pid, SIGTERM);  // what the rank leaves behind in its group
    int status = 0;
    if (waitpid(info.si_pid, &status, 0) != info.si_pid || found == ranks_.end()) continue;
    (*found)->running = false;
    (*found)->wait_status = status;
    dead.push_back(found->get());
  }
  if (!dead.empty()) on_deaths(dead);
}

void Supervisor::on_deaths(const std::vector<Rank*>& dead) {
  std::vector<Rank*> failed;
  for (Rank* rank : dead) {
    if (rank->wait_status != 0) failed.push_back(rank);
  }
  forgive(&failed);
  if (failed.empty()) return;
  // Deaths seen in one wake-up have no order. One by a signal is more likely the cause, and an exit
  // code the consequence, than the other way round.
  std::stable_partition(failed.begin(), failed.end(),
                        [](const Rank* rank) { return WIFSIGNALED(rank->wait_status); });
  bool stopping = phase_ != Phase::kRunning;
  if (first_ == nullptr && !remote_ && (!stopping || user_signal_ != 0)) {
    first_ = failed.front();
    failed.erase(failed.begin());
    if (!stopping) {
      std::string text = absl::StrCat(describe(*first_), ": ", end_of(first_->wait_status));
      size_t left = static_cast<size_t>(std::count_if(
          ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->running; }));
      say(absl::StrFormat(
          "%s after %.1f s%s", text, absl::ToDoubleSeconds(monotonic_now() - started_),
          left == 0 ? ""
                    : absl::StrCat("; stopping ", processes(left), " (SIGTERM, SIGKILL after ",
                                   absl::FormatDuration(setup_.options.grace), ")")));
      if (setup_.peers != nullptr) {
        setup_.peers->report(
            {.exit_code = exit_code_of(first_->wait_status), .text = std::move(text)});
      }
      begin_stopping(SIGTERM);
    }
  }
  if (!stopping) also_failed_.insert(also_failed_.end(), failed.begin(), failed.end());
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

void Supervisor::kill_all() {
  phase_ = Phase::kKilling;
  deadline_.reset();
  signal_ranks(SIGKILL);
  for (int pid : tagged_processes(setup_.tag)) kill(pid, SIGKILL);
}

bool Supervisor::sweep() {
  std::vector<int> left = tagged_processes(setup_.tag);
  if (left.empty()) {
    // One that is on its way out would still be seen by the caller, or the next life.
    sweeping_ = has_child_in_transit();
    reap();
    return sweeping_;
  }
  if (phase_ == Phase::kKilling) {
    for (int pid : left) kill(pid, SIGKILL);
  } else if (!sweeping_) {
    say(absl::StrCat("stopping ", processes(left.size()), " that the ranks left behind"));
    for (int pid : left) kill(pid, SIGTERM);
    if (!deadline_) deadline_ = monotonic_now() + setup_.options.grace;
    phase_ = Phase::kStopping;
  }
  sweeping_ = true;
  return true;
}

void Supervisor::drain_output() {
  // No process writes into the pipes any more: read what is in them, then wait for our own reader.
  for (auto& rank : ranks_) {
    for (Stream* stream : {&rank->out, &rank->err}) {
      while (stream->fd.valid()) {
        pollfd probe = {.fd = stream->fd.get(), .events = POLLIN, .revents = 0};
        if (poll(&probe, 1, 0) <= 0) {
          stream->splitter->finish();
          stream->fd.reset();
        } else {
          read_stream(*stream);
        }
      }
    }
  }
  deadline_.reset();
  // After a stop signal the reader has the grace, as the processes had.
  if (user_signal_ != 0) deadline_ = monotonic_now() + setup_.options.grace;
  while (!give_up_output_ && !setup_.outputs->written()) {
    wait_for_events();
    // A stop signal while a slow reader is waited for: it gets the grace, too.
    if (deadline_ && monotonic_now() >= *deadline_) give_up_output_ = true;
  }
  if (give_up_output_) setup_.outputs->give_up();
}

void Supervisor::report() {
  if (remote_ && first_ == nullptr) {
    say(absl::StrCat("first failure, on another node: ", remote_->text));
    return;
  }
  if (first_ == nullptr) return;
  bool by_request = user_signal_ != 0 && exit_code_of(first_->wait_status) == 128 + user_signal_;
  if (by_request) {
    note(absl::StrCat("stopped by ", signal_name(user_signal_)));
    return;
  }
  say(absl::StrCat("first failure: ", describe(*first_), ": ", end_of(first_->wait_status)));
  std::vector<std::string> lines = first_->last.lines();
  if (lines.empty()) {
    say("it wrote nothing");
  } else {
    say(absl::StrCat("its last ", lines.size() == 1 ? "line" : absl::StrCat(lines.size(), " lines"),
                     ":"));
    for (const std::string& line : lines) say(absl::StrCat("| ", line));
  }
  for (const Rank* rank : also_failed_) {
    say(absl::StrCat("failed at the same time: ", describe(*rank), ": ",
                     end_of(rank->wait_status)));
  }
  std::vector<std::string> words;
  for (const std::string& word : setup_.options.program) words.push_back(shell_quote(word));
  say(absl::StrCat("command: ", absl::StrJoin(words, " ")));
  if (!setup_.options.log_dir.empty()) {
    say(absl::StrCat("logs: ", setup_.options.log_dir, "/", first_->plan.name, ".out and .err"));
  }
}

}  // namespace weft::launch
