#include "weft/rref/internal/protocol.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::internal {

RRefProtocol::Peer& RRefProtocol::peer(const WorkerKey& key) {
  auto [it, is_new] = peers_.try_emplace(key.incarnation);
  if (is_new) it->second.key = key;
  return it->second;
}

RRefProtocol::Peer* RRefProtocol::find_peer(const WorkerKey& key) {
  auto it = peers_.find(key.incarnation);
  return it == peers_.end() ? nullptr : &it->second;
}

Floors RRefProtocol::floors(const Peer& p) const {
  const uint64_t carriers = p.carriers.empty() ? p.next_carrier : p.carriers.begin()->first;
  return Floors{p.outbox_floor, carriers};
}

void RRefProtocol::note_floors(Peer& p, const Floors& theirs) {
  if (theirs.control > p.theirs.control) {
    p.theirs.control = theirs.control;
    p.tombstones.erase(p.tombstones.begin(), p.tombstones.lower_bound(theirs.control));
  }
  if (theirs.carriers > p.theirs.carriers) {
    p.theirs.carriers = theirs.carriers;
    p.void_carriers.erase(p.void_carriers.begin(), p.void_carriers.lower_bound(theirs.carriers));
  }
}

uint64_t RRefProtocol::number(Peer& p, MessageKind kind, const RRefId& rref, const ForkId& fork,
                              uint64_t about) {
  p.outbox.push_back(Slot{kind, /*settled=*/false, rref, fork, about});
  return p.outbox_floor + p.outbox.size() - 1;
}

void RRefProtocol::settle(Peer& p, uint64_t seq) {
  if (seq < p.outbox_floor || seq >= p.outbox_floor + p.outbox.size()) return;
  p.outbox[seq - p.outbox_floor].settled = true;
  while (!p.outbox.empty() && p.outbox.front().settled) {
    p.outbox.pop_front();
    ++p.outbox_floor;
  }
}

uint64_t RRefProtocol::send(const WorkerKey& to, Message message, uint64_t about, Effects& out) {
  if (is_gone(to)) return 0;
  Peer& p = peer(to);
  message.seq = number(p, message.kind, message.rref, message.fork, about);
  message.floors = floors(p);
  const uint64_t seq = message.seq;
  out.push_back(SendMessage{to, std::move(message)});
  return seq;
}

Reply RRefProtocol::deliver(const WorkerKey& from, const Message& message, Effects& out) {
  if (is_gone(from)) {
    return Reply{make_error(ErrorKind::kPeerLost,
                            absl::StrCat(name(message.kind), " of ", to_string(message.rref),
                                         " from ", to_string(from), ", which is gone")),
                 {}};
  }
  Peer& p = peer(from);
  note_floors(p, message.floors);
  // Its sender has had the answer to another copy.
  if (message.seq < p.theirs.control) return Reply();
  switch (message.kind) {
    case MessageKind::kCreate: break;
    case MessageKind::kKnown: handle_known(p, message, out); return Reply();
    case MessageKind::kAbandon: return Reply{handle_abandon(p, message, out), {}};
    case MessageKind::kFork: return Reply{handle_fork(p, message), {}};
    case MessageKind::kDelete: return Reply{handle_delete(p, message, out), {}};
    case MessageKind::kAccept: handle_accept(p, message, out); return Reply();
    case MessageKind::kAudit: return handle_audit(p, message);
  }
  ++faults_;
  return Reply{make_error(ErrorKind::kProtocol,
                          absl::StrCat("a control item of kind ", static_cast<int>(message.kind),
                                       " from ", to_string(from))),
               {}};
}

void RRefProtocol::acknowledged(const WorkerKey& from, uint64_t seq, const Reply& reply,
                                Effects& out) {
  Peer* p = find_peer(from);
  if (p == nullptr || seq < p->outbox_floor || seq >= p->outbox_floor + p->outbox.size()) return;
  const Slot slot = p->outbox[seq - p->outbox_floor];
  // A creation is settled by the end of its call, never by an acknowledgement.
  if (slot.settled || slot.kind == MessageKind::kCreate) return;
  settle(*p, seq);
  switch (slot.kind) {
    case MessageKind::kFork: fork_answered(slot.fork, reply.status, out); return;
    case MessageKind::kAudit: audit_answered(*p, slot.about, reply, out); return;
    case MessageKind::kAbandon: settle(*p, slot.about); break;
    default: break;
  }
  if (!reply.status.ok()) ++faults_;
}

void RRefProtocol::worker_gone(const WorkerKey& worker, Effects& out, std::string_view why) {
  if (worker == self_ || !gone_.add(worker.incarnation, why)) return;
  objects_lose(worker, out);
  users_lose(worker, out);
  if (Peer* p = find_peer(worker)) {
    // Parents of what it had not confirmed may go.
    for (auto& [number, sent] : p->carriers) {
      for (Made& made : sent.forks) not_arrived(sent, made, out);
    }
    peers_.erase(worker.incarnation);
  }
  // The peer is gone, so these need no `accept` any more. Those still pending complete as usual.
  for (auto it = arrivals_.lower_bound({worker, 0});
       it != arrivals_.end() && it->first.first == worker;) {
    it = it->second.pending == 0 ? arrivals_.erase(it) : std::next(it);
  }
}

void RRefProtocol::audit_answers(const WorkerKey& key, uint64_t below, Effects& out) {
  Peer* p = find_peer(key);
  if (p == nullptr) return;
  for (auto& [number, sent] : p->carriers) {
    if (number >= below) break;
    if (sent.is_answer && !sent.audited) audit(*p, number, sent, out);
  }
}

uint64_t RRefProtocol::next_carrier(const WorkerKey& key) const {
  auto it = peers_.find(key.incarnation);
  return it == peers_.end() ? 1 : it->second.next_carrier;
}

std::vector<std::pair<RRefId, WorkerKey>> RRefProtocol::holders() const {
  std::vector<std::pair<RRefId, WorkerKey>> out;
  for (const auto& [fork, f] : forks_) out.emplace_back(f.rref, f.holder);
  std::sort(out.begin(), out.end());
  return out;
}

RRefProtocol::Counts RRefProtocol::counts() const {
  Counts c;
  c.owners = objects_.size();
  c.forks = forks_.size();
  c.users = users_.size();
  c.arrivals = arrivals_.size();
  for (const auto& [fork, user] : users_) c.pending_users += user.state == UserState::kPending;
  for (const auto& [rref, object] : objects_) c.parked_uses += object.parked.size();
  for (const auto& [incarnation, p] : peers_) {
    for (const Slot& slot : p.outbox) c.unacknowledged += !slot.settled;
    c.tombstones += p.tombstones.size() + p.void_carriers.size();
    for (const auto& [number, sent] : p.carriers) c.pending_children += sent.open;
  }
  return c;
}

}  // namespace weft::internal
