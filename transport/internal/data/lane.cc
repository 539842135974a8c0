#include "weft/transport/internal/data/lane.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/common/wake_scope.h"

namespace weft::internal {
namespace {

// A sender writes so many turns itself, then the loop goes on.
constexpr size_t kTurnsAtOnce = 2;

}  // namespace

StatusOr<std::shared_ptr<DataLane>> DataLane::make(Setup setup, UniqueFd fd, bool dials,
                                                   std::shared_ptr<DataLaneHost> host) {
  std::shared_ptr<DataLane> lane(
      new DataLane(std::move(setup), std::move(fd), dials, std::move(host)));
  if (lane->setup_.key.empty()) {
    lane->out_ = make_pipe_writer(lane->fd_.get());
    lane->in_ = make_pipe_reader(lane->fd_.get());
  } else {
    WEFT_ASSIGN_OR_RETURN(
        lane->tls_,
        TlsStream::with_key(lane->fd_.get(), dials ? TlsRole::kClient : TlsRole::kServer,
                            lane->setup_.key));
    lane->out_ = make_pipe_writer(lane->tls_);
    lane->in_ = make_pipe_reader(lane->tls_);
  }
  return lane;
}

Status DataLane::start() {
  // An acceptor's socket can be written, so it goes up at once, on the loop as everything.
  const Status added = setup_.loop->add(shared_from_this(), fd_.get(), /*writing=*/true, &client_);
  // The host holds this lane, so only this breaks the cycle of references.
  if (!added.ok()) host_ = nullptr;
  return added;
}

// ---- the greeting ------------------------------------------------------------------------------

Status DataLane::step(bool readable, bool writable) {
  switch (phase_) {
    case Phase::kConnecting:
      if (!writable) return absl::OkStatus();
      setup_.loop->watch_writing(client_, fd_.get(), false);
      return dials_ ? show_ticket() : answer();
    case Phase::kGreeting: return readable ? read_answer() : absl::OkStatus();
    case Phase::kSecuring: return secure();
    case Phase::kUp: return absl::OkStatus();
  }
  return absl::OkStatus();
}

Status DataLane::show_ticket() {
  int code = 0;
  socklen_t length = sizeof code;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &code, &length) != 0) code = errno;
  if (code != 0) return make_error(ErrorKind::kUnavailable, system_error(code));
  const std::string greeting = absl::StrCat(view(kSocketMagic), setup_.ticket);
  // It fits into the buffer of a socket that was just made.
  const ssize_t n = ::send(fd_.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
  if (n != static_cast<ssize_t>(greeting.size())) {
    return make_error(ErrorKind::kUnavailable,
                      n < 0 ? system_error(errno) : std::string("it takes no greeting"));
  }
  phase_ = Phase::kGreeting;
  return absl::OkStatus();
}

Status DataLane::read_answer() {
  char answer[kSocketMagic.size()];
  const ssize_t n = recv(fd_.get(), answer, kSocketMagic.size() - greeting_.size(), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
  if (n < 0) return make_error(ErrorKind::kUnavailable, system_error(errno));
  if (n == 0) return make_error(ErrorKind::kUnavailable, "the peer took no ticket");
  greeting_.append(answer, static_cast<size_t>(n));
  if (greeting_ != kSocketMagic.substr(0, greeting_.size())) {
    return make_error(ErrorKind::kProtocol, "the answer to a ticket is no answer of weft's");
  }
  return greeting_.size() == kSocketMagic.size() ? secure() : absl::OkStatus();
}

Status DataLane::answer() {
  if (::send(fd_.get(), kSocketMagic.data(), kSocketMagic.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(kSocketMagic.size())) {
    return make_error(ErrorKind::kUnavailable, "its dialler takes no answer");
  }
  return secure();
}

Status DataLane::secure() {
  if (tls_ == nullptr) return go_up();
  phase_ = Phase::kSecuring;
  WEFT_ASSIGN_OR_RETURN(const TlsState state, tls_->handshake());
  setup_.loop->watch_writing(client_, fd_.get(), state == TlsState::kWantWrite);
  return state == TlsState::kDone ? go_up() : absl::OkStatus();
}

Status DataLane::go_up() {
  const auto gone = [] { return make_error(ErrorKind::kUnavailable, "its connection has ended"); };
  {
    // First: when the host has heard of it, it may drain or abort it.
    MutexLock lock(&mutex_);
    if (aborted_) return gone();
    up_ = true;
    may_send_ = !draining_;
  }
  phase_ = Phase::kUp;
  handler_ = host_->data_lane_up(*this);
  {
    MutexLock lock(&mutex_);
    if (handler_ == nullptr) {
      up_ = may_send_ = false;
      return gone();
    }
    if (!draining_ || writing_ || finished_) return absl::OkStatus();
    writing_ = true;
  }
  write_on(kTurnsAtOnce);
  return absl::OkStatus();
}

// ---- sending -----------------------------------------------------------------------------------

Status DataLane::send(Frame frame) {
  OutFrame out(std::move(frame));
  {
    MutexLock lock(&mutex_);
    if (!may_send_) {
      return not_delivered(draining_ ? "the connection is closed" : "the connection is lost");
    }
    add(&counters_.frames_sent, 1);
    if (out.frame.kind == FrameKind::kChunk) add(&counters_.chunks_sent, 1);
    add(&counters_.bytes_sent, static_cast<int64_t>(out.bytes));
    if ((writing_ || blocked_) && queue_.empty()) queued_since_ = setup_.runtime->now();
    queue_.push_back(std::move(out));
    if (writing_ || blocked_) return absl::OkStatus();
    writing_ = true;
  }
  write_on(kTurnsAtOnce);
  return absl::OkStatus();
}

void DataLane::write_on(size_t turns) {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (leaving_.empty() && !queue_.empty() && !aborted_) {
        leaving_.swap(queue_);
        if (queued_since_ != absl::InfiniteFuture()) {
          counters_.note_queued(absl::ToInt64Microseconds(setup_.runtime->now() - queued_since_));
          queued_since_ = absl::InfiniteFuture();
        }
      }
      if (aborted_ || (leaving_.empty() && !out_->pending())) {
        if (draining_ && !aborted_) {
          finished_ = true;
          shutdown(fd_.get(), SHUT_WR);
        }
        return stop_writing_locked();
      }
    }
    add(&counters_.writes, 1);
    const StatusOr<PipeState> state = out_->write(&leaving_, turns * setup_.loop->turn().bytes());
    if (!state.ok()) {
      // on_called() ends it.
      MutexLock lock(&mutex_);
      may_send_ = false;
      if (!aborted_ && why_.ok()) why_ = state.status();
      aborted_ = true;
      return stop_writing_locked();
    }
    if (*state != PipeState::kDone) {
      // Before the right to write is given back: so the socket is there still. The loop may come
      // too early then, and comes again.
      setup_.loop->watch_writing(client_, fd_.get(), true);
      MutexLock lock(&mutex_);
      blocked_ = true;
      return stop_writing_locked();
    }
  }
}

void DataLane::stop_writing_locked() {
  writing_ = false;
  if (may_end_locked() && !ended_) setup_.loop->call(client_);
}

void DataLane::drain() {
  {
    MutexLock lock(&mutex_);
    if (draining_ || aborted_) return;
    draining_ = true;
    may_send_ = false;
    Frame last;
    last.kind = FrameKind::kDataEnd;
    queue_.emplace_back(std::move(last));
    // One that is not up yet goes on with its greeting: the peer may have sent over it already.
    if (!up_ || writing_ || blocked_) return;
    writing_ = true;
  }
  write_on(kTurnsAtOnce);
}

void DataLane::abort(Status why) {
  MutexLock lock(&mutex_);
  if (ended_ || aborted_) return;
  aborted_ = true;
  may_send_ = false;
  if (why_.ok()) why_ = std::move(why);
  // A thread that writes finds the socket closed.
  shutdown(fd_.get(), SHUT_RDWR);
  setup_.loop->call(client_);
}

void DataLane::give_up(Status why) {
  {
    MutexLock lock(&mutex_);
    if (up_) return;
  }
  abort(std::move(why));
}

// ---- on the loop -------------------------------------------------------------------------------

void DataLane::on_called() { end_if_due(); }

void DataLane::on_stopped() {
  break_off(make_error(ErrorKind::kState, "the transport was shut down"));
}

bool DataLane::on_ready(bool readable, bool writable) {
  if (phase_ != Phase::kUp) {
    if (const Status status = step(readable, writable); !status.ok()) {
      break_off(status);
      return false;
    }
    // Frames may have come with the last bytes of the handshake.
    if (phase_ != Phase::kUp || tls_ == nullptr) return false;
    readable = true;
    writable = false;
  }
  if (writable) {
    bool write = false;
    {
      MutexLock lock(&mutex_);
      // The sender that was blocked has not gone yet; the loop comes again.
      if (!writing_ && blocked_ && !aborted_) {
        blocked_ = false;
        writing_ = write = true;
      }
    }
    if (write) {
      setup_.loop->watch_writing(client_, fd_.get(), false);
      write_on(1);
    }
  }
  if (readable) {
    const WakeScope batch;
    const StatusOr<PipeState> state = in_->read(&reader_, setup_.loop->turn().bytes());
    bool ended = state.ok() && *state == PipeState::kEnded;
    if (!state.ok()) {
      // A peer that has read our data_end closes, and has nothing more to send.
      MutexLock lock(&mutex_);
      ended = finished_ && error_kind(state.status()) == ErrorKind::kUnavailable;
    }
    if (!state.ok() && !ended) {
      break_off(state.status());
      return false;
    }
    if (ended) {
      MutexLock lock(&mutex_);
      read_ended_ = true;
      may_send_ = false;
    }
  }
  end_if_due();
  return !setup_.prompt;
}

void DataLane::break_off(Status why) {
  // As abort(), but the peer sees nothing of it before the host knows why: what the peer then does
  // would look like the reason.
  {
    MutexLock lock(&mutex_);
    if (!aborted_ && why_.ok()) why_ = std::move(why);
    aborted_ = true;
    may_send_ = false;
  }
  end_if_due();
}

void DataLane::end_if_due() {
  LaneEnd end;
  std::deque<OutFrame> dropped;
  std::deque<OutFrame> leaving;
  bool was_up = false;
  {
    MutexLock lock(&mutex_);
    if (ended_) return;
    if (!may_end_locked()) {
      // The writing thread has to learn it from the socket, and then calls the loop.
      if ((read_ended_ || aborted_) && writing_) shutdown(fd_.get(), SHUT_RDWR);
      return;
    }
    ended_ = true;
    may_send_ = false;
    was_up = up_;
    end.orderly = !aborted_;
    end.why = why_;
    dropped.swap(queue_);
    leaving.swap(leaving_);
  }
  for (const auto* frames : {&leaving, &dropped}) {
    for (const OutFrame& out : *frames) {
      if (out.frame.cookie != 0 && !out.begun()) end.unsent.push_back(out.frame.cookie);
    }
  }
  const std::shared_ptr<DataLane> self = shared_from_this();
  setup_.loop->remove(client_, fd_.get());
  handler_ = nullptr;
  // It holds this lane, as this lane holds it.
  const std::shared_ptr<DataLaneHost> host = std::move(host_);
  host->data_lane_ended(*this, was_up, std::move(end));
  // The descriptor is closed with the lane, which its connection may hold.
  shutdown(fd_.get(), SHUT_RDWR);
}

// ---- receiving ---------------------------------------------------------------------------------

Status DataLane::go_on() {
  MutexLock lock(&mutex_);
  // What has come behind a frame that the handler did not like is not for it.
  return aborted_ ? make_error(ErrorKind::kUnavailable, "the connection has ended")
                  : absl::OkStatus();
}

ChunkTarget DataLane::stream_target(std::string_view header, size_t bytes) {
  return handler_->chunk_target(header, bytes, number());
}

Status DataLane::stream_filled(std::string_view header, size_t bytes) {
  add(&counters_.frames_received, 1);
  add(&counters_.chunks_received, 1);
  add(&counters_.bytes_received, static_cast<int64_t>(kPrefixBytes + header.size() + bytes));
  handler_->chunk_filled(header, bytes, number());
  return go_on();
}

Status DataLane::stream_frame(const FrameView& frame) {
  add(&counters_.frames_received, 1);
  if (frame.kind == FrameKind::kChunk) add(&counters_.chunks_received, 1);
  add(&counters_.bytes_received,
      static_cast<int64_t>(kPrefixBytes + frame.header.size() + frame.payload_bytes));
  handler_->on_frame(frame, number());
  return go_on();
}

}  // namespace weft::internal
