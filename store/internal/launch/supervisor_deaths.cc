// The end of processes: what it means for the job, those that the job outlives, and what they leave
// behind.

#include <poll.h>
#include <sys/wait.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/store/internal/launch/supervisor.h"

namespace weft::launch {

void Supervisor::reap() {
  const std::vector<Rank*> dead = setup_.signals != nullptr ? reap_children() : reap_ranks();
  if (!dead.empty()) on_deaths(dead);
}

// In a launcher every child is a rank, or was left behind by one.
std::vector<Supervisor::Rank*> Supervisor::reap_children() {
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
  return dead;
}

// For a program that may have other children.
std::vector<Supervisor::Rank*> Supervisor::reap_ranks() {
  std::vector<Rank*> dead;
  for (const auto& rank : ranks_) {
    if (!rank->running) continue;
    siginfo_t info = {};
    const auto id = static_cast<id_t>(rank->pid);
    const int looked = waitid(P_PID, id, &info, WEXITED | WNOHANG | WNOWAIT);
    if (looked == 0 && info.si_pid == 0) continue;
    if (looked == 0) kill(-rank->pid, SIGTERM);
    int status = 0;
    rank->status_lost = wait_for(rank->pid, &status) != rank->pid;
    rank->running = false;
    rank->wait_status = status;
    rank->pidfd.reset();
    dead.push_back(rank.get());
  }
  return dead;
}

bool Supervisor::has_failed(const Rank& rank) const {
  return rank.wait_status != 0 || (setup_.done && !setup_.done(rank.plan));
}

void Supervisor::on_deaths(const std::vector<Rank*>& dead) {
  std::vector<Rank*> failed;
  for (Rank* rank : dead) {
    if (has_failed(*rank)) failed.push_back(rank);
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

void Supervisor::forgive(std::vector<Rank*>* failed) {
  // A stop is under way: it ends all of them.
  if (phase_ != Phase::kRunning || user_signal_ != 0 || remote_) return;
  std::erase_if(*failed, [this](Rank* rank) {
    const DeathPolicy::Verdict verdict = policy_.on_failure(rank->plan.role);
    if (verdict.action == DeathPolicy::Action::kEndJob) return false;
    const bool again = verdict.action == DeathPolicy::Action::kRestart;
    say(absl::StrFormat(
        "%s: %s after %.1f s; %s (%s %s:%d, %d left)", describe(*rank), end_of(rank->wait_status),
        absl::ToDoubleSeconds(monotonic_now() - started_),
        again ? "it starts again" : "the job goes on without it", again ? "--restart" : "--may-die",
        rank->plan.role, verdict.given, verdict.left));
    if (!again) {
      if (first_forgiven_ == nullptr) first_forgiven_ = rank;
      return true;
    }
    for (Stream* stream : {&rank->out, &rank->err}) close_stream(*stream);
    ++rank->restarts;
    const absl::Status started = start_rank(*rank);
    if (!started.ok())
      say(absl::StrCat("cannot start ", rank->plan.name, " again: ", started.message()));
    return started.ok();  // otherwise its failure ends the job
  });
}

// On one node: when every process has failed, no part of the job went on.
const Supervisor::Rank* Supervisor::last_resort() const {
  if (setup_.options.nnodes > 1 || first_ != nullptr || remote_ || user_signal_ != 0) return first_;
  const bool one_ended_well = std::any_of(ranks_.begin(), ranks_.end(),
                                          [](const auto& rank) { return rank->wait_status == 0; });
  return one_ended_well ? nullptr : first_forgiven_;
}

ProcessEnd Supervisor::end_of_rank(const Rank& rank) {
  return {.plan = rank.plan,
          .pid = rank.pid,
          .wait_status = rank.wait_status,
          .status_lost = rank.status_lost,
          .last_lines = rank.last.lines()};
}

std::optional<ProcessEnd> Supervisor::first_failure() const {
  if (first_ == nullptr) return std::nullopt;
  return end_of_rank(*first_);
}

std::vector<ProcessEnd> Supervisor::ends() const {
  std::vector<ProcessEnd> all;
  for (const auto& rank : ranks_) all.push_back(end_of_rank(*rank));
  return all;
}

std::vector<ProcessEnd> Supervisor::also_failed() const {
  std::vector<ProcessEnd> ends;
  for (const Rank* rank : also_failed_) ends.push_back(end_of_rank(*rank));
  return ends;
}

void Supervisor::kill_all() {
  phase_ = Phase::kKilling;
  deadline_.reset();
  signal_ranks(SIGKILL);
  for (int pid : tagged_processes(setup_.tag)) kill(pid, SIGKILL);
}

bool Supervisor::sweep() {
  std::vector<int> left = tagged_processes(setup_.tag);
  if (left.empty() && setup_.signals == nullptr) {
    // The program's own children cannot be told from one of these that is in execve() and has no
    // environment at this moment: a second look finds that.
    left = tagged_processes(setup_.tag);
    if (left.empty()) return false;
  }
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

}  // namespace weft::launch
