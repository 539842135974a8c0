#include "weft/transport/internal/grpc/connection.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/grpc/core.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::internal {
namespace {

// What is free waits so long for a frame with which it can travel.
constexpr absl::Duration kFreeDelay = absl::Milliseconds(10);

}  // namespace

// Armed once while something waits, not at every free.
class GrpcConnection::FreeTimer final : public GrpcTimed {
 public:
  void bind(std::weak_ptr<GrpcConnection> connection) { connection_ = std::move(connection); }
  bool arm() { return !armed_.exchange(true, std::memory_order_relaxed); }
  void on_deadline() override {
    armed_.store(false, std::memory_order_relaxed);
    const std::shared_ptr<GrpcConnection> connection = connection_.lock();
    if (connection == nullptr || !connection->arena_->frees_wait()) return;
    connection->send_arena_frame(FrameKind::kArenaFree, connection->arena_->take_frees());
    // More than fits into one frame, or freed meanwhile.
    if (connection->arena_->frees_wait()) connection->frees_waiting();
  }

 private:
  std::weak_ptr<GrpcConnection> connection_;  // set before the first use
  std::atomic<bool> armed_{false};
};

GrpcConnection::GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own,
                               std::string address, std::shared_ptr<ArenaLink> arena,
                               std::shared_ptr<ConnectionHandler> handler, GrpcDialDone done)
    : core_(std::move(core)),
      dialled_(true),
      own_(own),
      address_(std::move(address)),
      arena_(std::move(arena)),
      free_timer_(std::make_shared<FreeTimer>()),
      data_timer_(make_data_timer()),
      state_(State::kDialling),
      handler_(std::move(handler)),
      done_(std::move(done)) {}

GrpcConnection::GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own,
                               const Hello& peer, std::string address,
                               std::shared_ptr<ArenaLink> arena, Lanes lanes)
    : core_(std::move(core)),
      dialled_(false),
      own_(own),
      address_(std::move(address)),
      arena_(std::move(arena)),
      free_timer_(std::make_shared<FreeTimer>()),
      local_(address_ == kLocalPeer),
      lanes_(std::move(lanes)),
      peer_(peer),
      data_timer_(make_data_timer()),
      state_(State::kOpen) {}

std::string GrpcConnection::describe() const { return describe_peer(peer_, address_); }

Status GrpcConnection::send(Frame frame, int lane) {
  const size_t index = static_cast<size_t>(lane) - lanes_.size();
  if (lane < 0 || (static_cast<size_t>(lane) >= lanes_.size() &&
                   index >= data_ready_.load(std::memory_order_acquire))) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("lane ", lane, " of a connection with ", lanes_.size()));
  }
  WEFT_RETURN_IF_ERROR(check_sendable(frame, peer_.max_frame_bytes));
  if (static_cast<size_t>(lane) >= lanes_.size()) {
    Status sent = data_[index]->send(std::move(frame));
    return sent.ok() ? sent : annotate(sent, describe());
  }
  if (lane == kControlLane &&
      (frame.kind == FrameKind::kRequest || frame.kind == FrameKind::kResponse)) {
    core_->data_loop()->turn().note_small();
  }
  Frame frees;
  Frame* rider = nullptr;
  if (arena_ != nullptr && arena_->frees_wait()) {
    frees.kind = FrameKind::kArenaFree;
    frees.header = arena_->take_frees();
    if (!frees.header.empty()) rider = &frees;
  }
  Status sent = lanes_[static_cast<size_t>(lane)]->send(std::move(frame), rider);
  if (!sent.ok()) return annotate(sent, describe());
  return sent;
}

ConnectionStats GrpcConnection::stats() const {
  ConnectionStats out;
  out.way = local_ ? "Unix socket" : core_->tls() != nullptr ? "TCP with TLS" : "TCP";
  out.dialled = dialled_;
  for (const auto& lane : lanes_) out.lanes.push_back(lane->stats());
  for (const LaneStats& lane : data_stats()) out.lanes.push_back(lane);
  out.data = describe_data();
  out.arena_hits = arena_hits_.load();
  out.arena_hit_bytes = arena_hit_bytes_.load();
  out.arena_fallbacks = arena_fallbacks_.load();
  out.arena_fallback_bytes = arena_fallback_bytes_.load();
  out.arena =
      arena_ != nullptr ? arena_->describe() : "the peer is not on this host's local socket";
  return out;
}

// ---- shared memory ---------------------------------------------------------------------------

std::optional<Placement> GrpcConnection::place(std::string_view bytes) {
  std::optional<Placement> placed;
  if (arena_ != nullptr) placed = arena_->lend(bytes);
  ++(placed.has_value() ? arena_hits_ : arena_fallbacks_);
  (placed.has_value() ? arena_hit_bytes_ : arena_fallback_bytes_) +=
      static_cast<int64_t>(bytes.size());
  if (placed.has_value()) core_->poller()->note_bulk();
  return placed;
}

void GrpcConnection::unplace(const Placement& placement) {
  if (arena_ != nullptr) arena_->take_back(placement);
}

StatusOr<Borrowed> GrpcConnection::borrow(const Placement& placement, uint64_t length) {
  if (arena_ == nullptr) return Connection::borrow(placement, length);
  core_->poller()->note_bulk();
  return arena_->borrow(placement, length);
}

Status GrpcConnection::lane_own_frame(GrpcLane& lane, const FrameView& frame) {
  if (frame.kind == FrameKind::kDataOffer) return on_data_offer(frame.header);
  if (arena_ == nullptr || frame.kind == FrameKind::kDataEnd) {
    return make_error(ErrorKind::kProtocol,
                      absl::StrCat("a frame of kind ", view(frame_kind_name(frame.kind)),
                                   " on lane ", lane.number(), " of this connection"));
  }
  if (frame.kind == FrameKind::kArenaFree) return arena_->on_free(frame.header);
  return arena_->on_probe(frame.header);
}

void GrpcConnection::send_arena_frame(FrameKind kind, std::string header) {
  if (header.empty()) return;
  Frame frame;
  frame.kind = kind;
  frame.header = std::move(header);
  // A connection that is lost needs neither.
  lanes_[kControlLane]->send(std::move(frame)).IgnoreError();
}

void GrpcConnection::frees_waiting() {
  if (free_timer_->arm()) core_->set_deadline(core_->runtime().now() + kFreeDelay, free_timer_);
}

void GrpcConnection::lending_settled(bool lends, std::string_view why_not) {
  core_->count_lending(lends);
  if (lends) return;
  WEFT_LOG(core_->context().log, kInfo) << "no memory is shared with " << describe()
                                        << ", large tensors to it go by the socket: " << why_not;
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
  for (const auto& lane : data_lanes()) lane->drain();
  for (const auto& lane : lanes_) lane->drain();
}

void GrpcConnection::abort_lanes(const Status& why) {
  for (const auto& lane : data_lanes()) lane->abort(why);
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
    // Before the token leaves, whoever gets it has shown to be the one that is wanted.
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
  StatusOr<Hello> theirs = decode_ack(header, own_, lane.number());
  Status status = theirs.status();
  if (status.ok()) status = check_identity(lane, theirs->name, theirs->id);
  if (!status.ok()) return fail(annotate(status, absl::StrCat("dial of ", address_)));
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
  share_memory();
  done(self, false);
  // Reads begin only now, so that no frame comes before `done`.
  for (const auto& lane : lanes_) {
    LaneEnd end;
    // A lane that has ended before said so to this object, its host from the start.
    (void)lane->open(self, handler, &end);
  }
}

void GrpcConnection::open_accepted(std::shared_ptr<ConnectionHandler> handler) {
  ConnectionHandler* const raw = handler.get();
  {
    MutexLock lock(&mutex_);
    handler_ = std::move(handler);
  }
  share_memory();
  const std::shared_ptr<GrpcConnection> self = shared_from_this();
  for (const auto& lane : lanes_) {
    LaneEnd end;
    if (!lane->open(self, raw, &end)) lane_ended(*lane, std::move(end));
  }
  offer_data();
}

void GrpcConnection::share_memory() {
  if (arena_ == nullptr) return;
  free_timer_->bind(weak_from_this());
  arena_->start(shared_from_this());
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
    last = ++lanes_ended_ == lanes_.size() + data_begun_;
    if (state_ == State::kDialling && done_ != nullptr) {
      done = std::exchange(done_, nullptr);
      lost.why = lost_.why;
      turned_away = end.turned_away && !closing_;
    }
    if (last) {
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
  if (last && arena_ != nullptr) arena_->close();
  if (last) {
    core_->forget(this);
  } else if (broken) {
    abort_lanes(make_error(ErrorKind::kUnavailable, "another lane of the connection broke"));
  } else if (first) {
    core_->set_deadline(core_->drain_deadline(), weak_from_this());
  }
}

}  // namespace weft::internal
