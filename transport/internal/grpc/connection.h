#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_CONNECTION_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_CONNECTION_H_

// GrpcConnection: the lanes to one peer, from the dial (or from the moment that an acceptor has all
// lanes) to on_lost. It ends when its last lane has ended; the first lane that breaks takes the
// others along, one that ends in an orderly way gives them time to drain. Lanes of a channel that
// are up are lanes as the others, with the numbers behind theirs; one that does not come up is
// none.
//
// Threads: as transport/transport.h says; lane events come from the poller, deadlines from the
// timer.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/transport/channel.h"
#include "weft/transport/internal/grpc/channels.h"
#include "weft/transport/internal/grpc/lane.h"
#include "weft/transport/internal/grpc/late_lanes.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class GrpcTransportCore;

// As Transport::DialDone; `turned_away` as in LaneEnd.
using GrpcDialDone =
    std::function<void(StatusOr<std::shared_ptr<Connection>> result, bool turned_away)>;

class GrpcConnection final : public Connection,
                             public GrpcLateLanesHost,
                             public Timed,
                             public std::enable_shared_from_this<GrpcConnection> {
 public:
  using Lanes = std::vector<std::shared_ptr<GrpcLane>>;

  // The dialler's.
  GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own, std::string address,
                 GrpcChannels::List channels, std::shared_ptr<ConnectionHandler> handler,
                 GrpcDialDone done);
  // The acceptor's.
  GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own, const Hello& peer,
                 std::string address, GrpcChannels::List channels, Lanes lanes);

  // Dialler. REQUIRES: before anything else.
  void set_lanes(Lanes lanes) { lanes_ = std::move(lanes); }
  void set_local(bool local) { local_ = local; }  // over a Unix socket
  // Acceptor: frames flow from here on.
  void open_accepted(std::shared_ptr<ConnectionHandler> handler) ABSL_LOCKS_EXCLUDED(mutex_);
  // The transport shuts down: a dial fails, a connection drains.
  void leave(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the dial, or the connection.
  void fail(Status why) ABSL_LOCKS_EXCLUDED(mutex_);

  // gRPC's, those that are not made yet among them.
  size_t lanes() const { return lanes_.size() + late_->count(); }
  // Statistics of the channels' lanes that are up, in order: their numbers begin with lanes().
  std::vector<LaneStats> channel_stats() const { return channels_.lane_stats(); }

  // ---- for its channels ------------------------------------------------------------------------
  GrpcTransportCore& core() { return *core_; }
  // By the control lane; dropped when that is gone.
  void send_own(Frame frame);
  // The dialler's: another socket to where the control lane goes.
  StatusOr<UniqueFd> dial_socket();
  bool is_open() const ABSL_LOCKS_EXCLUDED(mutex_);
  bool channel_lanes_begun(size_t count) override ABSL_LOCKS_EXCLUDED(mutex_);
  ConnectionHandler* channel_lane_up() override ABSL_LOCKS_EXCLUDED(mutex_);
  // ---- for its late lanes ----------------------------------------------------------------------
  void ask_for_lanes() override;
  void no_late_lanes(const Status& why) override;
  std::shared_ptr<GrpcLane> control_lane() const override { return lanes_[kControlLane]; }
  void limit_making(std::weak_ptr<Timed> what) override;
  StatusOr<Hello> check_ack(GrpcLane& lane, std::string_view header) const override;
  std::shared_ptr<GrpcClientLane> new_lane(int number, GrpcLaneHost* host) override;
  void start_lane(const std::shared_ptr<GrpcClientLane>& lane) override;
  std::shared_ptr<GrpcLaneHost> shared_host() override { return shared_from_this(); }
  void not_sent(std::vector<uint64_t> cookies) override ABSL_LOCKS_EXCLUDED(mutex_);
  void drain_control() override;
  void late_lane_ended(LaneEnd end, bool was_up) override { one_ended(std::move(end), was_up); }
  // The acceptor's: lanes that said hello together. False: they are not wanted any more.
  bool take_late(const Lanes& lanes, const Hello& own) ABSL_LOCKS_EXCLUDED(mutex_);
  // Any lane. `was_up`: frames may have gone over it; else its end concerns no call.
  void one_ended(LaneEnd end, bool was_up) ABSL_LOCKS_EXCLUDED(mutex_);

  const Hello& peer() const override { return peer_; }
  LaneRange bulk_lanes() const override;
  bool lane_begun(int lane) const override;
  int prompt_lane() const override {
    return channels_.prompt_lanes() > 0 ? static_cast<int>(lanes()) : kControlLane;
  }
  void want_prompt_lane() override { channels_.want_prompt_lane(); }
  bool dialled() const override { return dialled_; }
  Status send(Frame frame, int lane) override;
  void close(Status reason) override ABSL_LOCKS_EXCLUDED(mutex_);
  std::string describe() const override;
  ConnectionStats stats() const override;
  std::optional<Placement> place(std::string_view bytes) override;
  void unplace(const Placement& placement) override;
  StatusOr<Borrowed> borrow(const Placement& placement, uint64_t length) override;

  void lane_started(GrpcLane& lane) override;
  void lane_handshake(GrpcLane& lane, std::string_view header) override ABSL_LOCKS_EXCLUDED(mutex_);
  Status lane_own_frame(GrpcLane& lane, const FrameView& frame) override;
  void lane_ended(GrpcLane& lane, LaneEnd end) override ABSL_LOCKS_EXCLUDED(mutex_);
  void on_deadline() override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class State { kDialling, kOpen, kLost };

  // Whether the lane's other end may be whom it says it is, by its certificate.
  Status check_identity(GrpcLane& lane, std::string_view name, std::optional<uint32_t> rank) const;
  void open_dialled() ABSL_LOCKS_EXCLUDED(mutex_);
  void drain_lanes() ABSL_LOCKS_EXCLUDED(mutex_);
  void abort_lanes(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<GrpcTransportCore> core_;
  const bool dialled_;
  const Hello own_;
  const std::string address_;
  GrpcChannels channels_;
  bool local_ = false;
  Lanes lanes_;  // those of the handshake; constant once frames flow
  const std::shared_ptr<GrpcLateLanes> late_;
  Hello peer_;  // constant once open

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ConnectionHandler> handler_ ABSL_GUARDED_BY(mutex_);
  GrpcDialDone done_ ABSL_GUARDED_BY(mutex_);
  size_t lanes_acked_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t lanes_ended_ ABSL_GUARDED_BY(mutex_) = 0;
  // Number of channels' lanes ever begun. The connection is lost when all of them have ended: the
  // peer may have sent over one that is not up here yet.
  size_t channel_lanes_begun_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closing_ ABSL_GUARDED_BY(mutex_) =
      false;                                     // close() or fail() was called; `lost_.why` is set
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;  // a lane has ended
  Lost lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_CONNECTION_H_
