#include "weft/transport/internal/grpc/connection.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/grpc/core.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {
GrpcConnection::GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own,
                               std::string address, GrpcChannels::List channels,
                               std::shared_ptr<ConnectionHandler> handler, GrpcDialDone done)
    : core_(std::move(core)),
      dialled_(true),
      own_(own),
      address_(std::move(address)),
      channels_(this, std::move(channels)),
      late_(std::make_shared<GrpcLateLanes>(this, own_.lanes, own_.late_lanes)),
      state_(State::kDialling),
      handler_(std::move(handler)),
      done_(std::move(done)) {}

GrpcConnection::GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own,
                               const Hello& peer, std::string address, GrpcChannels::List channels,
                               Lanes lanes)
    : core_(std::move(core)),
      dialled_(false),
      own_(own),
      address_(std::move(address)),
      channels_(this, std::move(channels)),
      local_(address_ == kLocalPeer),
      lanes_(std::move(lanes)),
      late_(std::make_shared<GrpcLateLanes>(this, peer.lanes, peer.late_lanes)),
      peer_(peer),
      state_(State::kOpen) {}

std::string GrpcConnection::describe() const { return describe_peer(peer_, address_); }

Status GrpcConnection::send(Frame frame, int lane) {
  const size_t index = static_cast<size_t>(lane) - lanes();
  if (lane < 0 || (static_cast<size_t>(lane) >= lanes() && index >= channels_.lanes())) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("lane ", lane, " of a connection with ", lanes()));
  }
  WEFT_RETURN_IF_ERROR(check_sendable(frame, peer_.max_frame_bytes));
  if (static_cast<size_t>(lane) >= lanes_.size()) {
    Status sent = static_cast<size_t>(lane) < lanes()
                      ? late_->send(std::move(frame), static_cast<size_t>(lane) - lanes_.size())
                      : channels_.send(std::move(frame), index);
    return sent.ok() ? sent : annotate(sent, describe());
  }
  if (lane == kControlLane &&
      (frame.kind == FrameKind::kRequest || frame.kind == FrameKind::kResponse)) {
    channels_.note_small();
  }
  std::optional<Frame> rider = channels_.take_rider();
  Status sent = lanes_[static_cast<size_t>(lane)]->send(std::move(frame),
                                                        rider.has_value() ? &*rider : nullptr);
  return sent.ok() ? sent : annotate(sent, describe());
}

LaneRange GrpcConnection::bulk_lanes() const {
  const size_t ready = channels_.bulk_lanes();
  if (ready == 0) return Connection::bulk_lanes();
  return {static_cast<int>(lanes()), static_cast<int>(ready)};
}

bool GrpcConnection::lane_begun(int lane) const {
  const auto number = static_cast<size_t>(lane);
  return number < lanes_.size() || number >= lanes() || late_->begun();
}

ConnectionStats GrpcConnection::stats() const {
  ConnectionStats out;
  out.way = local_ ? "Unix socket" : core_->tls() != nullptr ? "TCP with TLS" : "TCP";
  out.dialled = dialled_;
  for (const auto& lane : lanes_) out.lanes.push_back(lane->stats());
  for (const LaneStats& lane : late_->stats()) out.lanes.push_back(lane);
  for (const LaneStats& lane : channels_.lane_stats()) out.lanes.push_back(lane);
  channels_.add_to(&out);
  return out;
}

std::optional<Placement> GrpcConnection::place(std::string_view bytes) {
  return channels_.place(bytes);
}

void GrpcConnection::unplace(const Placement& placement) { channels_.unplace(placement); }

StatusOr<Borrowed> GrpcConnection::borrow(const Placement& placement, uint64_t length) {
  return channels_.borrow(placement, length);
}

Status GrpcConnection::lane_own_frame(GrpcLane& lane, const FrameView& frame) {
  if (frame.kind == FrameKind::kLanesWanted) return late_->asked();
  return channels_.on_own_frame(frame, lane.number());
}

// ---- for channels ------------------------------------------------------------------------------

StatusOr<UniqueFd> GrpcConnection::dial_socket() {
  if (!local_) return begin_connect(lanes_[kControlLane]->remote());
  return connect_local(local_socket_name(split_address(address_).local), SOCK_STREAM);
}

void GrpcConnection::send_own(Frame frame) {
  lanes_[kControlLane]->send(std::move(frame)).IgnoreError();
}

bool GrpcConnection::is_open() const {
  MutexLock lock(&mutex_);
  return state_ == State::kOpen && !closing_ && !ending_;
}

bool GrpcConnection::channel_lanes_begun(size_t count) {
  MutexLock lock(&mutex_);
  if (state_ != State::kOpen || closing_ || ending_) return false;
  channel_lanes_begun_ += count;
  return true;
}

ConnectionHandler* GrpcConnection::channel_lane_up() {
  MutexLock lock(&mutex_);
  return state_ == State::kOpen ? handler_.get() : nullptr;
}

// ---- for late lanes ----------------------------------------------------------------------------

void GrpcConnection::ask_for_lanes() {
  Frame want;
  want.kind = FrameKind::kLanesWanted;
  send_own(std::move(want));
}

void GrpcConnection::no_late_lanes(const Status& why) {
  WEFT_LOG(core_->context().log, kWarning)
      << "large messages to " << describe()
      << " go by its control lane, without bulk lanes: " << why.message();
  if (dialled_) ask_for_lanes();  // the same frame, the other way
}

void GrpcConnection::limit_making(std::weak_ptr<Timed> what) {
  core_->set_deadline(core_->drain_deadline(), std::move(what));
}

StatusOr<Hello> GrpcConnection::check_ack(GrpcLane& lane, std::string_view header) const {
  WEFT_ASSIGN_OR_RETURN(Hello theirs, decode_ack(header, own_, lane.number()));
  WEFT_RETURN_IF_ERROR(check_identity(lane, theirs.name, theirs.id));
  return theirs;
}

std::shared_ptr<GrpcClientLane> GrpcConnection::new_lane(int number, GrpcLaneHost* host) {
  return core_->new_lane(number, host);
}

void GrpcConnection::start_lane(const std::shared_ptr<GrpcClientLane>& lane) {
  core_->start_lane(lane, address_, local_);
}

void GrpcConnection::not_sent(std::vector<uint64_t> cookies) {
  MutexLock lock(&mutex_);
  for (const uint64_t cookie : cookies) {
    if (cookie != 0) lost_.unsent.push_back(cookie);
  }
}

bool GrpcConnection::take_late(const Lanes& lanes, const Hello& own) {
  if (!late_->claim()) return false;
  if (!channel_lanes_begun(lanes.size())) {
    late_->let_go();
    return false;
  }
  for (const auto& lane : lanes) {
    Frame answer;
    answer.kind = FrameKind::kHelloAck;
    answer.header = encode_ack(own, lane->number());
    lane->cork_handshake(std::move(answer));
  }
  for (const auto& lane : lanes) lane->allow_sends();
  late_->take(lanes);
  for (const auto& lane : lanes) lane->uncork();
  return true;
}

// ---- closing -----------------------------------------------------------------------------------

void GrpcConnection::close(Status reason) {
  {
    MutexLock lock(&mutex_);
    if (closing_ || state_ != State::kOpen) return;
    closing_ = true;
    lost_.why = reason;
  }
  if (!reason.ok()) return abort_lanes(reason);
  core_->set_deadline(core_->drain_deadline(), weak_from_this());
  drain_lanes();
}

void GrpcConnection::fail(Status why) {
  {
    MutexLock lock(&mutex_);
    if (!closing_) {
      closing_ = true;
      lost_.why = why;
    }
  }
  abort_lanes(why);
}

void GrpcConnection::leave(const Status& why) {
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kOpen) {
      if (!closing_) lost_.why = why;
      closing_ = true;
    }
    if (state_ != State::kDialling) {
      lock.unlock();
      drain_lanes();
      return;
    }
  }
  fail(annotate(why, absl::StrCat("dial of ", address_)));
}

void GrpcConnection::drain_lanes() {
  channels_.drain();
  if (late_->drain()) drain_control();
}

void GrpcConnection::drain_control() {
  for (const auto& lane : lanes_) lane->drain();
}

void GrpcConnection::abort_lanes(const Status& why) {
  channels_.abort(why);
  late_->abort(why);
  for (const auto& lane : lanes_) lane->abort(why);
}

void GrpcConnection::on_deadline() {
  bool dialling;
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kLost) return;
    dialling = state_ == State::kDialling;
    if (!dialling && !closing_ && !ending_) return;  // the dial's deadline, long after it
  }
  if (dialling) {
    fail(make_error(ErrorKind::kDeadline,
                    absl::StrCat("dial of ", address_, ": no answer within the deadline")));
  } else {
    const Status late =
        make_error(ErrorKind::kUnavailable,
                   absl::StrCat("the connection to ", describe(), " did not drain in time"));
    {
      MutexLock lock(&mutex_);
      if (lost_.why.ok()) lost_.why = late;
    }
    abort_lanes(late);
  }
}

// ---- the dial --------------------------------------------------------------------------------

Status GrpcConnection::check_identity(GrpcLane& lane, std::string_view name,
                                      std::optional<uint32_t> rank) const {
  const std::shared_ptr<const GrpcTls>& tls = core_->tls();
  if (tls == nullptr) return absl::OkStatus();
  const std::shared_ptr<const grpc::AuthContext> peer = lane.peer_auth();
  if (peer == nullptr) return make_error(ErrorKind::kUnavailable, "its stream is gone");
  return tls->check_peer(*peer, name, rank);
}

void GrpcConnection::lane_started(GrpcLane& lane) {
  Frame hello;
  hello.kind = FrameKind::kHello;
  std::string_view token;
  if (core_->tls() != nullptr) {
    // Before the token leaves, the peer must have proved to be the wanted one.
    const std::optional<uint32_t> rank =
        own_.to_id != 0 ? std::optional<uint32_t>(own_.to_id) : std::nullopt;
    const Status wanted =
        own_.to_name.empty() ? absl::OkStatus() : check_identity(lane, own_.to_name, rank);
    if (!wanted.ok()) return fail(annotate(wanted, absl::StrCat("dial of ", address_)));
    token = core_->tls()->credentials().token;
  }
  hello.header = encode_hello(own_, lane.number(), token);
  lane.send_handshake(std::move(hello), /*last=*/false);
}

void GrpcConnection::lane_handshake(GrpcLane& lane, std::string_view header) {
  StatusOr<Hello> theirs = check_ack(lane, header);
  if (!theirs.ok()) return fail(annotate(theirs.status(), absl::StrCat("dial of ", address_)));
  {
    MutexLock lock(&mutex_);
    if (closing_ || ++lanes_acked_ < lanes_.size()) return;
    peer_ = *std::move(theirs);
  }
  open_dialled();
}

void GrpcConnection::open_dialled() {
  GrpcDialDone done;
  ConnectionHandler* handler = nullptr;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kDialling || closing_ || ending_) return;
    state_ = State::kOpen;
    done = std::exchange(done_, nullptr);
    handler = handler_.get();
  }
  const std::shared_ptr<GrpcConnection> self = shared_from_this();
  for (const auto& lane : lanes_) lane->allow_sends();
  channels_.start();
  done(self, false);
  // Reads begin only now, so that no frame comes before `done`.
  for (const auto& lane : lanes_) {
    LaneEnd end;
    // A lane that has ended before said so to this object, its host from the start.
    (void)lane->open(self, handler, &end);
  }
  channels_.opened();
}

void GrpcConnection::open_accepted(std::shared_ptr<ConnectionHandler> handler) {
  ConnectionHandler* const raw = handler.get();
  {
    MutexLock lock(&mutex_);
    handler_ = std::move(handler);
  }
  channels_.start();
  const std::shared_ptr<GrpcConnection> self = shared_from_this();
  for (const auto& lane : lanes_) {
    LaneEnd end;
    if (!lane->open(self, raw, &end)) lane_ended(*lane, std::move(end));
  }
  channels_.opened();
}

// ---- the end ---------------------------------------------------------------------------------

void GrpcConnection::lane_ended(GrpcLane& lane, LaneEnd end) {
  (void)lane;
  one_ended(std::move(end), /*was_up=*/true);
}

void GrpcConnection::one_ended(LaneEnd end, bool was_up) {
  // As soon as this lane is counted, another thread may find the last one and forget the
  // connection.
  const std::shared_ptr<GrpcConnection> self = shared_from_this();
  bool last = false;
  bool first = false;
  bool broken = false;
  bool turned_away = false;
  GrpcDialDone done;
  std::shared_ptr<ConnectionHandler> handler;
  Lost lost;
  {
    MutexLock lock(&mutex_);
    first = was_up && !ending_;
    if (first) {
      ending_ = true;
      if (!closing_) {
        const std::string what =
            dialled_ && state_ == State::kDialling
                ? absl::StrCat("dial of ", address_)
                : absl::StrCat("the connection to ", peer_.name, " (", address_, ") ",
                               end.orderly ? "was closed by the peer" : "was lost");
        lost_.why =
            end.orderly ? make_error(ErrorKind::kUnavailable, what) : annotate(end.why, what);
      }
    }
    lost_.unsent.insert(lost_.unsent.end(), end.unsent.begin(), end.unsent.end());
    broken = was_up && (!end.orderly || state_ == State::kDialling);
    last = ++lanes_ended_ == lanes_.size() + channel_lanes_begun_;
    if (state_ == State::kDialling && done_ != nullptr) {
      done = std::exchange(done_, nullptr);
      lost.why = lost_.why;
      turned_away = end.turned_away && !closing_;
    }
    if (last) {
      for (const uint64_t cookie : late_->close()) lost_.unsent.push_back(cookie);
      if (state_ == State::kOpen) {
        handler = std::move(handler_);
        lost = lost_;
      }
      handler_ = nullptr;
      state_ = State::kLost;
    }
  }
  if (done != nullptr) done(lost.why, turned_away);
  if (handler != nullptr) handler->on_lost(std::move(lost));
  if (last) channels_.close();
  if (last) {
    core_->forget(this);
  } else if (broken) {
    abort_lanes(make_error(ErrorKind::kUnavailable, "another lane of the connection broke"));
  } else if (first) {
    core_->set_deadline(core_->drain_deadline(), weak_from_this());
  }
}

}  // namespace weft::internal
