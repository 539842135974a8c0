#include "weft/transport/internal/grpc/lane.h"

#include <sched.h>

#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "weft/common/wake_scope.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/grpc/bytes.h"
#include "weft/transport/internal/wire/handshake.h"

namespace weft::internal {
namespace {

// A message above this asks for the next one before it is processed, so that its bytes are on their
// way meanwhile; below, the reply should go out first.
constexpr size_t kReadAheadAbove = 16u << 10;
// So many frames behind a write are sent together, and are worth a look at the poller.
constexpr size_t kQueueCrowd = 16;
// Weight of a message in the moving average.
constexpr double kDenseWeight = 1.0 / 8;

}  // namespace

// ---- sending ---------------------------------------------------------------------------------

Status GrpcLane::send(Frame frame, Frame* rider) {
  bool crowded = false;
  Next next = Next::kNothing;
  {
    MutexLock lock(&mutex_);
    if (!may_send_) {
      return not_delivered(draining_ ? "the connection is closed" : "the connection is lost");
    }
    add(&counters_.frames_sent, rider == nullptr ? 1 : 2);
    if (frame.kind == FrameKind::kChunk) add(&counters_.chunks_sent, 1);
    if (!writing_ && queue_.empty()) {
      writing_ = true;
      if (rider != nullptr && frame_bytes(frame) + frame_bytes(*rider) > kMaxBatchBytes) {
        queue_.push_back(std::move(frame));
        frame = std::move(*rider);
        rider = nullptr;
      }
      lock.unlock();
      if (rider == nullptr) {
        write(absl::MakeSpan(&frame, 1));
      } else {
        Frame both[] = {std::move(*rider), std::move(frame)};
        write(absl::MakeSpan(both));
      }
      return absl::OkStatus();
    }
    if (queue_.empty()) queued_since_ = poller_->now();
    if (rider != nullptr) queue_.push_back(std::move(*rider));
    queue_.push_back(std::move(frame));
    crowded = queue_.size() % kQueueCrowd == 0;
    if (crowded && held_) {
      held_ = writing_ = false;
      next = next_locked();
    }
  }
  if (next != Next::kNothing) {
    act(next);
    return absl::OkStatus();
  }
  // The poller may wait for this very core: without it the peer would get nothing before the sender
  // waits, and the two would work in turns instead of side by side. Costs nothing otherwise.
  if (crowded) {
    poller_->attend();
    sched_yield();
  }
  return absl::OkStatus();
}

void GrpcLane::write(absl::Span<Frame> frames) {
  const grpc::ByteBuffer message = encode_message(frames);
  add(&counters_.writes, 1);
  if (frames.size() > 1) add(&counters_.batches, 1);
  add(&counters_.bytes_sent, static_cast<int64_t>(message.Length()));
  writer_->Write(message, &write_event_);
}

void GrpcLane::note_queued_locked() {
  // Handshakes have no time.
  if (queued_since_ == absl::InfiniteFuture()) return;
  const int64_t us = absl::ToInt64Microseconds(poller_->now() - queued_since_);
  counters_.note_queued(us);
}

// REQUIRES: writing_ is reserved by the caller and the queue is not empty.
void GrpcLane::write_batch() {
  absl::InlinedVector<Frame, 4> batch;
  {
    MutexLock lock(&mutex_);
    note_queued_locked();
    size_t bytes = 0;
    size_t n = 0;
    while (n < queue_.size()) {
      const Frame& frame = queue_[n];
      bytes += frame_bytes(frame);
      if (n > 0 && bytes > kMaxBatchBytes) break;
      ++n;
      // The dialler expects the acknowledgement alone.
      if (bytes >= kMaxBatchBytes || frame.kind == FrameKind::kHelloAck) break;
    }
    for (size_t i = 0; i < n; ++i) {
      batch.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    // The rest came later, but when is not worth remembering of each.
    queued_since_ = queue_.empty() ? absl::InfiniteFuture() : poller_->now();
  }
  write(absl::MakeSpan(batch));
}

void GrpcLane::hold_answers_locked() {
  const bool dense = seen_idle_ == poller_->idle();
  seen_idle_ = poller_->idle();
  dense_ += ((dense ? 1.0 : 0.0) - dense_) * kDenseWeight;
  if (dense_ < 0.5 || writing_ || !may_send_ || !poller_->hold(shared_from_this())) return;
  held_ = writing_ = true;
}

void GrpcLane::let_go() {
  Next next = Next::kNothing;
  {
    MutexLock lock(&mutex_);
    if (!held_) return;
    held_ = writing_ = false;
    next = next_locked();
  }
  act(next);
}

void GrpcLane::on_write(bool ok) {
  std::deque<Frame> dropped;
  Next next = Next::kNothing;
  {
    MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) {
      may_send_ = false;
      drop_queue_locked(&dropped);
    }
    next = next_locked();
  }
  act(next);
}

void GrpcLane::send_handshake(Frame frame, bool last) {
  Next next;
  {
    MutexLock lock(&mutex_);
    // A peer that goes on after a refusal gets no second one.
    if (aborted_ || read_ended_ || draining_) return;
    queue_.push_back(std::move(frame));
    if (last) draining_ = true;
    next = next_locked();
  }
  act(next);
}

void GrpcLane::cork_handshake(Frame frame) {
  MutexLock lock(&mutex_);
  if (!aborted_ && !read_ended_ && !draining_) queue_.push_back(std::move(frame));
  writing_ = true;
}

void GrpcLane::uncork() {
  Next next;
  {
    MutexLock lock(&mutex_);
    writing_ = false;
    next = next_locked();
  }
  act(next);
}

void GrpcLane::allow_sends() {
  MutexLock lock(&mutex_);
  may_send_ = !aborted_ && !read_ended_ && !ended_;
}

void GrpcLane::drop_queue_locked(std::deque<Frame>* dropped) {
  for (const Frame& frame : queue_) {
    if (frame.cookie != 0) end_.unsent.push_back(frame.cookie);
  }
  // Freed by the caller, without the lock.
  dropped->swap(queue_);
}

// ---- the state machine -----------------------------------------------------------------------

GrpcLane::Next GrpcLane::next_locked() {
  if (ended_ || writing_) return Next::kNothing;
  if (!queue_.empty() && started_ && !finishing_ && !half_closed_) {
    writing_ = true;
    return Next::kWrite;
  }
  if (finished_) {
    if (reading_) return Next::kNothing;
    ended_ = true;
    return Next::kEnd;
  }
  if (finishing_) return Next::kNothing;
  if (read_ended_ || (draining_ && role_ == Role::kAcceptor && started_)) {
    finishing_ = true;
    return Next::kFinish;
  }
  if (draining_ && started_ && !half_closed_) {
    half_closed_ = true;
    writing_ = true;
    return Next::kHalfClose;
  }
  return Next::kNothing;
}

void GrpcLane::act(Next next) {
  switch (next) {
    case Next::kNothing: return;
    case Next::kWrite: return write_batch();
    case Next::kHalfClose: return start_half_close();
    case Next::kFinish: return start_finish();
    case Next::kEnd: return end_lane();
  }
}

void GrpcLane::drain() {
  Next next;
  {
    MutexLock lock(&mutex_);
    if (draining_ || aborted_) return;
    draining_ = true;
    may_send_ = false;
    next = next_locked();
  }
  act(next);
}

void GrpcLane::abort_if(bool handshake_may_be_complete, Status why) {
  std::deque<Frame> dropped;
  Next next;
  bool must_cancel = false;
  {
    MutexLock lock(&mutex_);
    if (ended_ || (handshake_complete_ && !handshake_may_be_complete)) return;
    if (!aborted_) {
      aborted_ = true;
      if (end_.why.ok()) end_.why = std::move(why);
      must_cancel = !finished_;
    }
    may_send_ = false;
    drop_queue_locked(&dropped);
    // A dialler between the acknowledgement and the opening has no read under way that would fail.
    if (started_ && !reading_) read_ended_ = true;
    next = next_locked();
  }
  if (must_cancel) cancel();
  act(next);
}

void GrpcLane::on_finish(bool ok) {
  Next next;
  {
    MutexLock lock(&mutex_);
    finished_ = true;
    judge_end(ok, &end_);
    next = next_locked();
  }
  act(next);
}

void GrpcLane::end_lane() {
  const std::shared_ptr<GrpcLane> self = shared_from_this();
  GrpcLaneHost* host;
  std::shared_ptr<GrpcLaneHost> owner;
  LaneEnd end;
  {
    MutexLock lock(&mutex_);
    host = host_;
    owner = std::move(host_owner_);
    handler_ = nullptr;
    end = end_;
  }
  free_stream();
  host->lane_ended(*this, std::move(end));
  release();
}

// ---- receiving -------------------------------------------------------------------------------

void GrpcLane::begin_reading(grpc::internal::AsyncReaderInterface<grpc::ByteBuffer>* reader,
                             grpc::internal::AsyncWriterInterface<grpc::ByteBuffer>* writer) {
  reader_ = reader;
  writer_ = writer;
  {
    MutexLock lock(&mutex_);
    started_ = true;
    reading_ = true;
  }
  reader_->Read(&incoming_, &read_event_);
}

void GrpcLane::begin_failed() {
  Next next;
  {
    MutexLock lock(&mutex_);
    read_ended_ = true;
    next = next_locked();
  }
  act(next);
}

bool GrpcLane::open(std::shared_ptr<GrpcLaneHost> host, ConnectionHandler* handler, LaneEnd* end) {
  bool read = false;
  {
    MutexLock lock(&mutex_);
    if (ended_) {
      *end = end_;
      return false;
    }
    host_ = host.get();
    host_owner_ = std::move(host);
    handler_ = handler;
    phase_ = WireState::kOpen;
    if (!reading_ && !read_ended_) {
      reading_ = true;
      read = true;
    }
  }
  if (read) reader_->Read(&incoming_, &read_event_);
  return true;
}

void GrpcLane::on_read(bool ok) {
  std::deque<Frame> dropped;
  WireState phase = WireState::kOpen;
  GrpcLaneHost* host = nullptr;
  ConnectionHandler* handler = nullptr;
  bool ahead = false;
  Next next = Next::kNothing;
  if (ok) message_.Swap(&incoming_);
  {
    MutexLock lock(&mutex_);
    if (!ok) {
      reading_ = false;
      read_ended_ = true;
      may_send_ = false;
      drop_queue_locked(&dropped);
      next = next_locked();
    } else {
      // reading_ stays: it keeps the lane from ending while its frames are delivered.
      phase = phase_;
      host = host_;
      handler = handler_;
      ahead = phase == WireState::kOpen && !aborted_ && !finishing_ &&
              message_.Length() > kReadAheadAbove;
      hold_answers_locked();
    }
  }
  if (!ok) return act(next);
  if (ahead) reader_->Read(&incoming_, &read_event_);
  const Status status = take_message(phase, host, handler);
  if (!status.ok()) abort(status);
  if (!ahead) read_on();
}

// After a message: asks for the next one.
void GrpcLane::read_on() {
  Next next = Next::kNothing;
  bool read = false;
  {
    MutexLock lock(&mutex_);
    if (aborted_ || finishing_) {
      reading_ = false;
      read_ended_ = true;
      next = next_locked();
    } else if (phase_ == WireState::kAwaitAck) {
      // Frames may be on their way already; open() asks for them when there is a handler.
      reading_ = false;
    } else {
      read = true;
    }
  }
  if (read) {
    reader_->Read(&incoming_, &read_event_);
  } else {
    act(next);
  }
}

Status GrpcLane::take_message(WireState phase, GrpcLaneHost* host, ConnectionHandler* handler) {
  if (!message_.Dump(&slices_).ok()) {
    return make_error(ErrorKind::kProtocol, "a message that gRPC cannot read");
  }
  size_t bytes = 0;
  for (const grpc::Slice& slice : slices_) {
    pieces_.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
    bytes += slice.size();
  }
  int64_t frames = 0;
  int64_t chunks = 0;
  Status own;
  const WakeScope batch;
  Status status = frames_.read(pieces_, {phase, max_frame_bytes_}, [&](const FrameView& frame) {
    ++frames;
    chunks += frame.kind == FrameKind::kChunk ? 1 : 0;
    if (phase != WireState::kOpen) {
      host->lane_handshake(*this, frame.header);
    } else if (frame.kind >= FrameKind::kArenaProbe) {
      own = host->lane_own_frame(*this, frame);
    } else {
      handler->on_frame(frame, number_);
    }
    return own.ok();
  });
  if (status.ok()) status = std::move(own);
  add(&counters_.frames_received, frames);
  if (chunks > 0) add(&counters_.chunks_received, chunks);
  add(&counters_.bytes_received, static_cast<int64_t>(bytes));
  pieces_.clear();
  slices_.clear();
  message_.Clear();
  return status;
}

// ---- the dialler's stream --------------------------------------------------------------------

std::string lane_method(int lane) { return absl::StrCat("/weft.v1.Transport/Lane", lane); }

void GrpcClientLane::start(std::shared_ptr<grpc::Channel> channel, grpc::CompletionQueue* queue) {
  channel_ = std::move(channel);
  grpc::GenericStub stub(channel_);
  stream_ = stub.PrepareCall(context_.get(), lane_method(number()), queue);
  stream_->StartCall(&start_event_);
}

void GrpcClientLane::on_start(bool ok) {
  if (!ok) return begin_failed();
  begun_ = true;
  begin_reading(stream_.get(), stream_.get());
  host()->lane_started(*this);
}

std::shared_ptr<const grpc::AuthContext> GrpcClientLane::peer_auth() {
  MutexLock lock(&context_mutex_);
  return context_ == nullptr ? nullptr : context_->auth_context();
}

std::string GrpcClientLane::remote() {
  MutexLock lock(&context_mutex_);
  return context_ == nullptr ? std::string() : peer_address(context_->peer());
}

void GrpcClientLane::cancel() {
  MutexLock lock(&context_mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void GrpcClientLane::free_stream() {
  std::unique_ptr<grpc::ClientContext> context;
  {
    MutexLock lock(&context_mutex_);
    context = std::move(context_);
  }
  stream_ = nullptr;
  context = nullptr;
  channel_ = nullptr;
}

void GrpcClientLane::judge_end(bool ok, LaneEnd* end) {
  (void)ok;  // always true for a client's finish
  if (!end->why.ok()) return;
  end->orderly = status_.ok();
  if (status_.ok()) return;
  end->why = status_from_grpc(status_, "its stream ended");
  if (begun_) return;
  const GrpcTls::Fault fault = GrpcTls::fault(status_);
  if (tls_ == nullptr) {
    // A TLS listener has no words for plain text.
    if (fault == GrpcTls::Fault::kTurnedAway) {
      end->why =
          annotate(end->why, "it takes no plain text, perhaps; there are no credentials here");
    }
  } else if (fault == GrpcTls::Fault::kHandshake) {
    end->why = tls_->handshake_error(status_);
  } else {
    end->turned_away = fault == GrpcTls::Fault::kTurnedAway;
  }
}

}  // namespace weft::internal
