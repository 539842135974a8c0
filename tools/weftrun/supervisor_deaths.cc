// Failures that the job outlives: a process that is started again, or that the job goes on without.

#include <poll.h>
#include <sys/wait.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "weft/tools/weftrun/supervisor.h"

namespace weft::launch {

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

// What is in the pipe now; a process that the rank has left behind may write on, to no reader.
void Supervisor::close_stream(Stream& stream) {
  constexpr int kMostReads = 32;  // of 64 KiB each: more than a pipe holds
  for (int i = 0; i < kMostReads && stream.fd.valid(); ++i) {
    pollfd probe = {.fd = stream.fd.get(), .events = POLLIN, .revents = 0};
    if (poll(&probe, 1, 0) <= 0) break;
    read_stream(stream);
  }
  if (!stream.fd.valid()) return;
  stream.splitter->finish();
  stream.fd.reset();
}

// On one node: when every process has failed, no part of the job went on.
const Supervisor::Rank* Supervisor::last_resort() const {
  if (setup_.options.nnodes > 1 || first_ != nullptr || remote_ || user_signal_ != 0) return first_;
  const bool one_ended_well = std::any_of(ranks_.begin(), ranks_.end(),
                                          [](const auto& rank) { return rank->wait_status == 0; });
  return one_ended_well ? nullptr : first_forgiven_;
}

}  // namespace weft::launch
