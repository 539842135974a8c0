// A Part whose server drains, or that is asked by the other copy's server which does.

#include <utility>

#include "weft/ps/internal/part.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kWishTime = absl::Seconds(1);

}  // namespace

void Part::drain() {
  take_turn([this] {
    const auto host = host_.lock();
    if (!replica_.has_value() || !closed_.ok() || host == nullptr || asking_owner_) return;
    const RangeMap& map = replica_->map();
    // An owner without a backup that may take over gets one by its ticks.
    if (owns() && (!map.ready || replica_->writing())) return;
    CopyRequest wish{identity_.table, identity_.index, map};
    wish.wish = owns() ? CopyWish::kTakeOver : CopyWish::kLetGo;
    asking_owner_ = true;
    host->send_copy(owns() ? map.backup : map.owner, std::move(wish), {}, kWishTime,
                    [weak = weak_from_this()](StatusOr<CopyAnswer> answer) {
                      const auto self = weak.lock();
                      if (self == nullptr) return;
                      self->take_turn([part = self.get(), answer] {
                        part->asking_owner_ = false;
                        if (!part->closed_.ok() || !answer.ok()) return;  // it is asked again
                        ReplicaEffects effects;
                        part->replica_->read(answer->map, &effects);
                        part->perform(effects);
                        part->publish();
                      });
                    });
  });
}

// It costs what a wrong suspicion costs (PSR-14): a copy for as long as the next image takes.
CopyAnswer Part::grant(const CopyRequest& wish) {
  const auto host = host_.lock();
  const RangeMap& map = replica_->map();
  ReplicaEffects effects;
  if (wish.map.epoch != map.epoch || host == nullptr) return said(true);
  if (wish.wish == CopyWish::kTakeOver) {
    if (owns() || host->drains()) return said(true);
    replica_->suspect_owner(&effects);
  } else {
    if (!owns() || wish.map.backup != map.backup) return said(true);
    unwilling_ = map.backup;
    replica_->lost_backup(map.epoch, &effects);
  }
  perform(effects);
  publish();
  return said(false);
}

}  // namespace weft::ps::internal
