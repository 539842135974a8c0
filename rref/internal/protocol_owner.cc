// Objects of this worker and the forks that it counts.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/protocol.h"

namespace weft::internal {

Handle RRefProtocol::create_local(bool running) {
  const RRefId rref{self_, ++last_id_};
  Object& o = object(rref);
  o.created = o.has_value = true;
  o.running = running;
  o.local_handles = 1;
  return Handle{rref, ForkId(), self_};
}

RRefProtocol::Object* RRefProtocol::find_object(const RRefId& rref) {
  auto it = objects_.find(rref);
  return it == objects_.end() ? nullptr : &it->second;
}

void RRefProtocol::add_fork(const RRefId& rref, const ForkId& fork, const WorkerKey& holder,
                            uint64_t carrier) {
  forks_.emplace(fork, Fork{rref, holder, carrier});
  ++object(rref).forks;
}

void RRefProtocol::remove_fork(const ForkId& fork, Effects& out) {
  auto it = forks_.find(fork);
  if (it == forks_.end()) return;
  const Fork gone = it->second;
  forks_.erase(it);
  if (gone.carrier != 0) {
    // The carrier need not be asked about any more.
    Peer& holder = peer(gone.holder);
    Sent& sent = holder.carriers[gone.carrier];
    const uint64_t at = sent.forks.empty() ? 0 : fork.counter - sent.forks[0].fork.counter;
    if (at < sent.forks.size()) sent.close(&sent.forks[at]);
    close_if_settled(holder, gone.carrier);
  }
  --object(gone.rref).forks;
  end_uses(gone.rref, fork, out);
  release_if_unused(gone.rref, out);
}

// Uses over this fork have lost their handle.
void RRefProtocol::end_uses(const RRefId& rref, const ForkId& fork, Effects& out) {
  Object* o = find_object(rref);
  if (o == nullptr || o->parked.empty()) return;
  std::vector<Parked> kept;
  for (const Parked& parked : o->parked) {
    if (parked.fork != fork) {
      kept.push_back(parked);
    } else if (!is_gone(parked.from)) {
      out.push_back(
          UseDone{parked.token, rref,
                  make_error(ErrorKind::kState, absl::StrCat(to_string(rref), ": ", to_string(fork),
                                                             " was dropped while it was used"))});
    }
  }
  o->parked = std::move(kept);
}

void RRefProtocol::finish(const RRefId& rref, Object& o, const Status& result, Effects& out) {
  o.created = true;
  o.running = false;
  o.result = result;
  for (const Parked& parked : o.parked) out.push_back(UseDone{parked.token, rref, result});
  o.parked.clear();
}

// RREF-1.
void RRefProtocol::release_if_unused(const RRefId& rref, Effects& out) {
  auto it = objects_.find(rref);
  if (it == objects_.end()) return;
  const Object& o = it->second;
  if (o.forks != 0 || o.local_handles != 0 || o.running || !o.parked.empty()) return;
  if (o.has_value) out.push_back(ReleaseValue{rref});
  objects_.erase(it);
}

CreateVerdict RRefProtocol::create(const WorkerKey& from, const Creation& creation) {
  if (is_gone(from)) return CreateVerdict::kRefused;
  if (creation.rref.creator != from || from == self_) {
    ++faults_;
    return CreateVerdict::kRefused;
  }
  Peer& p = peer(from);
  note_floors(p, creation.floors);
  if (creation.seq < p.theirs.control) return CreateVerdict::kRefused;
  auto tombstone = p.tombstones.find(creation.seq);
  if (tombstone != p.tombstones.end()) {
    if (tombstone->second) return CreateVerdict::kRepeated;
    tombstone->second = true;
  } else {
    if (forks_.contains(creation.fork)) return CreateVerdict::kRepeated;
    add_fork(creation.rref, creation.fork, from, 0);
  }
  Object& o = object(creation.rref);
  o.created = o.has_value = true;
  o.running = true;
  o.first = creation.fork;
  return CreateVerdict::kStart;
}

void RRefProtocol::flush_known(const RRefId& rref, Effects& out) {
  Object* o = find_object(rref);
  if (o == nullptr || !o->running || o->known_sent || rref.creator == self_) return;
  o->known_sent = true;
  Message m;
  m.kind = MessageKind::kKnown;
  m.rref = rref;
  m.fork = o->first;
  send(rref.creator, std::move(m), 0, out);
}

void RRefProtocol::function_ended(const RRefId& rref, const Status& status, Effects& out) {
  Object* o = find_object(rref);
  if (o == nullptr || !o->running) {
    ++faults_;
    return;
  }
  finish(rref, *o, status, out);
  release_if_unused(rref, out);
}

std::optional<Status> RRefProtocol::use_if_ready(const WorkerKey& from, const Use& use) const {
  const auto object = objects_.find(use.rref);
  if (object == objects_.end()) return std::nullopt;
  const Object& o = object->second;
  if (!o.created || o.running) return std::nullopt;
  const auto fork = forks_.find(use.fork);
  const bool may =
      fork != forks_.end() && fork->second.rref == use.rref && fork->second.holder == from;
  return may ? std::optional<Status>(o.result) : std::nullopt;
}

void RRefProtocol::use(uint64_t token, const WorkerKey& from, const Use& use, Effects& out) {
  Object* o = find_object(use.rref);
  bool may = false;
  if (from == self_ && use.fork.is_zero()) {
    may = o != nullptr && o->local_handles != 0;
  } else if (auto it = forks_.find(use.fork); it != forks_.end()) {
    may = it->second.rref == use.rref && it->second.holder == from;
  } else if (use.rref.creator == from && from != self_ && !is_gone(from)) {
    // The creation is on its way, unless its number is settled or its fork was deleted.
    const Peer& p = peer(from);
    may = use.introduced_by >= p.theirs.control && !p.tombstones.contains(use.introduced_by);
    if (may && o == nullptr) o = &object(use.rref);
  }
  if (!may) {
    out.push_back(UseDone{
        token, use.rref,
        make_error(
            ErrorKind::kState,
            absl::StrCat(to_string(use.rref), " is used at its owner, ", to_string(self_), ", by ",
                         to_string(from), " over ", to_string(use.fork), ", which is not there"))});
    return;
  }
  if (o->created && !o->running) {
    out.push_back(UseDone{token, use.rref, o->result});
  } else {
    o->parked.push_back(Parked{token, from, use.fork});
  }
}

void RRefProtocol::cancel_use(uint64_t token, const RRefId& rref, Effects& out) {
  Object* o = find_object(rref);
  if (o == nullptr) return;
  o->parked.erase(std::remove_if(o->parked.begin(), o->parked.end(),
                                 [token](const Parked& parked) { return parked.token == token; }),
                  o->parked.end());
  release_if_unused(rref, out);
}

Status RRefProtocol::handle_fork(Peer& from, const Message& m) {
  const auto refused = [&](const char* why) {
    return make_error(
        ErrorKind::kState,
        absl::StrCat(to_string(m.rref), ": ", to_string(m.fork), " of ", to_string(from.key),
                     " is refused by ", to_string(self_), ": ", why));
  };
  if (from.tombstones.contains(m.seq)) return refused("it was deleted");
  if (auto it = forks_.find(m.fork); it != forks_.end()) {
    if (it->second.rref == m.rref && it->second.holder == from.key) return Status();
    ++faults_;
    return refused("another worker has it");
  }
  // While a parent waits for this answer it keeps its own fork (RREF-4). So an object that is not
  // known here has lost the parent by death, unless the parent is its creator and was faster.
  if (!objects_.contains(m.rref) && (m.parent != m.rref.creator || is_gone(m.parent))) {
    from.tombstones.emplace(m.seq, false);
    return refused("the object is gone");
  }
  add_fork(m.rref, m.fork, from.key, 0);
  return Status();
}

Status RRefProtocol::handle_delete(Peer& from, const Message& m, Effects& out) {
  bool created = false;
  if (auto it = forks_.find(m.fork); it != forks_.end()) {
    if (it->second.holder != from.key) return not_yours(from, m);
    created = object(it->second.rref).created;
    remove_fork(m.fork, out);
  } else {
    // A use may have been faster than its creation.
    end_uses(m.rref, m.fork, out);
    release_if_unused(m.rref, out);
  }
  // RREF-2: what introduced the fork may arrive after this, or again.
  if (m.introduced_by >= from.theirs.control) from.tombstones.emplace(m.introduced_by, created);
  return Status();
}

Status RRefProtocol::handle_abandon(Peer& from, const Message& m, Effects& out) {
  if (m.rref.creator != from.key) return not_yours(from, m);
  if (m.introduced_by < from.theirs.control) return Status();
  auto tombstone = from.tombstones.find(m.introduced_by);
  if (tombstone != from.tombstones.end()) {
    if (std::exchange(tombstone->second, true)) return Status();
  } else {
    if (forks_.contains(m.fork)) return Status();
    add_fork(m.rref, m.fork, from.key, 0);
  }
  Object* o = find_object(m.rref);
  if (o == nullptr || o->created) return Status();
  finish(m.rref, *o, m.status, out);
  release_if_unused(m.rref, out);
  return Status();
}

Status RRefProtocol::not_yours(const Peer& from, const Message& m) {
  ++faults_;
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat(name(m.kind), " of ", to_string(m.rref), ", ", to_string(m.fork),
                                 " from ", to_string(from.key), ", which does not hold it"));
}

void RRefProtocol::objects_lose(const WorkerKey& worker, Effects& out) {
  std::vector<ForkId> lost;
  for (const auto& [fork, f] : forks_) {
    if (f.holder == worker) lost.push_back(fork);
  }
  std::sort(lost.begin(), lost.end());
  for (const ForkId& fork : lost) remove_fork(fork, out);

  std::vector<RRefId> touched;
  for (auto& [rref, o] : objects_) {
    const auto of_worker = [&worker](const Parked& parked) { return parked.from == worker; };
    auto end = std::remove_if(o.parked.begin(), o.parked.end(), of_worker);
    if (end != o.parked.end() || (!o.created && rref.creator == worker)) touched.push_back(rref);
    o.parked.erase(end, o.parked.end());
  }
  std::sort(touched.begin(), touched.end());
  for (const RRefId& rref : touched) {
    Object& o = object(rref);
    if (!o.created && rref.creator == worker) {
      finish(rref, o,
             make_error(ErrorKind::kPeerLost,
                        absl::StrCat(to_string(rref), ": its creator, ", to_string(worker),
                                     ", is gone, and the creation has not reached the owner, ",
                                     to_string(self_))),
             out);
    }
    release_if_unused(rref, out);
  }
}

}  // namespace weft::internal
