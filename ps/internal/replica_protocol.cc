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
  const uint64_t limit = closed ? std::min(confirmed_, last_) : last_;
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
  if (role_ != Role::kBackup || want_.has_value()) return;
  RangeMap expected = map_;
  expected.ready = bug_ != ReplicaBug::kTakesOverJoining;
  RangeMap desired{map_.epoch + 1, self_, {}, false};
  out->push_back(WriteMap{std::move(expected), desired});
  want_ = std::move(desired);
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
    const bool next = now.epoch != map_.epoch;
    map_ = now;
    if (!next) return;
    confirmed_ = 0;
    lost_ = false;
    gate_ = false;
    if (!map_.backup.empty()) out->push_back(SendImage{});
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
  if (want_.has_value() && then == *want_) return;
  if (role_ == Role::kOwner && then.owner == self_) return;
  learn(then, out);
}

}  // namespace weft::ps::internal
