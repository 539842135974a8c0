#include "weft/transport/internal/grpc/late_lanes.h"

#include <optional>

#include "weft/transport/internal/wire/lane_counters.h"

namespace weft::internal {

bool GrpcLateLanes::begun() const {
  MutexLock lock(&mutex_);
  return state_ != State::kNone;
}

std::vector<LaneStats> GrpcLateLanes::stats() const {
  std::vector<LaneStats> out(count_);
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < lanes_.size(); ++i) out[i] = lanes_[i]->stats();
  return out;
}

Status GrpcLateLanes::send(Frame frame, size_t index) {
  std::shared_ptr<GrpcLane> lane;
  bool first = false;
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kOver || draining_) {
      return not_delivered(state_ == State::kOver ? "the connection is lost"
                                                  : "the connection is closed");
    }
    if (state_ == State::kUp) {
      lane = lanes_[index];
    } else {
      waiting_.emplace_back(index, std::move(frame));
      first = state_ == State::kNone;
      if (first) state_ = State::kWanted;
    }
  }
  if (lane != nullptr) return lane->send(std::move(frame));
  if (first) make();
  return absl::OkStatus();
}

Status GrpcLateLanes::asked() {
  if (!connection_->dialled()) {
    return make_error(ErrorKind::kProtocol, "a dialler asks for lanes that it makes itself");
  }
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kNone) return absl::OkStatus();
    state_ = State::kWanted;
  }
  make();
  return absl::OkStatus();
}

// On one thread at a time: that which made them wanted.
void GrpcLateLanes::make() {
  connection_->limit_making(weak_from_this());
  if (!connection_->dialled()) return connection_->ask_for_lanes();
  // Else the connection ends, and what waits is told then.
  if (!connection_->channel_lanes_begun(count_)) return;
  std::vector<std::shared_ptr<GrpcClientLane>> made;
  for (size_t i = 0; i < count_; ++i) {
    made.push_back(connection_->new_lane(static_cast<int>(first_ + i), this));
  }
  bool over = false;
  {
    MutexLock lock(&mutex_);
    lanes_.assign(made.begin(), made.end());
    over = state_ == State::kOver;
  }
  for (const auto& lane : made) connection_->start_lane(lane);
  if (!over) return;
  for (const auto& lane : made)
    lane->abort(make_error(ErrorKind::kUnavailable, "the connection ends"));
}

void GrpcLateLanes::take(Lanes lanes) {
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kNone || state_ == State::kWanted) lanes_ = lanes;
    if (state_ == State::kNone) state_ = State::kWanted;
  }
  go_up(std::move(lanes));
}

void GrpcLateLanes::go_up(Lanes lanes) {
  const std::shared_ptr<GrpcLaneHost> connection = connection_->shared_host();
  // Not null: the connection is not lost before its lanes have ended.
  ConnectionHandler* const handler = connection_->channel_lane_up();
  bool over = false;
  {
    MutexLock lock(&mutex_);
    over = state_ != State::kWanted;
    if (!over) state_ = State::kSending;
  }
  if (over) {
    const Status why = make_error(ErrorKind::kUnavailable, "the connection ends");
    for (const auto& lane : lanes) lane->abort(why);
  }
  for (const auto& lane : lanes) {
    LaneEnd end;
    if (!lane->open(connection, handler, &end)) connection->lane_ended(*lane, std::move(end));
  }
  while (true) {
    std::optional<std::pair<size_t, Frame>> next;
    bool drains = false;
    {
      MutexLock lock(&mutex_);
      if (state_ != State::kSending) return;
      if (waiting_.empty()) {
        state_ = State::kUp;
        drains = draining_;
      } else {
        next = std::move(waiting_.front());
        waiting_.pop_front();
      }
    }
    if (!next.has_value()) {
      if (!drains) return;
      for (const auto& lane : lanes) lane->drain();
      return connection_->drain_control();
    }
    const uint64_t cookie = next->second.cookie;
    // A lane that has ended takes nothing, and the connection ends with it.
    if (!lanes[next->first]->send(std::move(next->second)).ok()) connection_->not_sent({cookie});
  }
}

// ---- the end -----------------------------------------------------------------------------------

bool GrpcLateLanes::drain() {
  Lanes lanes;
  {
    MutexLock lock(&mutex_);
    draining_ = true;
    if (state_ == State::kWanted || state_ == State::kSending) return false;
    if (state_ == State::kNone) state_ = State::kOver;  // LATE-3
    if (state_ == State::kUp) lanes = lanes_;
  }
  for (const auto& lane : lanes) lane->drain();
  return true;
}

void GrpcLateLanes::abort(const Status& why) {
  Lanes lanes;
  std::deque<std::pair<size_t, Frame>> dropped;  // freed without the lock
  {
    MutexLock lock(&mutex_);
    state_ = State::kOver;
    lanes = lanes_;
    dropped.swap(waiting_);
  }
  std::vector<uint64_t> cookies;
  for (const auto& [index, frame] : dropped) cookies.push_back(frame.cookie);
  connection_->not_sent(std::move(cookies));
  for (const auto& lane : lanes) lane->abort(why);
}

std::vector<uint64_t> GrpcLateLanes::close() {
  std::deque<std::pair<size_t, Frame>> dropped;
  {
    MutexLock lock(&mutex_);
    state_ = State::kOver;
    dropped.swap(waiting_);
  }
  std::vector<uint64_t> cookies;
  for (const auto& [index, frame] : dropped) {
    if (frame.cookie != 0) cookies.push_back(frame.cookie);
  }
  return cookies;
}

void GrpcLateLanes::on_deadline() {
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kWanted) return;
  }
  connection_->fail(make_error(ErrorKind::kUnavailable, "its bulk lanes did not come up in time"));
}

// ---- the dialler's handshake -------------------------------------------------------------------

void GrpcLateLanes::lane_started(GrpcLane& lane) { connection_->lane_started(lane); }

void GrpcLateLanes::lane_handshake(GrpcLane& lane, std::string_view header) {
  const Status status = connection_->check_ack(lane, header).status();
  if (!status.ok()) return connection_->fail(annotate(status, "its bulk lanes"));
  Lanes lanes;
  {
    MutexLock lock(&mutex_);
    if (++acknowledged_ < count_ || state_ != State::kWanted) return;
    lanes = lanes_;
  }
  for (const auto& one : lanes) one->allow_sends();
  go_up(std::move(lanes));
}

Status GrpcLateLanes::lane_own_frame(GrpcLane& lane, const FrameView& frame) {
  return connection_->lane_own_frame(lane, frame);
}

void GrpcLateLanes::lane_ended(GrpcLane& lane, LaneEnd end) {
  connection_->lane_ended(lane, std::move(end));
}

}  // namespace weft::internal
