// The agent's send budgets: which calls may be sent now, and which wait for room
// (CallOptions::backpressure).

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/agent.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {
namespace {

// What a call takes besides the bytes of its message: header, frame, its place in queues. So calls
// without arguments are bounded, too.
constexpr uint64_t kCallBytes = 512;
constexpr size_t kMaxWaiting = 4096;
// Until a receiver without room is asked again; doubled each time.
constexpr absl::Duration kFirstPause = absl::Milliseconds(2);
constexpr absl::Duration kLongestPause = absl::Milliseconds(200);

uint64_t room_of(const OutMessage& message) {
  return message.bytes + kCallBytes + (message.maybe_wide() ? message.header_bound() : 0);
}

}  // namespace

Status Agent::charge_worker_locked(const OutMessage& message) {
  if (message.charge.charged()) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(send_room_->take(room_of(message)));
  message.charge = SendCharge(send_room_, room_of(message));
  return absl::OkStatus();
}

Status Agent::take_room_locked(Pending* p, const Peer& peer, bool* worker_full) {
  const OutMessage& message = *p->spec->message;
  WEFT_RETURN_IF_ERROR(peer.send_room->take(room_of(message)));
  const Status worker = charge_worker_locked(message);
  *worker_full = !worker.ok();
  if (!worker.ok()) {
    peer.send_room->undo(room_of(message));
    return worker;
  }
  SendCharge charge(peer.send_room, room_of(message));
  if (message.large(MessageLimits(options_.config))) {
    p->large_charge = std::make_shared<SendCharge>(std::move(charge));
  } else {
    p->small_charge = std::move(charge);
  }
  return absl::OkStatus();
}

Status Agent::claim_room_locked(Pending* p, const Peer& peer, uint64_t call_id) {
  const bool may_wait = p->spec->call.options.backpressure == Backpressure::kWait;
  const uint64_t bytes = room_of(*p->spec->message);
  const bool never =
      bytes > send_room_->budget().limit() || bytes > peer.send_room->budget().limit();
  // Behind calls that wait for the same peer already; a call that never fits fails at once.
  bool must_wait = false;
  if (may_wait && !never) {
    for (const uint64_t id : room_queue_) {
      const auto it = pending_.find(id);
      must_wait =
          must_wait || (it != pending_.end() && it->second.to.incarnation == p->to.incarnation);
    }
  }
  if (!must_wait) {
    bool worker_full = false;
    const Status full = take_room_locked(p, peer, &worker_full);
    if (full.ok()) return full;
    if (never) return annotate(full, "backpressure: it can never fit");
    if (!may_wait) return annotate(full, "backpressure: Backpressure::kWait would wait for room");
  }
  if (room_queue_.size() >= kMaxWaiting) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("backpressure: ", kMaxWaiting, " calls wait for room already"));
  }
  p->state = p->state == CallState::kUnstaged ? CallState::kNoRoomUnstaged : CallState::kNoRoom;
  room_queue_.push_back(call_id);
  bell_->begin_waiting();
  return absl::OkStatus();
}

void Agent::leave_room_queue_locked(uint64_t call_id) {
  room_queue_.erase(std::remove(room_queue_.begin(), room_queue_.end(), call_id),
                    room_queue_.end());
  bell_->end_waiting();
}

void Agent::serve_room_queue() {
  std::vector<uint64_t> go;
  {
    MutexLock lock(&mutex_);
    std::set<uint64_t> full_peers;  // a call behind another one of such a peer stays behind it
    const std::deque<uint64_t> queue = room_queue_;
    for (const uint64_t id : queue) {
      Pending& p = pending_.at(id);
      const auto peer = peers_.find(p.to.incarnation);
      if (full_peers.count(p.to.incarnation) > 0) continue;
      bool worker_full = false;
      // transmit() reports a peer that was forgotten.
      if (peer != peers_.end() && !take_room_locked(&p, *peer->second, &worker_full).ok()) {
        if (worker_full) break;
        full_peers.insert(p.to.incarnation);
        continue;
      }
      leave_room_queue_locked(id);
      p.on(CallEvent::kRoom);
      go.push_back(id);
    }
  }
  for (const uint64_t id : go) transmit(id);
}

bool Agent::ask_again_later(uint64_t call_id, const Status& refused, Delivery delivery) {
  std::shared_ptr<Link> link;
  {
    MutexLock lock(&mutex_);
    const auto it = pending_.find(call_id);
    if (it == pending_.end() || is_here(it->second.state)) return false;
    Pending& p = it->second;
    const CallOptions& options = p.spec->call.options;
    // It keeps its number, so that one which goes at most once runs once also when an earlier
    // attempt of it was taken.
    if (options.backpressure != Backpressure::kWait ||
        (delivery != Delivery::kNotDelivered && options.retry != Retry::kAtMostOnce)) {
      return false;
    }
    link = std::exchange(p.link, nullptr);
    if (link != nullptr) --link->pending;
    p.on(CallEvent::kNoRoomThere);
    p.maybe_taken |= delivery != Delivery::kNotDelivered;
    p.refused = refused;
    const absl::Duration pause =
        std::min(kFirstPause * (1 << std::min(p.refusals, 10)), kLongestPause);
    ++p.refusals;
    const absl::Time when = now() + pause;
    // It may have been sent before, over a connection that came meanwhile.
    if (p.asked_again.has_value()) deadlines_.erase(*p.asked_again);
    p.asked_again = deadlines_.emplace(when, DeadlineKey{false, 0, call_id, true});
    arm_locked(when);
  }
  counters_->retried->add();
  if (link != nullptr) close_if_drained(link);
  return true;
}

StatusOr<std::shared_ptr<SendCharge>> Agent::charge_answer_locked(const OutMessage& message,
                                                                  const Peer* peer) {
  WEFT_RETURN_IF_ERROR(charge_worker_locked(message));
  if (peer == nullptr || !message.large(MessageLimits(options_.config))) return nullptr;
  WEFT_RETURN_IF_ERROR(peer->send_room->take(room_of(message)));
  return std::make_shared<SendCharge>(peer->send_room, room_of(message));
}

Status Agent::charge_kept_locked(OutMessageRef* message, const Peer* peer,
                                 std::shared_ptr<SendCharge>* held) {
  const uint64_t room = room_of(**message);
  WEFT_RETURN_IF_ERROR(send_room_->take(room));
  auto charge = std::make_shared<SendCharge>(send_room_, room);
  if (peer != nullptr && (*message)->large(MessageLimits(options_.config))) {
    WEFT_RETURN_IF_ERROR(peer->send_room->take(room));
    *held = std::make_shared<SendCharge>(peer->send_room, room);
  }
  *message = holding(*message, std::move(charge));
  return absl::OkStatus();
}

}  // namespace weft::internal
