#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/common/time.h"
#include "weft/transport/frame.h"
#include "weft/transport/internal/inproc/core.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::internal {
namespace {

// A payload arrives in pieces of this size, as it does from a socket.
constexpr size_t kPieceBytes = 64u << 10;

Status unavailable(std::string_view message) {
  return make_error(ErrorKind::kUnavailable, message);
}

}  // namespace

std::shared_ptr<InprocEndpoint> InprocCore::add_endpoint(const TransportContext& context) {
  auto endpoint = std::make_shared<InprocEndpoint>();
  endpoint->worker = context.worker_name;
  endpoint->max_frame_bytes = context.max_frame_bytes;
  endpoint->runtime = context.runtime;
  endpoint->loop = context.runtime->make_loop(absl::StrCat("inproc-", context.worker_name));
  std::weak_ptr<InprocEndpoint> weak = endpoint;
  endpoint->timer = context.runtime->make_timer([this, weak] { fire(weak); });
  MutexLock lock(&mutex_);
  while (random_state_ == 0) random_state_ = context.runtime->random().next();
  endpoint->number = ++next_id_;
  endpoints_.emplace(endpoint->number, endpoint);
  return endpoint;
}

StatusOr<std::string> InprocCore::listen(const std::shared_ptr<InprocEndpoint>& endpoint,
                                         const ListenOptions& options,
                                         std::shared_ptr<Acceptor> acceptor) {
  MutexLock lock(&mutex_);
  if (endpoint->closed || !endpoint->address.empty()) {
    return make_error(ErrorKind::kState,
                      endpoint->closed ? std::string("listen after shutdown")
                                       : absl::StrCat("already listening at ", endpoint->address));
  }
  auto taken = [&](const std::string& address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const auto& [number, other] : endpoints_) {
      if (!other->killed && other->address == address) return true;
    }
    return false;
  };
  std::string address;
  if (options.port_first == 0) {
    do address = absl::StrCat("inproc:", ++next_port_);
    while (taken(address));
  } else {
    const int last = std::max(options.port_first, options.port_last);
    for (int port = options.port_first; port <= last && address.empty(); ++port) {
      address = absl::StrCat("inproc:", port);
      if (taken(address)) address.clear();
    }
    if (address.empty()) {
      return make_error(ErrorKind::kResource,
                        last == options.port_first
                            ? absl::StrCat("inproc:", last, " is taken")
                            : absl::StrCat("all of inproc:", options.port_first,
                                           " to inproc:", last, " are taken"));
    }
  }
  endpoint->address = address;
  endpoint->acceptor = std::move(acceptor);
  return address;
}

// ---- events ----------------------------------------------------------------------------------

void InprocCore::schedule_locked(const std::shared_ptr<InprocEndpoint>& at, absl::Time due,
                                 Task task) {
  if (at->closed) return;
  const bool now = due <= at->runtime->now();
  if (now && (at->pending.empty() || at->pending.begin()->first.first > due)) {
    at->loop->post(std::move(task));
    return;
  }
  const bool first = at->pending.empty() || due < at->pending.begin()->first.first;
  at->pending.emplace(std::make_pair(due, ++next_id_), std::move(task));
  if (first) at->timer->arm(due);
}

void InprocCore::fire(const std::weak_ptr<InprocEndpoint>& weak) {
  const std::shared_ptr<InprocEndpoint> at = weak.lock();
  if (at == nullptr) return;
  MutexLock lock(&mutex_);
  if (at->closed) return;
  const absl::Time now = at->runtime->now();
  while (!at->pending.empty() && at->pending.begin()->first.first <= now) {
    at->loop->post(std::move(at->pending.begin()->second));
    at->pending.erase(at->pending.begin());
  }
  if (!at->pending.empty()) at->timer->arm(at->pending.begin()->first.first);
}

void InprocCore::transmit_locked(const LinkRef& link, int to, InprocPacket packet) {
  InprocSide& target = link->side[to];
  packet.sequence = ++next_id_;
  count_locked(*link, to, packet, Fate::kSent);
  if (blocked_locked(*link->side[1 - to].endpoint, *target.endpoint) != nullptr) {
    target.held.push_back(std::move(packet));
    return;
  }
  depart_locked(link, to, std::move(packet));
}

void InprocCore::depart_locked(const LinkRef& link, int to, InprocPacket packet) {
  InprocSide& target = link->side[to];
  absl::Time due = target.endpoint->runtime->now() + draw_delay_locked(*target.endpoint);
  if (packet.type == InprocPacket::Type::kFrame) {
    due = std::max(due, target.last_due[static_cast<size_t>(packet.lane)]);
    target.last_due[static_cast<size_t>(packet.lane)] = due;
  } else {  // the end comes after the last frame of every lane
    for (const absl::Time t : target.last_due) due = std::max(due, t);
    for (absl::Time& t : target.last_due) t = due;
  }
  schedule_locked(target.endpoint, due,
                  [self = shared_from_this(), link, to, packet = std::move(packet)] {
                    self->arrive(link, to, packet);
                  });
}

void InprocCore::finish_later_locked(const LinkRef& link, int side, Status why) {
  InprocSide& s = link->side[side];
  absl::Time due = s.endpoint->runtime->now() + draw_delay_locked(*s.endpoint);
  for (const absl::Time t : s.last_due) due = std::max(due, t);
  schedule_locked(s.endpoint, due, [self = shared_from_this(), link, side, why = std::move(why)] {
    MutexLock lock(&self->mutex_);
    if (!link->side[side].endpoint->killed) self->finish_locked(link, side, why);
  });
}

void InprocCore::break_locked(const LinkRef& link, const Status& why0, const Status& why1) {
  link->broken = true;
  finish_later_locked(link, 0, why0);
  finish_later_locked(link, 1, why1);
}

void InprocCore::finish_locked(const LinkRef& link, int side, Status why) {
  InprocSide& s = link->side[side];
  if (s.ended) return;
  s.ended = true;
  s.reason = why;
  Lost lost;
  lost.why = std::move(why);
  InprocSide& other = link->side[1 - side];
  const Rule* rule = blocked_locked(*s.endpoint, *other.endpoint);
  if (rule != nullptr && !rule->partition) {
    std::deque<InprocPacket> kept;
    for (InprocPacket& packet : other.held) {
      if (packet.type != InprocPacket::Type::kFrame) {
        kept.push_back(std::move(packet));
        continue;
      }
      if (packet.cookie != 0) lost.unsent.push_back(packet.cookie);
      count_locked(*link, 1 - side, packet, Fate::kLost);
    }
    other.held.swap(kept);
  }
  for (const InprocPacket& packet : s.early) count_locked(*link, side, packet, Fate::kLost);
  s.early.clear();
  s.connection = nullptr;
  if (s.done != nullptr) {
    s.endpoint->loop->post([done = std::exchange(s.done, nullptr), handler = std::move(s.handler),
                            why = std::move(lost.why)] { done(why); });
  } else if (s.handler != nullptr) {
    s.endpoint->loop->post([handler = std::move(s.handler), lost = std::move(lost)]() mutable {
      handler->on_lost(std::move(lost));
    });
  }
  s.handler = nullptr;
  if (other.ended) links_.erase(link->id);
}

// ---- the dialler -----------------------------------------------------------------------------

void InprocCore::connect(const std::shared_ptr<InprocEndpoint>& from, std::string_view address,
                         const Hello& hello, absl::Time deadline,
                         std::shared_ptr<ConnectionHandler> handler, Transport::DialDone done) {
  const std::string context = absl::StrCat("dial of ", view(address));
  StatusOr<Hello> complete = complete_hello(hello, from->max_frame_bytes, from->runtime->random());
  MutexLock lock(&mutex_);
  if (from->closed) {
    lock.unlock();
    done(make_error(ErrorKind::kState, absl::StrCat(context, ": the transport is shut down")));
    return;
  }
  std::shared_ptr<InprocEndpoint> target;
  for (const auto& [number, endpoint] : endpoints_) {
    if (!endpoint->killed && endpoint->address == address) target = endpoint;
  }
  Status failure = absl::OkStatus();
  if (!complete.ok()) {
    failure = complete.status();
  } else if (!absl::StartsWith(view(address), "inproc:")) {
    failure = make_error(ErrorKind::kInvalidArgument,
                         "this transport dials addresses like inproc:3 only");
  } else if (target == nullptr) {
    failure = unavailable("nobody listens there");
  } else if (from->killed) {
    failure = unavailable("the network refuses");
  }
  if (!failure.ok()) {
    schedule_locked(from, from->runtime->now() + draw_delay_locked(*from),
                    [done = std::move(done), why = annotate(failure, context)] { done(why); });
    return;
  }
  auto link = std::make_shared<InprocLink>();
  link->id = ++next_id_;
  link->side[0].endpoint = from;
  link->side[1].endpoint = target;
  for (InprocSide& side : link->side) side.last_due.resize(complete->lanes, absl::InfinitePast());
  link->counts[0] = &counts_[{target->worker, from->worker}];
  link->counts[1] = &counts_[{from->worker, target->worker}];
  InprocSide& side = link->side[0];
  side.own = *complete;
  side.handler = std::move(handler);
  side.done = std::move(done);
  links_.emplace(link->id, link);
  if (deadline < absl::InfiniteFuture()) {
    std::weak_ptr<InprocLink> weak = link;
    schedule_locked(from, deadline, [self = shared_from_this(), weak, context] {
      const LinkRef link = weak.lock();
      if (link == nullptr) return;
      MutexLock lock(&self->mutex_);
      if (link->side[0].open || link->side[0].ended || link->side[0].endpoint->killed) return;
      self->finish_locked(link, 0,
                          make_error(ErrorKind::kDeadline,
                                     absl::StrCat(context, ": no answer within the deadline")));
      self->break_locked(link, absl::OkStatus(), unavailable("the dialler gave up"));
    });
  }
  for (uint32_t lane = 0; lane < complete->lanes; ++lane) {
    InprocPacket packet;
    packet.kind = FrameKind::kHello;
    packet.lane = static_cast<int>(lane);
    packet.header = encode_hello(*complete, packet.lane);
    transmit_locked(link, 1, std::move(packet));
  }
}

void InprocCore::on_ack(const LinkRef& link, const InprocPacket& packet) {
  MutexLock lock(&mutex_);
  InprocSide& side = link->side[0];
  if (side.ended || side.open) return;
  const std::string address = link->side[1].endpoint->address;
  StatusOr<Hello> theirs = decode_ack(packet.header, side.own, packet.lane);
  if (!theirs.ok()) {
    finish_locked(link, 0, annotate(theirs.status(), absl::StrCat("dial of ", view(address))));
    break_locked(link, absl::OkStatus(), unavailable("the dialler gave up"));
    return;
  }
  side.lanes_ready.insert(packet.lane);
  if (side.lanes_ready.size() < side.own.lanes) return;
  side.peer = *theirs;
  side.open = true;
  side.connection =
      std::make_shared<InprocConnection>(shared_from_this(), link, 0, side.peer, address);
  const std::shared_ptr<Connection> connection = side.connection;
  const Transport::DialDone done = std::exchange(side.done, nullptr);
  std::deque<InprocPacket> early;
  early.swap(side.early);
  lock.unlock();
  done(connection);
  for (const InprocPacket& p : early) arrive(link, 0, p);
}

// ---- the acceptor ----------------------------------------------------------------------------

void InprocCore::on_hello(const LinkRef& link, const InprocPacket& packet) {
  InprocSide& side = link->side[1];
  std::shared_ptr<Acceptor> acceptor;
  {
    MutexLock lock(&mutex_);
    if (side.ended) return;
    bool refuse = side.endpoint->acceptor == nullptr;
    for (const std::string& who : refusing_) refuse = refuse || means(who, *side.endpoint);
    if (refuse) {
      break_locked(link,
                   unavailable(absl::StrCat("dial of ", side.endpoint->address,
                                            ": the connection was refused")),
                   unavailable("refused"));
      return;
    }
    acceptor = side.endpoint->acceptor;
  }
  StatusOr<Hello> theirs = decode_hello(packet.header, packet.lane);
  StatusOr<Hello> ours = theirs.ok()
                             ? answer_hello(*acceptor, *theirs, side.endpoint->max_frame_bytes)
                             : StatusOr<Hello>(theirs.status());
  InprocPacket answer;
  answer.kind = FrameKind::kHelloAck;
  answer.lane = packet.lane;
  MutexLock lock(&mutex_);
  if (side.ended) return;
  if (!ours.ok()) {
    answer.header = encode_refusal(ours.status());
    transmit_locked(link, 0, std::move(answer));
    finish_locked(link, 1, ours.status());
    return;
  }
  answer.header = encode_ack(*ours, packet.lane);
  side.lanes_ready.insert(packet.lane);
  side.own = *std::move(ours);
  side.peer = *std::move(theirs);
  // Before anything that on_connection() may send. What the dialler sends then comes later on this
  // loop, when the handler is there.
  transmit_locked(link, 0, std::move(answer));
  if (side.lanes_ready.size() < side.peer.lanes) return;
  side.open = true;
  side.connection = std::make_shared<InprocConnection>(shared_from_this(), link, 1, side.peer,
                                                       endpoint_name(*link->side[0].endpoint));
  const std::shared_ptr<Connection> connection = side.connection;
  lock.unlock();
  std::shared_ptr<ConnectionHandler> handler = acceptor->on_connection(connection);
  lock.lock();
  if (!side.ended) {
    side.handler = std::move(handler);
    return;
  }
  Lost lost;
  lost.why = side.reason;
  lock.unlock();
  handler->on_lost(std::move(lost));
}

// ---- open connections ------------------------------------------------------------------------

Status InprocCore::send(const LinkRef& link, int from, Frame frame, int lane) {
  InprocPacket packet;
  packet.kind = frame.kind;
  packet.lane = lane;
  packet.cookie = frame.cookie;
  packet.header = std::move(frame.header);
  packet.payload.reserve(frame.payload_bytes());
  for (const Slice& s : frame.payload) packet.payload.append(s.data, s.size);
  frame.header = packet.header;

  MutexLock lock(&mutex_);
  InprocSide& side = link->side[from];
  if (lane < 0 || static_cast<uint32_t>(lane) >= side.peer.lanes) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("lane ", lane, " of a connection with ", side.peer.lanes));
  }
  WEFT_RETURN_IF_ERROR(check_sendable(frame, side.peer.max_frame_bytes));
  if (!side.open || side.ended || side.closing || side.sealed || side.endpoint->killed) {
    return make_error(ErrorKind::kNotDelivered,
                      absl::StrCat("the connection to ", side.peer.name, " is ",
                                   side.closing && !side.ended ? "closed" : "lost"));
  }
  transmit_locked(link, 1 - from, std::move(packet));
  return absl::OkStatus();
}

void InprocCore::close(const LinkRef& link, int from, Status reason) {
  MutexLock lock(&mutex_);
  InprocSide& side = link->side[from];
  if (side.ended || side.closing || side.endpoint->killed) return;
  side.closing = true;
  side.reason = reason;
  if (!reason.ok()) {
    link->broken = true;
    finish_locked(link, from, reason);
    finish_later_locked(
        link, 1 - from,
        unavailable(absl::StrCat("the connection to ", endpoint_name(*side.endpoint),
                                 " was closed by it")));
    return;
  }
  InprocPacket end;
  end.type = InprocPacket::Type::kEnd;
  transmit_locked(link, 1 - from, std::move(end));
  std::weak_ptr<InprocLink> weak = link;
  // Simulated, a side may learn of the end while what it sent is still under way, as behind real
  // sockets; the other side's answer is then too late.
  const bool early = side.endpoint->runtime->simulated() && draw_locked() % 2 == 0;
  schedule_locked(
      side.endpoint,
      side.endpoint->runtime->now() + (early ? draw_delay_locked(*side.endpoint) : kDrainTimeout),
      [self = shared_from_this(), weak, from] {
        const LinkRef link = weak.lock();
        if (link == nullptr) return;
        MutexLock lock(&self->mutex_);
        InprocSide& side = link->side[from];
        if (!side.endpoint->killed) self->finish_locked(link, from, side.reason);
      });
}

void InprocCore::on_end(const LinkRef& link, int to) {
  MutexLock lock(&mutex_);
  InprocSide& side = link->side[to];
  if (side.ended) return;
  side.sealed = true;
  InprocPacket answer;
  answer.type = InprocPacket::Type::kEndAck;
  transmit_locked(link, 1 - to, std::move(answer));
  const Status closed = unavailable(
      absl::StrCat("the connection was closed by ", endpoint_name(*link->side[1 - to].endpoint)));
  finish_locked(link, to, side.closing ? side.reason : closed);
}

void InprocCore::arrive(const LinkRef& link, int to, const InprocPacket& packet) {
  MutexLock lock(&mutex_);
  InprocSide& side = link->side[to];
  if (link->broken || side.ended || side.endpoint->killed) {
    count_locked(*link, to, packet, Fate::kLost);
    return;
  }
  side.endpoint->runtime->trace("frame", link->id * 16 + static_cast<uint64_t>(packet.kind),
                                packet.sequence);
  if (packet.type == InprocPacket::Type::kEnd) {
    lock.unlock();
    return on_end(link, to);
  }
  if (packet.type == InprocPacket::Type::kEndAck) {
    return finish_locked(link, to, side.reason);
  }
  const bool handshake = packet.kind == FrameKind::kHello || packet.kind == FrameKind::kHelloAck;
  if (!handshake && side.handler == nullptr) return;
  if (!handshake && !side.open) {
    side.early.push_back(packet);
    return;
  }
  count_locked(*link, to, packet, Fate::kDelivered);
  const std::shared_ptr<ConnectionHandler> handler = side.handler;
  lock.unlock();
  if (packet.kind == FrameKind::kHello) return on_hello(link, packet);
  if (packet.kind == FrameKind::kHelloAck) return on_ack(link, packet);
  deliver(*handler, packet);
}

void InprocCore::deliver(ConnectionHandler& handler, const InprocPacket& packet) {
  std::vector<std::string_view> pieces;
  const std::string_view payload = packet.payload;
  for (size_t at = 0; at < payload.size(); at += kPieceBytes) {
    pieces.push_back(payload.substr(at, kPieceBytes));
  }
  FrameView view;
  view.kind = packet.kind;
  view.header = packet.header;
  view.payload = pieces;
  view.payload_bytes = payload.size();
  handler.on_frame(view, packet.lane);
}

// ---- the end of a transport ------------------------------------------------------------------

void InprocCore::shutdown(const std::shared_ptr<InprocEndpoint>& endpoint) {
  std::unique_ptr<Timer> timer;
  std::shared_ptr<Acceptor> acceptor;
  std::map<std::pair<absl::Time, uint64_t>, Task> pending;
  {
    MutexLock lock(&mutex_);
    const std::map<uint64_t, LinkRef> links = links_;
    for (const auto& [id, link] : links) {
      for (int s = 0; s < 2; ++s) {
        InprocSide& side = link->side[s];
        if (side.endpoint != endpoint || side.ended) continue;
        if (!link->broken && !endpoint->killed && !side.closing && !side.sealed) {
          InprocPacket end;
          end.type = InprocPacket::Type::kEnd;
          transmit_locked(link, 1 - s, std::move(end));
        }
        finish_locked(link, s,
                      side.closing ? side.reason
                                   : make_error(ErrorKind::kState, "the transport was shut down"));
      }
    }
    endpoint->closed = true;
    endpoint->address.clear();
    acceptor = std::move(endpoint->acceptor);
    timer = std::move(endpoint->timer);
    pending.swap(endpoint->pending);
    endpoints_.erase(endpoint->number);
  }
  timer = nullptr;
  pending.clear();
  endpoint->loop->shutdown();
}

std::vector<std::pair<std::string, int64_t>> InprocCore::counters(
    const InprocEndpoint& endpoint) const {
  MutexLock lock(&mutex_);
  FrameCount out, in;
  for (const auto& [ends, counts] : counts_) {
    for (const FrameCount& count : counts) {
      if (ends.first == endpoint.worker) out.sent += count.sent;
      if (ends.second == endpoint.worker) in.delivered += count.delivered;
    }
  }
  return {{"frames_sent", out.sent}, {"frames_received", in.delivered}};
}

namespace {

class InprocTransport : public Transport {
 public:
  InprocTransport(std::shared_ptr<InprocCore> core, const TransportContext& context)
      : core_(std::move(core)), endpoint_(core_->add_endpoint(context)) {}
  ~InprocTransport() override { shutdown(); }

  std::string name() const override { return "inproc"; }
  StatusOr<std::string> listen(const ListenOptions& options,
                               std::shared_ptr<Acceptor> acceptor) override {
    return core_->listen(endpoint_, options, std::move(acceptor));
  }
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, DialDone done) override {
    core_->connect(endpoint_, address, hello, deadline, std::move(handler), std::move(done));
  }
  void shutdown() override { core_->shutdown(endpoint_); }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    return core_->counters(*endpoint_);
  }

 private:
  const std::shared_ptr<InprocCore> core_;
  const std::shared_ptr<InprocEndpoint> endpoint_;
};

}  // namespace
}  // namespace weft::internal

namespace weft {

TransportFactory inproc_transport(std::shared_ptr<InprocNetwork> network) {
  return [core = network->core()](
             const TransportContext& context) -> StatusOr<std::unique_ptr<Transport>> {
    if (context.runtime == nullptr) {
      return make_error(ErrorKind::kInvalidArgument, "inproc transport: there is no runtime");
    }
    return std::make_unique<internal::InprocTransport>(core, context);
  };
}

}  // namespace weft
