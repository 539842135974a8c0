// Forks of other workers' objects that are held here.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/protocol.h"

namespace weft::internal {

Status RRefProtocol::owner_gone(const RRefId& rref, const WorkerKey& owner) const {
  const std::string_view known = gone_.why(owner.incarnation);
  const std::string why = known.empty() ? "" : absl::StrCat(": ", std::string(known));
  return make_error(ErrorKind::kPeerLost, absl::StrCat(to_string(rref), ": its owner, ",
                                                       to_string(owner), ", is lost", why));
}

StatusOr<Creation> RRefProtocol::remote(const WorkerKey& owner) {
  const RRefId rref{self_, ++last_id_};
  if (owner == self_) {
    return make_error(ErrorKind::kInternal, "remote() to this worker itself makes a local object");
  }
  if (is_gone(owner)) return owner_gone(rref, owner);
  const ForkId fork{self_, ++last_id_};
  Peer& p = peer(owner);
  User& user = users_[fork];
  user.rref = rref;
  user.owner = owner;
  user.is_creator = true;
  user.ended = false;
  user.introduced_by = number(p, MessageKind::kCreate, rref, fork, 0);
  return Creation{rref, fork, user.introduced_by, floors(p)};
}

void RRefProtocol::creation_ended(const ForkId& fork, CallEnd outcome, const Status& why,
                                  Effects& out) {
  auto it = users_.find(fork);
  if (it == users_.end() || it->second.ended) return;
  User& user = it->second;
  user.ended = true;
  const Handle handle{user.rref, fork, user.owner};
  if (outcome == CallEnd::kDelivered) {
    settle(peer(user.owner), user.introduced_by);
    if (user.state == UserState::kPending) {
      user.state = UserState::kConfirmed;
      if (!user.dropped) out.push_back(HandleConfirmed{handle});
    }
  } else {
    if (user.state == UserState::kPending) {
      // Other holders wait for the value, and the call may still arrive: the owner takes whichever
      // of creation and abandonment comes first.
      Message m;
      m.kind = MessageKind::kAbandon;
      m.rref = user.rref;
      m.fork = fork;
      m.introduced_by = user.introduced_by;
      m.status = why;
      send(user.owner, std::move(m), user.introduced_by, out);
    }
    user.state = UserState::kFailed;
    user.failure = why;
    if (!user.dropped) out.push_back(HandleFailed{handle, why});
  }
  delete_if_due(fork, out);
}

void RRefProtocol::handle_known(const Peer& from, const Message& m, Effects& out) {
  auto it = users_.find(m.fork);
  if (it == users_.end() || !it->second.is_creator || it->second.owner != from.key) return;
  User& user = it->second;
  // After a failure the abandonment settles the creation.
  if (user.state != UserState::kPending) return;
  user.state = UserState::kConfirmed;
  settle(peer(user.owner), user.introduced_by);
  if (!user.dropped) out.push_back(HandleConfirmed{Handle{user.rref, m.fork, user.owner}});
}

void RRefProtocol::drop(const Handle& handle, Effects& out) {
  if (handle.fork.is_zero()) {
    Object* o = find_object(handle.rref);
    if (o == nullptr || o->local_handles == 0) {
      ++faults_;
      return;
    }
    --o->local_handles;
    release_if_unused(handle.rref, out);
    return;
  }
  auto it = users_.find(handle.fork);
  if (it == users_.end()) return;  // drop_all() was first
  it->second.dropped = true;
  delete_if_due(handle.fork, out);
}

void RRefProtocol::drop_all(Effects& out) {
  std::vector<ForkId> all;
  for (const auto& [fork, user] : users_) all.push_back(fork);
  std::sort(all.begin(), all.end());
  for (const ForkId& fork : all) {
    auto it = users_.find(fork);
    if (it != users_.end()) drop(Handle{it->second.rref, fork, it->second.owner}, out);
  }
}

void RRefProtocol::delete_if_due(const ForkId& fork, Effects& out) {
  auto it = users_.find(fork);
  if (it == users_.end()) return;
  User& user = it->second;
  if (!user.dropped || user.children != 0) return;  // RREF-4
  // A pending child is resolved first. The creator need not wait: the delete finds its creation, or
  // is there before it.
  if (user.state == UserState::kPending && !user.is_creator) return;
  if (user.at_owner && !user.deleted) {
    user.deleted = true;
    Message m;
    m.kind = MessageKind::kDelete;
    m.rref = user.rref;
    m.fork = fork;
    m.introduced_by = user.introduced_by;
    send(user.owner, std::move(m), 0, out);
  }
  if (user.ended) users_.erase(it);
}

void RRefProtocol::fail_user(const ForkId& fork, const Status& why, Effects& out) {
  User& user = users_.at(fork);
  const bool was_waited_for = user.state == UserState::kPending && !user.is_creator;
  const ArrivalKey arrival{user.parent, user.carrier};
  user.state = UserState::kFailed;
  user.failure = why;
  user.at_owner = false;
  if (was_waited_for) {
    Arrival& a = arrivals_.at(arrival);
    --a.pending;
    if (a.failure.ok()) a.failure = why;
    resolve_if_complete(arrival, out);
  } else if (!user.dropped) {
    out.push_back(HandleFailed{Handle{user.rref, fork, user.owner}, why});
  }
  delete_if_due(fork, out);
}

void RRefProtocol::fork_answered(const ForkId& fork, const Status& status, Effects& out) {
  auto it = users_.find(fork);
  if (it == users_.end() || it->second.state != UserState::kPending) return;
  if (!status.ok()) {
    fail_user(fork, status, out);
    return;
  }
  User& user = it->second;
  user.state = UserState::kConfirmed;
  const ArrivalKey arrival{user.parent, user.carrier};
  --arrivals_.at(arrival).pending;
  resolve_if_complete(arrival, out);
}

void RRefProtocol::users_lose(const WorkerKey& owner, Effects& out) {
  std::vector<ForkId> lost;
  for (const auto& [fork, user] : users_) {
    if (user.owner == owner) lost.push_back(fork);
  }
  std::sort(lost.begin(), lost.end());
  for (const ForkId& fork : lost) {
    auto it = users_.find(fork);
    if (it == users_.end()) continue;  // it went with the arrival of another one
    User& user = it->second;
    user.ended = true;
    user.at_owner = false;
    if (user.state == UserState::kFailed) {  // RREF-10: the first failure stays
      delete_if_due(fork, out);
    } else {
      fail_user(fork, owner_gone(user.rref, owner), out);
    }
  }
}

Status RRefProtocol::check(const Handle& handle) const {
  if (handle.fork.is_zero()) {
    auto it = objects_.find(handle.rref);
    if (it != objects_.end() && it->second.local_handles != 0) return Status();
  } else if (auto it = users_.find(handle.fork); it != users_.end() && !it->second.dropped) {
    return it->second.failure;
  }
  return make_error(ErrorKind::kState,
                    absl::StrCat(to_string(handle.rref), ", ", to_string(handle.fork),
                                 ": not held by ", to_string(self_), " any more"));
}

bool RRefProtocol::confirmed(const Handle& handle) const {
  if (handle.fork.is_zero()) return objects_.contains(handle.rref);
  auto it = users_.find(handle.fork);
  return it != users_.end() && it->second.state == UserState::kConfirmed;
}

Use RRefProtocol::use_of(const Handle& handle) const {
  auto it = users_.find(handle.fork);
  return Use{handle.rref, handle.fork, it == users_.end() ? 0 : it->second.introduced_by};
}

}  // namespace weft::internal
