#include "weft/transport/internal/grpc/late_lanes.h"

#include <optional>

#include "weft/transport/internal/descriptors.h"
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
    if (state_ == State::kKnown) {
      lane = ways_[index];
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
  if (count_ == 0) {
    return make_error(ErrorKind::kProtocol, "a peer speaks of lanes that its hello has not");
  }
  bool first = false;
  {
    MutexLock lock(&mutex_);
    first = state_ == State::kNone;
    if (first) state_ = State::kWanted;
  }
  if (!connection_->dialled()) {
    give_up(make_error(ErrorKind::kUnavailable, "the peer cannot make them"));
  } else if (first) {
    make();
  }
  return absl::OkStatus();
}

// On one thread at a time: that which made them wanted.
void GrpcLateLanes::make() {
  connection_->limit_making(weak_from_this());
  if (!connection_->dialled()) return connection_->ask_for_lanes();
  if (const Status room = check_descriptors(count_); !room.ok()) {
    return give_up(room);
  }
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
    over = state_ != State::kWanted;
  }
  for (const auto& lane : made) connection_->start_lane(lane);
  if (!over) return;
  for (const auto& lane : made) {
    lane->abort(make_error(ErrorKind::kUnavailable, "the connection has no use for it any more"));
  }
}

bool GrpcLateLanes::claim() {
  MutexLock lock(&mutex_);
  if (draining_ || (state_ != State::kNone && state_ != State::kWanted)) return false;
  state_ = State::kComing;
  up_ = true;
  return true;
}

void GrpcLateLanes::let_go() {
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kComing) return;
    state_ = State::kWanted;
    up_ = false;
  }
  give_up(make_error(ErrorKind::kUnavailable, "the connection ends"));
}

void GrpcLateLanes::take(Lanes lanes) {
  {
    MutexLock lock(&mutex_);
    lanes_ = lanes;
  }
  go_up(lanes);
}

void GrpcLateLanes::go_up(const Lanes& lanes) {
  const std::shared_ptr<GrpcLaneHost> connection = connection_->shared_host();
  // Not null: the connection is not lost before its lanes have ended.
  ConnectionHandler* const handler = connection_->channel_lane_up();
  bool over = false;
  {
    MutexLock lock(&mutex_);
    over = state_ != State::kComing;
    if (!over) {
      state_ = State::kSending;
      ways_ = lanes;
    }
  }
  if (over) {
    const Status why = make_error(ErrorKind::kUnavailable, "the connection ends");
    for (const auto& lane : lanes) lane->abort(why);
  }
  for (const auto& lane : lanes) {
    LaneEnd end;
    if (!lane->open(shared_from_this(), handler, &end)) lane_ended(*lane, std::move(end));
  }
  if (!over) send_waiting();
}

void GrpcLateLanes::give_up(const Status& why) {
  const std::shared_ptr<GrpcLaneHost> connection = connection_->shared_host();
  Lanes failed;
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kWanted) return;
    state_ = State::kSending;
    ways_.assign(count_, connection_->control_lane());
    failed = lanes_;
  }
  connection_->no_late_lanes(why);
  for (const auto& lane : failed) lane->abort(why);
  send_waiting();
}

void GrpcLateLanes::send_waiting() {
  while (true) {
    std::optional<std::pair<size_t, Frame>> next;
    std::shared_ptr<GrpcLane> way;
    Lanes ways;
    bool drains = false;
    {
      MutexLock lock(&mutex_);
      if (state_ != State::kSending) return;
      if (waiting_.empty()) {
        state_ = State::kKnown;
        drains = draining_;
        if (up_) ways = ways_;
      } else {
        next = std::move(waiting_.front());
        waiting_.pop_front();
        way = ways_[next->first];
      }
    }
    if (!next.has_value()) {
      if (!drains) return;
      for (const auto& lane : ways) lane->drain();
      return connection_->drain_control();
    }
    const uint64_t cookie = next->second.cookie;
    // A lane that has ended takes nothing, and the connection ends with it.
    if (!way->send(std::move(next->second)).ok()) connection_->not_sent({cookie});
  }
}

// ---- the end -----------------------------------------------------------------------------------

bool GrpcLateLanes::drain() {
  Lanes lanes;
  {
    MutexLock lock(&mutex_);
    draining_ = true;
    if (state_ == State::kNone) state_ = State::kOver;  // LATE-3
    if (state_ != State::kKnown && state_ != State::kOver) return false;
    if (state_ == State::kKnown && up_) lanes = lanes_;
  }
  for (const auto& lane : lanes) lane->drain();
  return true;
}

void GrpcLateLanes::abort(const Status& why) {
  connection_->not_sent(close());
  Lanes lanes;  // make() aborts those that it makes after that
  {
    MutexLock lock(&mutex_);
    lanes = lanes_;
  }
  for (const auto& lane : lanes) lane->abort(why);
}

std::vector<uint64_t> GrpcLateLanes::close() {
  std::deque<std::pair<size_t, Frame>> dropped;  // freed without the lock
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
  give_up(make_error(ErrorKind::kDeadline, "they did not come up in time"));
}

void GrpcLateLanes::lane_ended(GrpcLane&, LaneEnd end) {
  const std::shared_ptr<GrpcLaneHost> connection = connection_->shared_host();
  bool up = false;
  {
    MutexLock lock(&mutex_);
    up = up_;
  }
  if (!up) give_up(end.why.ok() ? make_error(ErrorKind::kUnavailable, "one has ended") : end.why);
  connection_->late_lane_ended(std::move(end), up);
}

// ---- the dialler's handshake -------------------------------------------------------------------

void GrpcLateLanes::lane_started(GrpcLane& lane) { connection_->lane_started(lane); }

void GrpcLateLanes::lane_handshake(GrpcLane& lane, std::string_view header) {
  const Status status = connection_->check_ack(lane, header).status();
  if (!status.ok()) return give_up(status);
  Lanes lanes;
  {
    MutexLock lock(&mutex_);
    if (++acknowledged_ < count_ || state_ != State::kWanted) return;
    state_ = State::kComing;
    up_ = true;
    lanes = lanes_;
  }
  for (const auto& one : lanes) one->allow_sends();
  go_up(lanes);
}

Status GrpcLateLanes::lane_own_frame(GrpcLane& lane, const FrameView& frame) {
  return connection_->lane_own_frame(lane, frame);
}

}  // namespace weft::internal
