#include "weft/dist_optim/spi/step_log.h"

#include <algorithm>
#include <utility>

namespace weft::internal {
namespace {

using State = StepLog::State;
using Event = StepLog::Event;
using Next = StepLog::Next;

struct Row {
  State from;
  Event event;
  State to;
  Next next;
};

// What is not here does not happen: a step that is known does not begin again (kRefuse), and one
// that is decided stays so and is told on every question (kTell).
constexpr Row kTable[] = {
    {State::kUnknown, Event::kPrepare, State::kPrepared, Next::kGo},
    {State::kUnknown, Event::kBegin, State::kApplying, Next::kGo},
    // It was forgotten, or its beginning is late: OPT-9 for that.
    {State::kUnknown, Event::kApply, State::kNotApplied, Next::kTell},
    {State::kUnknown, Event::kCancel, State::kNotApplied, Next::kTell},
    {State::kPrepared, Event::kApply, State::kApplying, Next::kGo},
    {State::kPrepared, Event::kCancel, State::kNotApplied, Next::kDrop},
    {State::kPrepared, Event::kExpire, State::kNotApplied, Next::kDrop},
    // Its outcome is not known yet, not even to itself.
    {State::kApplying, Event::kApply, State::kApplying, Next::kWait},
    {State::kApplying, Event::kCancel, State::kApplying, Next::kWait},
};

bool decided(State state) {
  return state == State::kApplied || state == State::kPartlyApplied || state == State::kNotApplied;
}

}  // namespace

StepLog::Answer StepLog::on(uint64_t step, Event event) {
  const auto at = steps_.find(step);
  const bool begins = event == Event::kPrepare || event == Event::kBegin;
  if (at == steps_.end() && step <= floor_) {
    Answer old;
    old.next = begins ? Next::kRefuse : Next::kTell;
    old.step.state = State::kNotApplied;
    return old;
  }
  const State from = at == steps_.end() ? State::kUnknown : at->second.state;
  for (const Row& row : kTable) {
    if (row.from != from || row.event != event) continue;
    Step& now = steps_[step];
    Answer answer{row.next, now};
    now.state = row.to;
    if (row.to != State::kPrepared) now.held = nullptr;
    if (row.next == Next::kTell) answer.step = now;
    if (decided(row.to)) trim();
    return answer;
  }
  return Answer{begins ? Next::kRefuse : Next::kTell, at->second};
}

StepLog::Next StepLog::begin(uint64_t step) { return on(step, Event::kBegin).next; }

StepLog::Next StepLog::prepare(uint64_t step, Held held, absl::Time until) {
  const Next next = on(step, Event::kPrepare).next;
  if (next != Next::kGo) return next;
  steps_[step].held = std::move(held);
  steps_[step].until = until;
  return next;
}

StepLog::Answer StepLog::apply(uint64_t step, absl::Time now) {
  const auto at = steps_.find(step);
  if (at != steps_.end() && at->second.state == State::kPrepared && at->second.until <= now) {
    return on(step, Event::kExpire);
  }
  return on(step, Event::kApply);
}

StepLog::Answer StepLog::cancel(uint64_t step) { return on(step, Event::kCancel); }

void StepLog::finish(uint64_t step, State state, const Status& error, int64_t updated,
                     int64_t stale) {
  const auto at = steps_.find(step);
  if (at == steps_.end() || at->second.state != State::kApplying) return;
  at->second.state = state;
  at->second.error = error;
  at->second.updated = updated;
  at->second.stale = stale;
  trim();
}

std::vector<StepLog::Held> StepLog::expire(absl::Time now) {
  std::vector<uint64_t> late;
  for (const auto& [number, step] : steps_) {
    if (step.state == State::kPrepared && step.until <= now) late.push_back(number);
  }
  std::vector<Held> out;
  for (const uint64_t number : late) out.push_back(on(number, Event::kExpire).step.held);
  return out;
}

std::vector<StepLog::Held> StepLog::drop_all() { return expire(absl::InfiniteFuture()); }

absl::Time StepLog::next_expiry() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [number, step] : steps_) {
    if (step.state == State::kPrepared) next = std::min(next, step.until);
  }
  return next;
}

size_t StepLog::prepared() const {
  return static_cast<size_t>(std::count_if(steps_.begin(), steps_.end(), [](const auto& one) {
    return one.second.state == State::kPrepared;
  }));
}

void StepLog::trim() {
  size_t kept = static_cast<size_t>(std::count_if(
      steps_.begin(), steps_.end(), [](const auto& one) { return decided(one.second.state); }));
  for (auto at = steps_.begin(); at != steps_.end() && kept > kKept;) {
    if (!decided(at->second.state)) {
      ++at;
      continue;
    }
    floor_ = std::max(floor_, at->first);
    at = steps_.erase(at);
    --kept;
  }
}

}  // namespace weft::internal
