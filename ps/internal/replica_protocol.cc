#include "weft/ps/internal/replica_protocol.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::ps::internal {

std::string to_string(const RangeMap& map) {
  if (map.epoch == 0) return "no map";
  std::string text = absl::StrCat("epoch ", map.epoch, ": '", map.owner.name, "'");
  if (!map.backup.empty()) {
    absl::StrAppend(&text, ", backup '", map.backup.name, map.ready ? "'" : "' that joins");
  }
  return text;
}

ReplicaProtocol::ReplicaProtocol(Role role, CopyPlace self, RangeMap map, uint64_t position,
                                 ReplicaBug bug)
    : role_(role),
      self_(std::move(self)),
      map_(std::move(map)),
      bug_(bug),
      last_(position),
      released_(position) {}

ReplicaProtocol ReplicaProtocol::owner(CopyPlace self, RangeMap map, ReplicaBug bug) {
  return ReplicaProtocol(Role::kOwner, std::move(self), std::move(map), 0, bug);
}
ReplicaProtocol ReplicaProtocol::backup(CopyPlace self, RangeMap map, uint64_t position,
                                        ReplicaBug bug) {
  return ReplicaProtocol(Role::kBackup, std::move(self), std::move(map), position, bug);
}

std::string ReplicaProtocol::state_text() const {
  return absl::StrCat(last_, gate_ ? " closed" : " open", lost_ ? " lost" : "",
                      handing_ ? " hands over" : "", next_.name, next_confirmed_,
                      next_gate_ ? " closed" : "", next_lost_ ? " lost" : "",
                      want_.has_value() ? absl::StrCat(" wants ", to_string(*want_)) : "");
}

// ---- owner -------------------------------------------------------------------------------------

uint64_t ReplicaProtocol::append(bool reads_only, ReplicaEffects* out) {
  if (!(reads_only && bug_ == ReplicaBug::kReadWithoutLog)) ++last_;
  settle(out);
  return last_;
}

void ReplicaProtocol::settle(ReplicaEffects* out) {
  if (role_ != Role::kOwner) return;
  const bool closed = gate_ && bug_ != ReplicaBug::kReleaseEarly;
  uint64_t limit = closed ? std::min(confirmed_, last_) : last_;
  if (next_gate_ && bug_ != ReplicaBug::kNextNotWaitedFor) limit = std::min(limit, next_confirmed_);
  if (limit <= released_) return;
  released_ = limit;
  out->push_back(Release{limit});
}

void ReplicaProtocol::write(RangeMap desired, ReplicaEffects* out) {
  out->push_back(WriteMap{map_, desired});
  want_ = std::move(desired);
}

void ReplicaProtocol::write_alone(ReplicaEffects* out) {
  // PSR-10: only a backup that is not ready, and of which that was not asked, is left without asking.
  if (!map_.ready || bug_ == ReplicaBug::kOpenWhileLeaving) gate_ = false;
  forget_next();
  handing_ = false;
  write(RangeMap{map_.epoch + 1, self_, {}, false}, out);
  settle(out);
}

void ReplicaProtocol::offer(const CopyPlace& candidate, ReplicaEffects* out) {
  if (role_ != Role::kOwner || !map_.backup.empty() || want_.has_value()) return;
  if (candidate.empty() || candidate == self_) return;
  write(RangeMap{map_.epoch + 1, self_, candidate, false}, out);
}

void ReplicaProtocol::confirm(uint64_t epoch, uint64_t position, ReplicaEffects* out) {
  if (!streams()) return;
  if (epoch != map_.epoch && bug_ != ReplicaBug::kConfirmsOldEpoch) return;
  confirmed_ = std::max(confirmed_, std::min(position, last_));
  if (bug_ != ReplicaBug::kGateAtReady || map_.ready) gate_ = true;
  const bool has_all = confirmed_ >= released_ || bug_ == ReplicaBug::kReadyTooEarly;
  if (!map_.ready && !want_.has_value() && has_all) {
    RangeMap ready = map_;
    ready.ready = true;
    write(std::move(ready), out);
  }
  write_handed(out);
  settle(out);
}

void ReplicaProtocol::lost_backup(uint64_t epoch, ReplicaEffects* out) {
  if (!streams() || epoch != map_.epoch) return;
  lost_ = true;
  if (want_.has_value()) {  // it may become ready yet: wrote() goes on
    if (bug_ == ReplicaBug::kGateForgotten) gate_ = false;
    return settle(out);
  }
  write_alone(out);
}

void ReplicaProtocol::forget_next() {
  next_ = {};
  next_confirmed_ = 0;
  next_gate_ = false;
  next_lost_ = false;
}

void ReplicaProtocol::replace_backup(const CopyPlace& candidate, ReplicaEffects* out) {
  if (role_ != Role::kOwner || !map_.ready || want_.has_value() || lost_ || handing_) return;
  if (!next_.empty() || candidate.empty() || candidate == self_ || candidate == map_.backup) return;
  next_ = candidate;
  out->push_back(SendImageToNext{});
}

void ReplicaProtocol::confirm_next(uint64_t epoch, uint64_t position, ReplicaEffects* out) {
  if (!streams_to_next() || epoch != map_.epoch) return;
  next_confirmed_ = std::max(next_confirmed_, std::min(position, last_));
  next_gate_ = true;
  write_next(out);
  settle(out);
}

void ReplicaProtocol::write_next(ReplicaEffects* out) {
  if (want_.has_value() || lost_) return;
  if (next_confirmed_ < released_) return;
  write(RangeMap{map_.epoch + 1, self_, next_, true}, out);
}

void ReplicaProtocol::lost_next(uint64_t epoch, ReplicaEffects* out) {
  if (!streams_to_next() || epoch != map_.epoch) return;
  if (want_.has_value()) {  // it may be the backup by now: wrote() goes on
    next_lost_ = true;
  } else {
    forget_next();
  }
  settle(out);
}

void ReplicaProtocol::hand_over(ReplicaEffects* out) {
  if (role_ != Role::kOwner || !map_.ready || want_.has_value() || lost_ || !next_.empty()) return;
  handing_ = true;
  write_handed(out);
}

void ReplicaProtocol::write_handed(ReplicaEffects* out) {
  if (!handing_ || want_.has_value()) return;
  if (confirmed_ < last_ && bug_ != ReplicaBug::kHandsOverEarly) return;
  write(RangeMap{map_.epoch + 1, map_.backup, self_, true}, out);
}

// ---- backup ------------------------------------------------------------------------------------

ReplicaProtocol::Accepted ReplicaProtocol::entries(uint64_t epoch, uint64_t first, uint64_t count) {
  const bool old = epoch != map_.epoch || role_ != Role::kBackup || want_.has_value();
  if (old && bug_ != ReplicaBug::kOldEpoch) return {true};
  const bool gap = first > last_ + 1;
  if (gap && bug_ != ReplicaBug::kTakesGaps) return {true};
  uint64_t skip = gap ? 0 : std::min(count, last_ + 1 - first);
  if (bug_ == ReplicaBug::kRepeats) skip = 0;
  last_ = std::max(last_, first + count - 1);
  if (role_ == Role::kBackup) released_ = last_;
  return {false, skip, count - skip};
}

void ReplicaProtocol::suspect_owner(ReplicaEffects* out) {
  if (role_ != Role::kBackup || want_.has_value() || joins()) return;
  RangeMap expected = map_;
  expected.ready = bug_ != ReplicaBug::kTakesOverJoining;
  RangeMap desired{map_.epoch + 1, self_, {}, false};
  out->push_back(WriteMap{std::move(expected), desired});
  want_ = std::move(desired);
}

// A map that one that joins has waited for. Its owner alone writes that, and goes on with the same log.
bool ReplicaProtocol::is_promotion(const RangeMap& now) const {
  return joins() && now.epoch == map_.epoch + 1 && now.owner == map_.owner && now.backup == self_ &&
         now.ready;
}

void ReplicaProtocol::adopt(const RangeMap& of_owner) {
  if (is_promotion(of_owner)) map_ = of_owner;
}

void ReplicaProtocol::given_up(ReplicaEffects* out) {
  if (!joins()) return;
  role_ = Role::kGone;
  out->push_back(Discard{});
}

// ---- the store ---------------------------------------------------------------------------------

void ReplicaProtocol::learn(const RangeMap& now, ReplicaEffects* out) {
  if (role_ == Role::kOwner) {
    if (now.owner != self_) {
      if (bug_ == ReplicaBug::kOwnerStays) {
        gate_ = false;
        return settle(out);
      }
      role_ = Role::kGone;
      map_ = now;
      want_.reset();
      out->push_back(Retire{});
      return;
    }
    const bool later = now.epoch != map_.epoch;
    map_ = now;
    if (!later) return;
    const bool promoted = !next_.empty() && map_.ready && map_.backup == next_;
    confirmed_ = promoted ? next_confirmed_ : 0;
    lost_ = promoted && next_lost_;
    gate_ = promoted;
    forget_next();
    if (promoted) {
      out->push_back(NextIsBackup{});
    } else if (!map_.backup.empty()) {
      out->push_back(SendImage{});
    }
    return;
  }
  if (is_promotion(now)) {
    map_ = now;
    return;
  }
  // The owner before has seen that this copy has all.
  if (now.owner == self_ && now.epoch == map_.epoch + 1 && now.backup == map_.owner && now.ready) {
    role_ = Role::kOwner;
    map_ = now;
    want_.reset();
    confirmed_ = last_;
    released_ = last_;
    gate_ = true;
    out->push_back(Serve{});
    return;
  }
  role_ = Role::kGone;
  map_ = now;
  want_.reset();
  out->push_back(Discard{});
}

void ReplicaProtocol::wrote(const RangeMap& now, ReplicaEffects* out) {
  if (role_ == Role::kGone || !want_.has_value()) return;
  const RangeMap wanted = *std::exchange(want_, std::nullopt);
  if (role_ == Role::kBackup) {
    if (now == wanted) {
      role_ = Role::kOwner;
      map_ = now;
      out->push_back(Serve{});
    } else if (now.epoch != map_.epoch) {
      learn(now, out);
    }
    return;
  }
  if (now == wanted && now.owner != self_) {  // handed over
    role_ = Role::kBackup;
    map_ = now;
    handing_ = false;
    gate_ = false;
    released_ = last_;
    confirmed_ = 0;
    out->push_back(Follow{});
    if (std::exchange(lost_, false)) suspect_owner(out);
    return;
  }
  learn(now, out);
  if (role_ != Role::kOwner) return;
  if (lost_ && !map_.backup.empty()) return write_alone(out);
  if (streams() && !map_.ready && gate_ && confirmed_ >= released_) {
    RangeMap ready = map_;
    ready.ready = true;
    write(std::move(ready), out);
  }
  settle(out);
}

void ReplicaProtocol::read(const RangeMap& then, ReplicaEffects* out) {
  // A write that is under way tells more, and what is older than what is known tells nothing.
  if (role_ == Role::kGone || then.epoch <= map_.epoch) return;
  if (want_.has_value() && (then == *want_ || role_ == Role::kBackup)) return;
  if (role_ == Role::kOwner && then.owner == self_) return;
  learn(then, out);
}

}  // namespace weft::ps::internal
