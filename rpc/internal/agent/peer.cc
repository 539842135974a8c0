// The connections of the agent's peers: choosing between them, heartbeats, goodbye, loss.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/worker_key.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {
namespace {

// Memory that nothing used for one to two of these goes back to the system: long enough for a pause
// between two phases of training, whose first messages would else pay for every page again.
constexpr absl::Duration kTrimEvery = absl::Minutes(1);
// A connection on which nothing was sent for this part of the lease has a heartbeat: where each worker is connected to each
// other, these are most of what a group costs at rest. Two fit into the shortest patience of SILENT-1.
constexpr double kSilentPart = 0.9;
// A dial that takes longer than this part of the lease, as that of a host which is away, does not count in DIAL-2.
constexpr double kSlowDial = 0.5;

}  // namespace

void Agent::adopt(const PeerRef& peer, const std::shared_ptr<Link>& link) {
  std::vector<uint64_t> waiting;
  std::vector<std::shared_ptr<Link>> goodbyes;
  std::shared_ptr<Link> replaced;
  bool redial = false;
  bool reconnected = false;
  Status refuse;
  const bool dialled = link->connection()->dialled();
  {
    MutexLock lock(&mutex_);
    // In the step that makes the connection known, or a call in between would dial once more.
    if (dialled) dial_ended_locked(peer.get());
    if (closed_ || !peer->gone.ok()) {
      refuse = closed_ ? closed_error() : peer->gone;
    } else if (link->lost) {
      // on_lost overtook us.
      failed_locked(peer.get(), link.get(),
                    make_error(ErrorKind::kUnavailable, "it was lost when it opened"));
      redial = !peer->waiting.empty() && want_dial_locked(peer);
    } else {
      counters_->connects->add();
      if (peer->connections++ > 0 && peer->links.empty()) counters_->reconnects->add();
      reconnected = std::exchange(peer->broken, false);
      peer->links.push_back(link);
      peer->last_dial_error = absl::OkStatus();
      std::shared_ptr<Link> old = peer->active;
      if (old == nullptr || old->lost || old->retiring) {
        peer->active = link;
      } else if (old->connection()->dialled() == link->connection()->dialled()) {
        // The same side dialled again: it has lost the older one, even if we have not noticed.
        peer->active = link;
        replaced = old;
      } else if (peer->info.incarnation == options_.self.incarnation) {
        // The other end of the same connection.
        if (link->connection()->dialled()) peer->active = link;
      } else {
        // Both dialled: the connection of the lower one stays, on both sides.
        const bool keep_new = link->connection()->dialled() == is_lower(peer->info);
        if (keep_new) peer->active = link;
        retire_locked(keep_new ? old.get() : link.get(), &goodbyes);
      }
      waiting.assign(peer->waiting.begin(), peer->waiting.end());
    }
  }
  if (redial) dial(peer);
  if (!refuse.ok()) link->connection()->close(refuse);
  if (replaced != nullptr) {
    replaced->connection()->close(
        make_error(ErrorKind::kUnavailable, "replaced by a newer connection of the same peer"));
  }
  for (const auto& l : goodbyes) send_goodbye(l);
  for (uint64_t id : waiting) transmit(id);
  if (dialled) dial_queued();
  if (reconnected && options_.on_reconnected != nullptr) options_.on_reconnected(peer->info);
}

void Agent::retire_locked(Link* link, std::vector<std::shared_ptr<Link>>* goodbyes) {
  if (link->retiring) return;
  link->retiring = true;
  if (link->sending > 0) return;
  link->goodbye_sent = true;
  goodbyes->push_back(link->shared_from_this());
}

void Agent::done_sending(const std::shared_ptr<Link>& link) {
  {
    MutexLock lock(&mutex_);
    if (--link->sending > 0 || !link->retiring || link->goodbye_sent) return;
    link->goodbye_sent = true;
  }
  send_goodbye(link);
}

void Agent::send_goodbye(const std::shared_ptr<Link>& link) {
  v1::GoodbyeHeader goodbye;
  goodbye.set_reason(v1::GoodbyeHeader::DUPLICATE);
  // Behind everything that was sent, whatever the lane.
  const std::vector<int> lanes = link->lanes();
  goodbye.set_lanes(static_cast<uint32_t>(lanes.size()));
  for (const int lane : lanes) {
    link->send_control(FrameKind::kGoodbye, goodbye.SerializeAsString(), lane, now()).IgnoreError();
  }
  close_if_drained(link);  // the peer's may have come before
}

bool Agent::may_close_locked(const Link& link) const {
  // Nothing of ours is under way on it, nothing of the peer's either, and neither side sends more.
  return link.goodbye_sent && link.goodbyes > 0 && link.goodbyes >= link.goodbyes_due &&
         link.pending == 0 && link.serving == 0 && !link.closing && !link.lost;
}

void Agent::close_if_drained(const std::shared_ptr<Link>& link) {
  {
    MutexLock lock(&mutex_);
    if (!may_close_locked(*link)) return;
    link->closing = true;
  }
  link->connection()->close(absl::OkStatus());
}

void Agent::on_goodbye(const std::shared_ptr<Link>& link, const v1::GoodbyeHeader& header) {
  if (header.reason() == v1::GoodbyeHeader::LEAVING) {
    {
      MutexLock lock(&mutex_);
      if (peer_of_locked(*link) == nullptr) return;
    }
    peer_gone(link->peer().incarnation,
              make_error(ErrorKind::kPeerLost,
                         absl::StrCat("worker '", link->peer().name, "' has left")));
    return;
  }
  std::vector<std::shared_ptr<Link>> goodbyes;
  {
    MutexLock lock(&mutex_);
    ++link->goodbyes;
    link->goodbyes_due = static_cast<int>(std::min(header.lanes(), uint32_t{LaneLoads::kMaxLanes}));
    auto it = peers_.find(link->peer().incarnation);
    if (it != peers_.end() && it->second->active == link) {
      // We had not seen the other connection win; the next call dials or finds it.
      it->second->active = nullptr;
      for (const auto& other : it->second->links) {
        if (other != link && !other->retiring && !other->lost) it->second->active = other;
      }
    }
    retire_locked(link.get(), &goodbyes);
  }
  for (const auto& l : goodbyes) send_goodbye(l);
  close_if_drained(link);
}

void Agent::on_link_lost(const std::shared_ptr<Link>& link, Lost lost) {
  if (link->connection() != nullptr && link->peer().observer) return on_observer_lost(link, lost);
  std::vector<uint64_t> resend;
  std::vector<std::pair<uint64_t, Status>> fail;
  std::vector<std::shared_ptr<Job>> abandoned;
  PeerRef peer;
  bool redial = false;
  bool reconnected = false;  // by a connection that was there before this one's loss was known
  {
    MutexLock lock(&mutex_);
    if (link->lost) return;
    link->lost = true;
    if (link->connection() == nullptr) return;  // lost before it was ours
    counters_->lost->add();
    if (error_kind(lost.why) == ErrorKind::kProtocol) counters_->violations->add();
    auto found = peers_.find(link->peer().incarnation);
    if (found == peers_.end()) return;
    peer = found->second;
    auto& links = peer->links;
    links.erase(std::remove(links.begin(), links.end(), link), links.end());
    peer->owes_ack = peer->any_once;  // what it was told may not have come
    if (peer->active == link) {
      peer->active = nullptr;
      for (const auto& other : links) {
        if (!other->retiring) peer->active = other;
      }
    }
    const std::set<uint64_t> unsent(lost.unsent.begin(), lost.unsent.end());
    for (auto& [id, p] : pending_) {
      if (p.link != link) continue;
      const CallAction action =
          p.on(unsent.count(id) > 0 ? CallEvent::kLostUnsent : CallEvent::kLost);
      if (action == CallAction::kSendAgain || action == CallAction::kSendNext) {
        p.link = nullptr;
        --link->pending;
        peer->waiting.insert(id);
        resend.push_back(id);
      } else if (action == CallAction::kMaybeExecuted) {
        fail.emplace_back(
            id, make_error(ErrorKind::kMaybeExecuted,
                           absl::StrCat("the connection to ", to_string(p.to), " broke after '",
                                        p.spec->call.method, "' was sent, so it may have run: ",
                                        std::string(lost.why.message()))));
      }
    }
    for (auto& [key, s] : serving_) {
      // Its answer has nowhere to go. A call that is at_most_once finds it in the window.
      if (s.link == link && !s.at_most_once) abandoned.push_back(s.job);
    }
    if (peer->active == nullptr && !link->closing) {
      failed_locked(peer.get(), link.get(), lost.why);
    }
    redial = !peer->waiting.empty() && want_dial_locked(peer);
    if (!link->closing) {
      reconnected = peer->active != nullptr;
      peer->broken = !reconnected;
    }
  }
  WEFT_LOG(options_.log, kDebug) << "connection to " << to_string(peer->info)
                                 << " lost: " << lost.why;
  for (const auto& job : abandoned) cancel_job(job, CancelReason::kGivenUp);
  for (auto& [id, why] : fail) complete(id, why, false);
  for (uint64_t id : resend) {
    counters_->retried->add();
    transmit(id);
  }
  if (redial) dial(peer);
  if (reconnected && options_.on_reconnected != nullptr) options_.on_reconnected(peer->info);
}

void Agent::peer_gone(uint64_t incarnation, const Status& why) {
  std::vector<uint64_t> calls;
  std::vector<std::shared_ptr<Link>> links;
  std::vector<std::shared_ptr<Job>> handlers;
  std::vector<PeerRef> forgotten;
  std::vector<ReplyFn> unheard;
  std::unique_ptr<CallWindow> window;  // what is attached to its answers learns without the mutex
  {
    MutexLock lock(&mutex_);
    auto it = peers_.find(incarnation);
    if (it == peers_.end() || !it->second->gone.ok()) return;
    Peer& peer = *it->second;
    peer.gone = why;
    peer.active = nullptr;
    window = std::exchange(peer.window, std::make_unique<CallWindow>(&kept_));
    window->close();
    if (peer.redial != nullptr) peer.redial->disarm();
    unheard = std::move(peer.when_ended);
    peer.cancelled.clear();
    links = peer.links;
    for (const auto& [id, p] : pending_) {
      if (p.to.incarnation == incarnation) calls.push_back(id);
    }
    for (const auto& [key, s] : serving_) {
      if (key.first == incarnation) handlers.push_back(s.job);
    }
    gone_peers_.push_back(incarnation);
    forgotten = forget_gone_peers_locked();
  }
  for (uint64_t id : calls) complete(id, why, false);
  for (const auto& job : handlers) cancel_job(job, CancelReason::kGivenUp);
  for (const auto& link : links) link->connection()->close(why);
}

std::vector<Agent::PeerRef> Agent::forget_gone_peers_locked() {
  std::vector<PeerRef> forgotten;
  // Each is looked at once: one that still has a connection to close waits for the next time.
  for (size_t n = gone_peers_.size(); n > 0 && gone_peers_.size() > MemberList::kMostGone; --n) {
    const uint64_t oldest = gone_peers_.front();
    gone_peers_.pop_front();
    auto it = peers_.find(oldest);
    if (it == peers_.end()) continue;
    if (it->second->links.empty() && !it->second->dialling) {
      forgotten.push_back(std::move(it->second));
      peers_.erase(it);
    } else {
      gone_peers_.push_back(oldest);
    }
  }
  return forgotten;
}

void Agent::say_goodbye() {
  std::vector<std::shared_ptr<Link>> links;
  {
    MutexLock lock(&mutex_);
    for (const auto& [incarnation, peer] : peers_) {
      links.insert(links.end(), peer->links.begin(), peer->links.end());
    }
  }
  v1::GoodbyeHeader goodbye;
  goodbye.set_reason(v1::GoodbyeHeader::LEAVING);
  for (const auto& link : links) {
    link->send_control(FrameKind::kGoodbye, goodbye.SerializeAsString(), kControlLane, now())
        .IgnoreError();
  }
}

void Agent::set_store_healthy(bool healthy) {
  MutexLock lock(&mutex_);
  if (healthy) {
    store_lost_ = absl::InfiniteFuture();
  } else {
    store_lost_ = std::min(store_lost_, now());
  }
}

void Agent::tick() {
  std::vector<std::shared_ptr<Link>> links;
  std::vector<std::pair<uint64_t, Status>> unreachable;  // calls, and why they fail
  std::map<std::shared_ptr<Link>, uint64_t> acks;        // KEEP-1
  std::shared_ptr<Transport> transport;
  bool without_store = false;
  {
    MutexLock lock(&mutex_);
    if (closed_) return;
    transport = transport_;
    without_store = now() - store_lost_ > options_.config.lease;
    links.assign(observers_.begin(), observers_.end());
    for (const auto& [incarnation, peer] : peers_) {
      links.insert(links.end(), peer->links.begin(), peer->links.end());
      if (peer->active != nullptr && peer->active->heard()) came_through_locked(peer.get());
      if (peer->active != nullptr && std::exchange(peer->owes_ack, false)) {
        acks[peer->active] = acked_below_locked(*peer);
      }
      if (peer->dial_counts && now() - peer->dialled_at > options_.config.lease * kSlowDial) {
        peer->dial_counts = false;
        --dials_;
      }
      // A peer that is not dialled does not count as out of reach.
      if (peer->waiting.empty() && !peer->dialling) {
        peer->unreachable_since = absl::InfiniteFuture();
      } else if (peer->dialling && now() - peer->dialled_at > options_.config.lease) {
        peer->unreachable_since = std::min(peer->unreachable_since, peer->dialled_at);
        if (peer->last_dial_error.ok()) {
          peer->last_dial_error =
              make_error(ErrorKind::kUnavailable,
                         absl::StrCat("dial of ", peer->address, ": no answer so far"));
        }
      }
      // Membership alone decides about death (MEM-4). Without its store it is unknown: calls that
      // wait are told so after a lease of failed dials, and the next call dials again.
      const absl::Time since = std::max(peer->unreachable_since, store_lost_);
      if (peer->gone.ok() && peer->active == nullptr && now() - since > options_.config.lease) {
        const Status why =
            make_error(ErrorKind::kPeerLost,
                       absl::StrCat("worker ", to_string(peer->info), " could not be reached for ",
                                    absl::FormatDuration(options_.config.lease),
                                    " and the store cannot be asked about it: ",
                                    std::string(peer->last_dial_error.message())));
        for (const uint64_t id : peer->waiting) unreachable.emplace_back(id, why);
      }
    }
  }
  for (const auto& [id, why] : unreachable) complete(id, why, false);
  dial_queued();
  const absl::Time at = now();
  const absl::Duration silence =
      std::max(options_.config.heartbeat_interval, options_.config.lease * kSilentPart);
  for (const auto& link : links) {
    const bool listed = !link->peer().observer && !without_store;
    const absl::Duration patience =
        options_.config.lease * (listed ? kPatience : kPatienceWithoutMembership);
    if (at - link->last_received() > patience) {
      WEFT_LOG(options_.log, kWarning)
          << "no sign of life from " << link->connection()->describe() << " for "
          << absl::FormatDuration(patience) << ": the connection ends";
      link->connection()->close(
          make_error(ErrorKind::kUnavailable,
                     absl::StrCat("no sign of life for ", absl::FormatDuration(patience))));
      continue;
    }
    const auto ack = acks.find(link);
    if (ack != acks.end() || at - link->last_sent() >= silence) {
      v1::HeartbeatHeader header;
      if (ack != acks.end()) header.set_acked_below(ack->second);
      link->send_control(FrameKind::kHeartbeat, header.SerializeAsString(), kControlLane, at)
          .IgnoreError();
    }
  }
  if (at - last_sweep_ >= options_.config.lease / 2) {
    last_sweep_ = at;
    for (const auto& link : links) give_up_arriving(link.get());
  }
  if (at - last_trim_ >= kTrimEvery) {
    last_trim_ = at;
    receive_memory_->sweep();
    transport->sweep();
  }
  // Observers come under names of their own choice, each of which would be kept as a label.
  links.erase(std::remove_if(links.begin(), links.end(),
                             [](const auto& link) { return link->peer().observer; }),
              links.end());
  publish_stats(links, *transport);
  tick_timer_->arm(at + options_.config.heartbeat_interval);
}

}  // namespace weft::internal
