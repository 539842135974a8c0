#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_LATE_LANES_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_LATE_LANES_H_

// GrpcLateLanes: the bulk lanes of one connection, which are made when one of its ends first sends over them. Most
// connections never do: large messages take a channel. The dialler makes them; an acceptor that wants them says so by
// the control lane.
//
//   LATE-1  what is sent before they are up waits, and leaves in the order in which it was sent.
//   LATE-2  all of them come up or none. When they cannot be had, as for want of descriptors, what waited and all that
//           comes later goes by the control lane: a connection that carries small messages carries large ones.
//   LATE-3  nothing is made for a connection that ends before one was wanted.
//   LATE-4  what is up ends with the connection, and the connection with it.
//
//   state     send              asked by the peer    all acknowledged   one has ended, the time is over
//   kNone     kWanted, make()   kWanted, make()      kComing (a)        -
//   kWanted   waits             -                    kComing            kSending by the control lane
//   kComing   waits             -                    -                  (LATE-4)
//   kSending  waits             -                    -                  (LATE-4)
//   kKnown    goes its way      -                    -                  (LATE-4)
//   kOver     refused           -                    refused (a)        -
//
// (a): of the acceptor. kSending becomes kKnown when nothing waits. A dialler that gives up says so with the frame by
// which an acceptor asks.
//
// Threads: any. No lock is held while a lane or the connection is called.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/grpc/lane.h"

namespace weft::internal {

// The connection, as its late lanes see it.
class GrpcLateLanesHost : public GrpcLaneHost {
 public:
  virtual bool dialled() const = 0;
  // The dialler is asked to make them.
  virtual void ask_for_lanes() = 0;
  // Large messages go by the control lane from here on, which a dialler tells its peer.
  virtual void no_late_lanes(const Status& why) = 0;
  virtual std::shared_ptr<GrpcLane> control_lane() const = 0;
  virtual void limit_making(std::weak_ptr<Timed> what) = 0;
  // So many lanes more count from here on. False: the connection ends already, there must be none.
  virtual bool channel_lanes_begun(size_t count) = 0;
  virtual std::shared_ptr<GrpcClientLane> new_lane(int number, GrpcLaneHost* host) = 0;
  virtual void start_lane(const std::shared_ptr<GrpcClientLane>& lane) = 0;
  virtual StatusOr<Hello> check_ack(GrpcLane& lane, std::string_view header) const = 0;
  // Frames may flow, to the handler that is given back.
  virtual ConnectionHandler* channel_lane_up() = 0;
  virtual std::shared_ptr<GrpcLaneHost> shared_host() = 0;
  virtual void not_sent(std::vector<uint64_t> cookies) = 0;
  virtual void drain_control() = 0;
  // `was_up`: the connection ends with it.
  virtual void late_lane_ended(LaneEnd end, bool was_up) = 0;

 protected:
  ~GrpcLateLanesHost() = default;
};

class GrpcLateLanes final : public GrpcLaneHost,
                            public Timed,
                            public std::enable_shared_from_this<GrpcLateLanes> {
 public:
  using Lanes = std::vector<std::shared_ptr<GrpcLane>>;

  // `connection` owns it. Their numbers are first, first + 1, ...
  GrpcLateLanes(GrpcLateLanesHost* connection, size_t first, size_t count)
      : connection_(connection), first_(first), count_(count) {}

  size_t count() const { return count_; }
  // One of the two ends has wanted them.
  bool begun() const ABSL_LOCKS_EXCLUDED(mutex_);
  // REQUIRES: index < count().
  Status send(Frame frame, size_t index) ABSL_LOCKS_EXCLUDED(mutex_);
  // An acceptor wants them; or a dialler has none. Kind protocol: this connection has no late lanes.
  Status asked() ABSL_LOCKS_EXCLUDED(mutex_);
  // The acceptor's: they have said hello. False: they are not wanted any more. Otherwise take() follows, or
  // let_go() when there can be none.
  bool claim() ABSL_LOCKS_EXCLUDED(mutex_);
  void let_go() ABSL_LOCKS_EXCLUDED(mutex_);
  // In order; they may send. Frames of theirs come when it returns.
  void take(Lanes lanes) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<LaneStats> stats() const ABSL_LOCKS_EXCLUDED(mutex_);

  // False: they are not up yet, and call drain_control() of their host when what waits has left: the peer takes no
  // lane any more when its control lane has ended.
  bool drain() ABSL_LOCKS_EXCLUDED(mutex_);
  void abort(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The connection is lost: the cookies of what still waited.
  std::vector<uint64_t> close() ABSL_LOCKS_EXCLUDED(mutex_);

  void lane_started(GrpcLane& lane) override;
  void lane_handshake(GrpcLane& lane, std::string_view header) override ABSL_LOCKS_EXCLUDED(mutex_);
  Status lane_own_frame(GrpcLane& lane, const FrameView& frame) override;
  void lane_ended(GrpcLane& lane, LaneEnd end) override;
  void on_deadline() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class State { kNone, kWanted, kComing, kSending, kKnown, kOver };

  void make() ABSL_LOCKS_EXCLUDED(mutex_);
  void go_up(const Lanes& lanes) ABSL_LOCKS_EXCLUDED(mutex_);
  // LATE-2, unless they are up or the connection ends.
  void give_up(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // What waits leaves.
  void send_waiting() ABSL_LOCKS_EXCLUDED(mutex_);

  GrpcLateLanesHost* const connection_;
  const size_t first_;
  const size_t count_;

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kNone;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  size_t acknowledged_ ABSL_GUARDED_BY(mutex_) = 0;
  bool up_ ABSL_GUARDED_BY(mutex_) = false;  // all were acknowledged
  Lanes lanes_ ABSL_GUARDED_BY(mutex_);      // as they are made
  Lanes ways_ ABSL_GUARDED_BY(mutex_);       // where each one's frames go; from kSending on
  std::deque<std::pair<size_t, Frame>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_LATE_LANES_H_
