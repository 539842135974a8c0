// A Part that goes to another server: its server drains, or it is moved, or it is asked by the other copy's
// server which drains.
//
// MOVE-1: all the while two copies have what is acknowledged. The backup is replaced by the server that the part goes
// to, which gets an image and then the log while the backup before it stays that (replace_backup()); then the owner
// hands over to it, and is its backup (hand_over()).
// MOVE-2: whatever dies or leaves meanwhile, the part is as if there had been no move.
// MOVE-3: a part of one copy has a second one from when the server that it goes to has its image until it has become
// the owner there; then the one that it left is dropped.

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/ps/internal/part.h"

namespace weft::ps::internal {
namespace {

constexpr absl::Duration kWishTime = absl::Seconds(1);
constexpr absl::Duration kMoveStep = absl::Milliseconds(20);
// A backup that drains asks all the time; after so long without a question it is another drain.
constexpr absl::Duration kAnotherDrain = absl::Seconds(5);

}  // namespace

// Its answer is the map that the other copy knows.
void Part::ask_other_copy(CopyWish kind) {
  const auto host = host_.lock();
  if (asking_owner_ || host == nullptr) return;
  const RangeMap& map = replica_->map();
  CopyRequest wish{identity_.table, identity_.index, map};
  wish.wish = kind;
  if (replica_->joins()) wish.next = identity_.self;
  asking_owner_ = true;
  host->send_copy(
      owns() ? map.backup : map.owner, std::move(wish), {}, kWishTime,
      [weak = weak_from_this(), kind, heard = heard_times_](StatusOr<CopyAnswer> answer) {
        const auto self = weak.lock();
        if (self == nullptr) return;
        self->take_turn([part = self.get(), kind, heard, answer] {
          part->asking_owner_ = false;
          if (!part->closed_.ok() || !answer.ok()) return;  // it is asked again
          ReplicaEffects effects;
          const RangeMap& map = part->replica_->map();
          if (kind == CopyWish::kTakeOver && answer->map.epoch == map.epoch) {
            if (answer->refused) {
              part->end_move(map.backup, make_error(ErrorKind::kState, "it drains"));
            } else {
              part->replica_->hand_over(&effects);
            }
          }
          part->replica_->read(answer->map, &effects);
          part->note_given_up(heard, *answer, &effects);
          part->perform(effects);
          part->publish();
        });
      });
}

// The owner has answered one that joins. Unless that has got something from it meanwhile.
void Part::note_given_up(uint64_t heard, const CopyAnswer& answer, ReplicaEffects* effects) {
  if (!answer.refused || answer.map.epoch != replica_->map().epoch || heard_times_ != heard) return;
  replica_->given_up(effects);
}

void Part::drain() {
  take_turn([this] {
    if (!replica_.has_value() || !closed_.ok()) return;
    if (owns() && !wants_backup()) return go_elsewhere();
    // An owner without a backup that may take over gets one by its ticks.
    if (owns() && (!replica_->map().ready || replica_->writing() || replica_->handing())) return;
    ask_other_copy(owns() ? CopyWish::kTakeOver : CopyWish::kLetGo);
  });
}

void Part::go_elsewhere() {
  const auto host = host_.lock();
  const bool moves = move_.has_value() && move_->failed.ok();
  if (host == nullptr || moves || replica_->writing() || replica_->handing()) return;
  if (!replica_->map().backup.empty()) return;  // what is left of a move that has failed goes first
  const std::vector<CopyPlace> others = host->others(identity_);
  if (others.empty()) return;
  move_ = Move{others[offers_++ % others.size()]};
  publish();
}

void Part::drop_second_copy() {
  const bool moves = move_.has_value() && move_->failed.ok();
  if (moves || replica_->writing() || replica_->handing()) return;
  ReplicaEffects effects;
  replica_->lost_backup(replica_->map().epoch, &effects);
  perform(effects);
  publish();
}

CopyAnswer Part::grant(const CopyRequest& wish) {
  const auto host = host_.lock();
  const RangeMap& map = replica_->map();
  if (wish.map.epoch != map.epoch || host == nullptr) return said(true);
  if (wish.wish == CopyWish::kTakeOver) return said(owns() || host->drains());
  if (!owns() || wish.map.backup != map.backup) return said(true);
  if (!wish.next.empty()) {  // the one that was to be the backup drains
    if (replica_->next() != wish.next) return said(true);
    if (replica_->writing()) return said(false);  // it is the backup in a moment, and asks as that
    end_move(wish.next, make_error(ErrorKind::kState, "it drains"));
    ReplicaEffects effects;
    replica_->lost_next(map.epoch, &effects);
    perform(effects);
  } else {
    let_backup_go();
  }
  publish();
  return said(false);
}

// Another server takes its place first, if one does.
void Part::let_backup_go() {
  const CopyPlace backup = replica_->map().backup;
  if (replica_->writing() || replica_->handing() || replica_->streams_to_next()) return;
  const auto host = host_.lock();
  if (host == nullptr) return;
  unwilling_ = backup;
  if (!wants_backup()) return drop_second_copy();
  const absl::Time now = runtime_->now();
  if (let_go_.backup != backup || now - let_go_.asked > kAnotherDrain) let_go_ = {backup};
  let_go_.asked = now;
  end_move(backup, make_error(ErrorKind::kState, "it drains"));
  if (move_.has_value() && move_->failed.ok()) return;  // it ends first
  if (!let_go_.knows) {
    if (!std::exchange(let_go_.looks, true)) host->look_for_others(shared_from_this());
    return;
  }
  std::vector<CopyPlace> others = host->others(identity_);
  std::erase(others, backup);
  if (replica_->map().ready && let_go_.candidates < others.size()) {
    move_ = Move{others[(offers_ + let_go_.candidates++) % others.size()]};
    move_->keeps_owner = true;
    return;
  }
  // It costs what a wrong suspicion costs (PSR-14): a copy for as long as the next image takes.
  let_go_ = {};
  ReplicaEffects effects;
  replica_->lost_backup(replica_->map().epoch, &effects);
  perform(effects);
}

void Part::others_known() {
  take_turn([this] {
    let_go_.looks = false;
    let_go_.knows = true;  // asked again by the one that drains
  });
}

// ---- moves -------------------------------------------------------------------------------------

void Part::move(const CopyPlace& to, uint64_t number, MoveReply reply) {
  take_turn([this, to, number, reply = std::move(reply)] {
    if (!replica_.has_value()) {
      return reply(
          make_error(ErrorKind::kState, absl::StrCat(label(), " has one copy and is not movable")));
    }
    if (!owns() || !closed_.ok() || to == identity_.self) return reply(said(!owns()));
    const bool same = move_.has_value() && move_->number == number;
    if (same && !move_->failed.ok()) return reply(move_->failed);
    if (move_.has_value() && move_->failed.ok() && move_->to != to) {
      return reply(make_error(ErrorKind::kUnavailable,
                              absl::StrCat(label(), " moves to '", move_->to.name, "' already")));
    }
    if (!same && !(move_.has_value() && move_->failed.ok())) move_ = Move{to, number};
    publish();
    reply(said(!owns()));
  });
}

// In a turn: the next step, if the one before is done.
void Part::go_on_moving() {
  if (!move_.has_value() || !move_->failed.ok() || !closed_.ok()) return;
  if (!owns()) return move_.reset();
  if (replica_->writing() || replica_->handing() || move_->waits) return;
  const RangeMap& map = replica_->map();
  ReplicaEffects effects;
  if (map.backup.empty()) {
    replica_->offer(move_->to, &effects);
  } else if (map.backup == move_->to) {
    if (!map.ready) return;
    if (move_->keeps_owner) {
      let_go_ = {};
      return move_.reset();
    }
    ask_other_copy(CopyWish::kTakeOver);
    return look_later();
  } else if (!map.ready) {
    replica_->lost_backup(map.epoch, &effects);
  } else if (replica_->next().empty()) {
    replica_->replace_backup(move_->to, &effects);
  } else if (replica_->next() != move_->to) {
    replica_->lost_next(map.epoch, &effects);
  }
  perform(effects);
}

// It has handed over.
void Part::follow_successor() {
  runtime_->trace("ps.handed_over", identity_.id, replica_->last());
  data_->follow(true);
  move_.reset();
  gone_later_.clear();  // the successor hears of them itself
  heard_ = runtime_->now();
  for (auto& [token, waiting] : std::exchange(waiting_, {})) {
    protocol_.cancel_pull(token);
    waiting.reply(moved());
  }
  let_go();
  end_cut(make_error(ErrorKind::kUnavailable, absl::StrCat(label(), ": it moves")));
  tell_successor();
}

// Until it serves, or another map is known. It may learn of it in other ways, from the store or from a client.
void Part::tell_successor() {
  const auto host = host_.lock();
  if (host == nullptr || owns() || !closed_.ok()) return;
  const uint64_t epoch = replica_->map().epoch;
  host->send_copy(replica_->map().owner,
                  CopyRequest{identity_.table, identity_.index, replica_->map()}, {}, kWishTime,
                  [weak = weak_from_this(), epoch](const StatusOr<CopyAnswer>& answer) {
                    const auto self = weak.lock();
                    if (self == nullptr || (answer.ok() && answer->owns)) return;
                    self->take_turn([part = self.get(), epoch] { part->tell_again(epoch); });
                  });
}

void Part::tell_again(uint64_t epoch) {
  const auto host = host_.lock();
  if (host == nullptr) return;
  host->later(runtime_->now() + kMoveStep, [weak = weak_from_this(), epoch] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->take_turn([part = self.get(), epoch] {
      if (part->replica_->map().epoch == epoch) part->tell_successor();
    });
  });
}

void Part::ask_whether_joins() {
  const auto host = host_.lock();
  if (host == nullptr) return;
  CopyRequest question{identity_.table, identity_.index, replica_->map()};
  question.next = identity_.self;
  host->send_copy(replica_->map().owner, std::move(question), {}, kWishTime,
                  [weak = weak_from_this(), heard = heard_times_](StatusOr<CopyAnswer> answer) {
                    const auto self = weak.lock();
                    if (self == nullptr || !answer.ok()) return;
                    self->take_turn([part = self.get(), heard, answer] {
                      if (!part->closed_.ok()) return;
                      ReplicaEffects effects;
                      part->replica_->read(answer->map, &effects);
                      part->note_given_up(heard, *answer, &effects);
                      part->perform(effects);
                      part->publish();
                    });
                  });
}

void Part::look_later() {
  const auto host = host_.lock();
  if (host == nullptr) return;
  move_->waits = true;
  host->later(runtime_->now() + kMoveStep, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->take_turn([part = self.get()] {
      if (part->move_.has_value()) part->move_->waits = false;
      part->publish();
    });
  });
}

// If the part is going to that server, which will not have it, or is not there any more.
void Part::end_move(const CopyPlace& to, const Status& why) {
  if (!move_.has_value() || !move_->failed.ok() || move_->to != to) return;
  move_->failed = annotate(why, absl::StrCat(label(), " stays: move to '", move_->to.name, "'"));
}

}  // namespace weft::ps::internal
