// User messages with RRefs inside: at their sender, where parents wait, and at their receiver.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/protocol.h"

namespace weft::internal {

// --- The sender ---

StatusOr<Carrier> RRefProtocol::share(const WorkerKey& to, absl::Span<const Handle> handles,
                                      bool is_answer) {
  if (is_gone(to)) {
    return make_error(ErrorKind::kPeerLost,
                      absl::StrCat("RRefs for ", to_string(to), ", which is gone"));
  }
  for (const Handle& handle : handles) WEFT_RETURN_IF_ERROR(check(handle));
  Peer& p = peer(to);
  Carrier carrier;
  carrier.number = p.next_carrier++;
  carrier.is_answer = is_answer;
  Sent& sent = p.carriers[carrier.number];
  sent.is_answer = is_answer;
  sent.audited = false;
  sent.open = handles.size();
  for (const Handle& handle : handles) {
    const ForkId fork{self_, ++last_id_};
    if (handle.fork.is_zero()) {
      add_fork(handle.rref, fork, to, carrier.number);
    } else {
      ++users_.at(handle.fork).children;
    }
    sent.forks.push_back(Made{handle.rref, fork, handle.fork, /*open=*/true});
    carrier.forks.push_back(Handle{handle.rref, fork, handle.owner});
  }
  carrier.floors = floors(p);
  return carrier;
}

void RRefProtocol::release_parent(const Made& made, Effects& out) {
  auto it = users_.find(made.parent);
  if (it == users_.end()) return;
  --it->second.children;
  delete_if_due(made.parent, out);
}

// The receiver has it, or has had it and will say so, or has said so, to the owner.
void RRefProtocol::arrived(Sent& sent, Made& made, Effects& out) {
  if (!sent.close(&made)) return;
  if (!made.parent.is_zero()) {
    release_parent(made, out);
  } else if (auto it = forks_.find(made.fork); it != forks_.end()) {
    it->second.carrier = 0;
  }
}

void RRefProtocol::not_arrived(Sent& sent, Made& made, Effects& out) {
  if (!sent.close(&made)) return;
  if (!made.parent.is_zero()) {
    release_parent(made, out);
  } else if (auto it = forks_.find(made.fork); it != forks_.end()) {
    it->second.carrier = 0;
    remove_fork(made.fork, out);
  }
}

void RRefProtocol::close_if_settled(Peer& p, uint64_t carrier) {
  auto it = p.carriers.find(carrier);
  if (it == p.carriers.end()) return;
  if (it->second.open > 0) return;
  p.carriers.erase(it);
}

void RRefProtocol::carrier_ended(const WorkerKey& to, uint64_t carrier, CallEnd outcome,
                                 Effects& out) {
  Peer* p = find_peer(to);
  if (p == nullptr) return;
  auto it = p->carriers.find(carrier);
  if (it == p->carriers.end()) return;
  if (outcome == CallEnd::kUnknown) {
    if (!it->second.audited) audit(*p, carrier, it->second, out);
    return;
  }
  for (Made& made : it->second.forks) {
    if (outcome == CallEnd::kDelivered) {
      arrived(it->second, made, out);
    } else {
      not_arrived(it->second, made, out);
    }
  }
  close_if_settled(*p, carrier);
}

void RRefProtocol::audit(Peer& p, uint64_t carrier, Sent& sent, Effects& out) {
  sent.audited = true;
  Message m;
  m.kind = MessageKind::kAudit;
  m.carrier = carrier;
  for (const Made& made : sent.forks) m.forks.push_back(made.fork);
  send(p.key, std::move(m), carrier, out);
}

void RRefProtocol::audit_answered(Peer& from, uint64_t carrier, const Reply& reply, Effects& out) {
  auto it = from.carriers.find(carrier);
  if (it == from.carriers.end()) return;
  std::vector<Made>& forks = it->second.forks;
  if (!reply.status.ok()) ++faults_;  // who cannot answer has no RRefs
  for (size_t i = 0; i < forks.size(); ++i) {
    const Holds holds = i < reply.holds.size() ? reply.holds[i] : Holds::kNotHeld;
    if (holds == Holds::kNotHeld) {
      not_arrived(it->second, forks[i], out);
    } else if (holds == Holds::kHeld || forks[i].parent.is_zero()) {
      arrived(it->second, forks[i], out);
    }
  }
  close_if_settled(from, carrier);
}

void RRefProtocol::handle_accept(Peer& from, const Message& m, Effects& out) {
  auto it = from.carriers.find(m.carrier);
  if (it == from.carriers.end()) return;
  for (Made& made : it->second.forks) arrived(it->second, made, out);
  close_if_settled(from, m.carrier);
}

// --- The receiver ---

void RRefProtocol::receive(const WorkerKey& from, const Carrier& carrier, Effects& out) {
  const auto refused = [&](ErrorKind kind, const char* why) {
    out.push_back(ArrivalFailed{
        from, carrier.number,
        make_error(kind, absl::StrCat("a message with ", carrier.forks.size(), " RRefs (carrier ",
                                      carrier.number, " of ", to_string(from), "): ", why))});
  };
  if (is_gone(from)) return refused(ErrorKind::kPeerLost, "its sender is gone");
  Peer& p = peer(from);
  note_floors(p, carrier.floors);
  if (carrier.number < p.theirs.carriers) {
    return refused(ErrorKind::kCancelled, "its sender has given it up");
  }
  if (p.void_carriers.contains(carrier.number)) {
    return refused(ErrorKind::kCancelled, "its sender has given it up and asked for its RRefs");
  }
  const ArrivalKey key{from, carrier.number};
  auto [it, is_new] = arrivals_.try_emplace(key);
  if (!is_new) {
    ++faults_;
    return;
  }
  Arrival& arrival = it->second;
  arrival.is_answer = carrier.is_answer;
  for (const Handle& handle : carrier.forks) receive_fork(from, carrier, handle, arrival, out);
  resolve_if_complete(key, out);
}

void RRefProtocol::receive_fork(const WorkerKey& from, const Carrier& carrier, const Handle& handle,
                                Arrival& arrival, Effects& out) {
  const auto failed = [&](ErrorKind kind, const std::string& why) {
    if (arrival.failure.ok()) {
      arrival.failure =
          make_error(kind, absl::StrCat(to_string(handle.rref), ", ", to_string(handle.fork),
                                        " from ", to_string(from), ": ", why));
    }
  };
  if (handle.rref.is_zero() || handle.fork.is_zero() || users_.contains(handle.fork)) {
    ++faults_;
    return failed(ErrorKind::kProtocol, "it has no id, or one that is in use");
  }
  if (handle.owner == self_) {
    Object* o = find_object(handle.rref);
    if (from == self_) {
      if (!forks_.contains(handle.fork)) return failed(ErrorKind::kState, "it was given up");
    } else if (o == nullptr && handle.rref.creator != from) {
      return failed(ErrorKind::kState, "its object is gone");
    } else {
      arrival.needs_accept = true;
    }
    ++object(handle.rref).local_handles;
    arrival.handles.push_back(Handle{handle.rref, ForkId(), self_});
    if (from == self_) remove_fork(handle.fork, out);
    return;
  }
  if (handle.owner.id == self_.id) {
    return failed(ErrorKind::kPeerLost, absl::StrCat("its owner was ", to_string(handle.owner),
                                                     ", and this is ", to_string(self_)));
  }
  if (is_gone(handle.owner)) {
    arrival.needs_accept = arrival.needs_accept || from != handle.owner;
    const Status lost = owner_gone(handle.rref, handle.owner);
    return failed(error_kind(lost), std::string(lost.message()));
  }
  User& user = users_[handle.fork];
  user.rref = handle.rref;
  user.owner = handle.owner;
  arrival.handles.push_back(handle);
  if (from == handle.owner) {
    user.state = UserState::kConfirmed;
    return;
  }
  arrival.needs_accept = true;
  ++arrival.pending;
  user.carrier = carrier.number;
  user.parent = from;
  Message m;
  m.kind = MessageKind::kFork;
  m.rref = handle.rref;
  m.fork = handle.fork;
  m.parent = from;
  user.introduced_by = send(handle.owner, std::move(m), 0, out);
}

// RREF-3.
void RRefProtocol::resolve_if_complete(const ArrivalKey& key, Effects& out) {
  auto it = arrivals_.find(key);
  if (it == arrivals_.end() || it->second.pending != 0) return;
  Arrival& arrival = it->second;
  const std::vector<Handle> handles = std::move(arrival.handles);
  const bool is_lost = arrival.cancelled || !arrival.failure.ok();
  if (!is_lost) {
    out.push_back(ArrivalReady{key.first, key.second});
  } else if (!arrival.cancelled) {
    out.push_back(ArrivalFailed{key.first, key.second, arrival.failure});
  }
  // A request that runs is accepted by its answer, unless its sender has asked already or it runs
  // for long; there is nothing else that would tell the sender.
  if (!arrival.needs_accept) {
    arrivals_.erase(it);
  } else if (arrival.is_answer || arrival.accept_now || is_lost) {
    send_accept(key, out);
  }
  if (is_lost) {
    for (const Handle& handle : handles) drop(handle, out);
  }
}

void RRefProtocol::send_accept(ArrivalKey key, Effects& out) {
  arrivals_.erase(key);
  Message m;
  m.kind = MessageKind::kAccept;
  m.carrier = key.second;
  send(key.first, std::move(m), 0, out);
}

bool RRefProtocol::cancel_arrival(const WorkerKey& from, uint64_t carrier) {
  auto it = arrivals_.find({from, carrier});
  if (it == arrivals_.end() || it->second.pending == 0) return false;
  it->second.cancelled = true;
  return true;
}

void RRefProtocol::flush_accept(const WorkerKey& from, uint64_t carrier, Effects& out) {
  auto it = arrivals_.find({from, carrier});
  if (it == arrivals_.end() || it->second.pending != 0) return;
  send_accept(it->first, out);
}

void RRefProtocol::answered(const WorkerKey& from, uint64_t carrier) {
  auto it = arrivals_.find({from, carrier});
  if (it != arrivals_.end() && it->second.pending == 0) arrivals_.erase(it);
}

Reply RRefProtocol::handle_audit(Peer& from, const Message& m) {
  Reply reply;
  bool any = false;
  for (const ForkId& fork : m.forks) {
    auto it = users_.find(fork);
    const bool is_held = it != users_.end();
    any = any || is_held;
    reply.holds.push_back(!is_held                                  ? Holds::kNotHeld
                          : it->second.state == UserState::kPending ? Holds::kPending
                                                                    : Holds::kHeld);
  }
  auto arrival = arrivals_.find({from.key, m.carrier});
  if (arrival != arrivals_.end()) {
    // Its sender has given up waiting for the answer that would have said the same.
    if (arrival->second.pending != 0) arrival->second.accept_now = true;
  } else if (!any && m.carrier >= from.theirs.carriers) {
    from.void_carriers.insert(m.carrier);
  }
  return reply;
}

}  // namespace weft::internal
