// The agent's peers: how they are made known, dialled and accepted.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/worker_key.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);
constexpr absl::Duration kMaxBackoff = absl::Seconds(1);
constexpr int kMostDials = 8;

}  // namespace

Agent::PeerRef Agent::peer_locked(const WorkerInfo& info, std::string_view address) {
  PeerRef& peer = peers_[info.incarnation];
  if (peer != nullptr && (peer->info.name != info.name || peer->info.id != info.id)) {
    drop_impostor_locked(std::exchange(peer, nullptr));
  }
  if (peer == nullptr) {
    peer = std::make_shared<Peer>();
    peer->info = info;
    peer->window = std::make_unique<CallWindow>(&kept_);
    peer->send_room = std::make_shared<SendRoom>(
        options_.config.peer_send_budget,
        absl::StrCat("bytes on their way to ", info.name, " (WEFT_PEER_SEND_BUDGET)"), bell_);
    peer->budget =
        part_of_budget(options_.config.peer_receive_budget,
                       absl::StrCat("messages from ", info.name, " (WEFT_PEER_RECEIVE_BUDGET)"));
  }
  if (!address.empty() && peer->address != address) peer->address = std::string(address);
  return peer;
}

// A peer has connected under this incarnation before the member list said whose it is.
void Agent::drop_impostor_locked(PeerRef impostor) {
  impostor->window->close();
  impostor->gone = make_error(
      ErrorKind::kPermission,
      absl::StrCat("the incarnation of ", to_string(impostor->info), " is that of another worker"));
  // Without the mutex: close() may run the owners of what is queued. A pool that takes nothing more
  // is that of an agent that closes, which ends all connections.
  (void)options_.pool->post([links = impostor->links, why = impostor->gone] {
    for (const auto& link : links) link->connection()->close(why);
  });
}

bool Agent::want_dial_locked(const PeerRef& peer) {
  if (closed_ || peer->dialling || peer->active != nullptr || !peer->gone.ok()) return false;
  if (now() < peer->dial_at) {
    arm_redial_locked(peer);
    return false;
  }
  if (dials_ >= kMostDials) {
    const bool stays = is_lower(peer->info);
    if (!std::exchange(peer->dial_queued, true)) {
      (stays ? dials_that_stay_ : other_dials_).push_back(peer);
    }
    return false;
  }
  ++dials_;
  peer->dialling = true;
  peer->dial_counts = true;
  peer->dialled_at = now();
  return true;
}

void Agent::dial_ended_locked(Peer* peer) {
  peer->dialling = false;
  if (std::exchange(peer->dial_counts, false)) --dials_;
}

void Agent::dial_queued() {
  while (true) {
    std::vector<PeerRef> passed;  // their timers may wait for the mutex
    PeerRef next;
    {
      MutexLock lock(&mutex_);
      // A dial that ends at once comes back here.
      if (dials_queued_) return;
      while (next == nullptr && dials_ < kMostDials) {
        auto& queue = dials_that_stay_.empty() ? other_dials_ : dials_that_stay_;
        if (queue.empty()) break;
        PeerRef peer = queue.front().lock();
        queue.pop_front();
        if (peer == nullptr) continue;
        peer->dial_queued = false;
        if (!peer->waiting.empty() && want_dial_locked(peer)) next = peer;
        passed.push_back(std::move(peer));
      }
      if (next == nullptr) return;
      dials_queued_ = true;
    }
    dial(next);
    MutexLock lock(&mutex_);
    dials_queued_ = false;
  }
}

void Agent::back_off_locked(Peer* peer, const Status& why) {
  peer->last_dial_error = why;
  if (!peer->waiting.empty()) peer->unreachable_since = std::min(peer->unreachable_since, now());
  // Jitter, so that those who lost the same peer do not come back in step.
  peer->backoff = std::min(kMaxBackoff, std::max(kFirstBackoff, peer->backoff * 2));
  peer->dial_at = now() + peer->backoff * (0.5 + 0.5 * runtime()->random().unit());
}

void Agent::came_through_locked(Peer* peer) {
  peer->backoff = absl::ZeroDuration();
  peer->dial_at = absl::InfinitePast();
  peer->unreachable_since = absl::InfiniteFuture();
  peer->last_dial_error = absl::OkStatus();
}

void Agent::failed_locked(Peer* peer, Link* link, const Status& why) {
  if (std::exchange(link->failed, true)) return;
  if (link->heard()) return came_through_locked(peer);
  back_off_locked(peer, why);
}

void Agent::arm_redial_locked(const PeerRef& peer) {
  if (peer->redial == nullptr) {
    const std::weak_ptr<Agent> weak = weak_from_this();
    const std::weak_ptr<Peer> weak_peer = peer;  // weak: the peer owns the timer
    peer->redial = runtime()->make_timer([weak, weak_peer] {
      auto self = weak.lock();
      auto p = weak_peer.lock();
      if (self == nullptr || p == nullptr) return;
      bool go = false;
      {
        MutexLock relock(&self->mutex_);
        go = !p->waiting.empty() && self->want_dial_locked(p);
      }
      if (go) self->dial(p);
    });
  }
  peer->redial->arm(peer->dial_at);
}

std::shared_ptr<ByteBudget> Agent::part_of_budget(uint64_t limit, std::string name) const {
  // What is charged to it may outlive the agent, so it holds what it is a part of.
  struct Part {
    Part(uint64_t l, std::string n, std::shared_ptr<ByteBudget> w)
        : whole(std::move(w)), part(l, std::move(n), whole.get()) {}
    const std::shared_ptr<ByteBudget> whole;
    ByteBudget part;
  };
  auto made = std::make_shared<Part>(limit, std::move(name), receive_budget_);
  return std::shared_ptr<ByteBudget>(made, &made->part);
}

std::shared_ptr<Link> Agent::new_link(const PeerRef& peer) {
  return std::make_shared<Link>(weak_from_this(), MessageLimits(options_.config), peer->budget,
                                receive_memory_, options_.trace, now());
}

Hello Agent::own_hello() const {
  Hello hello;
  hello.version_max = kVersion;
  hello.job_id = options_.job_id;
  hello.name = options_.self.name;
  hello.id = options_.self.id;
  hello.incarnation = options_.self.incarnation;
  return hello;
}

void Agent::dial(const PeerRef& peer) {
  Hello hello = own_hello();
  hello.to_id = peer->info.id;
  hello.to_incarnation = peer->info.incarnation;
  hello.to_name = peer->info.name;
  hello.lanes = 0;  // as many as the transport thinks right for the way there
  std::shared_ptr<Transport> transport;
  std::string address;
  {
    MutexLock lock(&mutex_);
    transport = transport_;
    address = peer->address;
  }
  counters_->dials->add();
  const std::shared_ptr<Link> link = new_link(peer);
  const auto self = shared_from_this();
  if (transport == nullptr) {
    on_dialled(peer, link, make_error(ErrorKind::kState, "the worker has shut down"));
    return;
  }
  if (address.empty()) {
    on_dialled(peer, link, make_error(ErrorKind::kUnavailable, "its address is not known yet"));
    return;
  }
  // A stopped process accepts connections and never answers.
  const absl::Duration patience = options_.config.lease * kPatience;
  transport->connect(address, hello, now() + std::max(patience, absl::Seconds(1)), link,
                     [self, peer, link](StatusOr<std::shared_ptr<Connection>> connection) {
                       self->on_dialled(peer, link, std::move(connection));
                     });
}

void Agent::on_dialled(const PeerRef& peer, const std::shared_ptr<Link>& link,
                       StatusOr<std::shared_ptr<Connection>> connection) {
  if (connection.ok()) {
    link->open(*std::move(connection));
    adopt(peer, link);
    return;
  }
  const Status error = connection.status();
  const ErrorKind kind = error_kind(error);
  // Refused by the peer, as opposed to not reached: another attempt would be refused, too.
  const bool final = kind == ErrorKind::kPermission || kind == ErrorKind::kPeerLost ||
                     kind == ErrorKind::kProtocol || kind == ErrorKind::kUnimplemented;
  std::vector<uint64_t> fail;
  bool given_up = false;
  {
    MutexLock lock(&mutex_);
    dial_ended_locked(peer.get());
    given_up = closed_ || peer->active != nullptr;
    if (!given_up) back_off_locked(peer.get(), error);
    if (!given_up && final) {
      fail.assign(peer->waiting.begin(), peer->waiting.end());
    } else if (!given_up && !peer->waiting.empty()) {
      arm_redial_locked(peer);
    }
  }
  dial_queued();
  if (given_up) return;
  for (uint64_t id : fail) complete(id, error, false);
  if (kind == ErrorKind::kPeerLost) peer_gone(peer->info.incarnation, error);
}

// The name may be proved by a certificate, the incarnation is not: one that belongs to another
// worker would lead that worker's calls to the speaker.
Status Agent::check_incarnation_locked(const Hello& theirs) const {
  const WorkerInfo* owner = nullptr;
  const auto peer = peers_.find(theirs.incarnation);
  if (peer != peers_.end()) owner = &peer->second->info;
  if (members_ != nullptr) {
    for (const auto& [id, member] : members_->by_id) {
      if (member.info.incarnation == theirs.incarnation) owner = &member.info;
    }
  }
  if (owner == nullptr || (owner->name == theirs.name && owner->id == theirs.id)) {
    return absl::OkStatus();
  }
  return make_error(ErrorKind::kPermission,
                    absl::StrCat("incarnation ", absl::Hex(theirs.incarnation, absl::kZeroPad16),
                                 " is that of ", to_string(*owner), ", and not of '",
                                 theirs.name.substr(0, 128), "' (id ", theirs.id, ")"));
}

StatusOr<Hello> Agent::check_hello(const Hello& theirs) {
  const bool any_job = theirs.observer && theirs.job_id.empty();
  if (!any_job && theirs.job_id != options_.job_id) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("worker '", options_.self.name, "' belongs to job ",
                                   options_.job_id, ", not to ", theirs.job_id.substr(0, 64),
                                   " as '", theirs.name.substr(0, 128), "' does"));
  }
  if ((theirs.to_incarnation != 0 && theirs.to_incarnation != options_.self.incarnation) ||
      (theirs.to_incarnation != 0 && theirs.to_id != options_.self.id)) {
    return make_error(
        ErrorKind::kPeerLost,
        absl::StrCat("incarnation ", absl::Hex(theirs.to_incarnation, absl::kZeroPad16), " (id ",
                     theirs.to_id, ") is not here any more; this is '", options_.self.name, "' id ",
                     options_.self.id, " incarnation ",
                     absl::Hex(options_.self.incarnation, absl::kZeroPad16)));
  }
  MutexLock lock(&mutex_);
  if (closed_) return closed_why_.ok() ? closed_error() : closed_why_;
  auto it = peers_.find(theirs.incarnation);
  if (it != peers_.end() && !it->second->gone.ok()) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("worker '", options_.self.name, "' knows incarnation ",
                                   absl::Hex(theirs.incarnation, absl::kZeroPad16), " of '",
                                   theirs.name.substr(0, 128),
                                   "' as gone: ", std::string(it->second->gone.message())));
  }
  WEFT_RETURN_IF_ERROR(check_incarnation_locked(theirs));
  if (theirs.observer) WEFT_RETURN_IF_ERROR(check_observer_locked(theirs));
  Hello ours = own_hello();
  ours.to_id = theirs.id;
  ours.to_incarnation = theirs.incarnation;
  return ours;
}

std::shared_ptr<ConnectionHandler> Agent::on_connection(std::shared_ptr<Connection> connection) {
  const Hello& hello = connection->peer();
  if (hello.observer) return admit_observer(std::move(connection));
  PeerRef peer;
  {
    MutexLock lock(&mutex_);
    const Member* member = members_->find(hello.id);
    const bool known = member != nullptr && member->info.incarnation == hello.incarnation;
    // Once more: the list may have come after the hello.
    const Status owner = check_incarnation_locked(hello);
    if (owner.ok()) {
      peer = peer_locked(WorkerInfo{hello.name, hello.id, hello.incarnation},
                         known ? std::string_view(member->address) : std::string_view());
    } else {
      // Not in the table, and adopt() turns it away.
      peer = std::make_shared<Peer>();
      peer->budget = part_of_budget(0, "messages of a worker under the incarnation of another");
      peer->gone = owner;
    }
  }
  const std::shared_ptr<Link> link = new_link(peer);
  link->open(std::move(connection));
  adopt(peer, link);
  return link;
}

}  // namespace weft::internal
