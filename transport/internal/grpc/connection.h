#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_CONNECTION_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_CONNECTION_H_

// GrpcConnection: the lanes to one peer, from the dial (or from the moment that an acceptor has all
// lanes) to on_lost. It ends when its last lane has ended; the first lane that breaks takes the
// others along, one that ends in an orderly way gives them time to drain. Data connections that are
// up are lanes as the others, with the numbers behind theirs; one that does not come up is none.
//
// Threads: as transport/transport.h says; lane events come from the poller, deadlines from the
// timer.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/transport/internal/arena/link.h"
#include "weft/transport/internal/data/lane.h"
#include "weft/transport/internal/grpc/lane.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class GrpcTransportCore;

// As Transport::DialDone; `turned_away` as in LaneEnd.
using GrpcDialDone =
    std::function<void(StatusOr<std::shared_ptr<Connection>> result, bool turned_away)>;

class GrpcConnection final : public Connection,
                             public GrpcLaneHost,
                             public GrpcTimed,
                             public ArenaLink::Host,
                             public DataLaneHost,
                             public std::enable_shared_from_this<GrpcConnection> {
 public:
  using Lanes = std::vector<std::shared_ptr<GrpcLane>>;

  // `arena` may be null: no memory is shared over this connection.
  // The dialler's.
  GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own, std::string address,
                 std::shared_ptr<ArenaLink> arena, std::shared_ptr<ConnectionHandler> handler,
                 GrpcDialDone done);
  // The acceptor's.
  GrpcConnection(std::shared_ptr<GrpcTransportCore> core, const Hello& own, const Hello& peer,
                 std::string address, std::shared_ptr<ArenaLink> arena, Lanes lanes);

  // Dialler. REQUIRES: before anything else.
  void set_lanes(Lanes lanes) { lanes_ = std::move(lanes); }
  void set_local(bool local) { local_ = local; }  // over a Unix socket
  // Acceptor: frames flow from here on.
  void open_accepted(std::shared_ptr<ConnectionHandler> handler) ABSL_LOCKS_EXCLUDED(mutex_);
  // The transport shuts down: a dial fails, a connection drains.
  void leave(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the dial, or the connection.
  void fail(Status why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Acceptor: the socket that showed the ticket of this data connection.
  void take_data(size_t index, std::string key, UniqueFd fd) ABSL_LOCKS_EXCLUDED(mutex_);
  size_t lanes() const { return lanes_.size(); }
  // Of the data connections that are up, in order: their numbers begin with lanes().
  std::vector<LaneStats> data_stats() const;

  const Hello& peer() const override { return peer_; }
  LaneRange bulk_lanes() const override;
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

  ConnectionHandler* data_lane_up(DataLane& lane) override ABSL_LOCKS_EXCLUDED(mutex_);
  void data_lane_ended(DataLane& lane, bool was_up, LaneEnd end) override
      ABSL_LOCKS_EXCLUDED(mutex_);

  void send_arena_frame(FrameKind kind, std::string header) override;
  void frees_waiting() override;
  void lending_settled(bool lends, std::string_view why_not) override;

 private:
  enum class State { kDialling, kOpen, kLost };
  class FreeTimer;
  class DataTimer;

  // Whether the lane's other end may be whom it says it is, by its certificate.
  Status check_identity(GrpcLane& lane, std::string_view name, std::optional<uint32_t> rank) const;
  void open_dialled() ABSL_LOCKS_EXCLUDED(mutex_);
  void share_memory();
  void drain_lanes() ABSL_LOCKS_EXCLUDED(mutex_);
  void abort_lanes(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Any lane. `was_up`: frames may have gone over it; else its end is nobody's concern.
  void one_ended(LaneEnd end, bool was_up) ABSL_LOCKS_EXCLUDED(mutex_);

  // connection_data.cc
  static std::shared_ptr<DataTimer> make_data_timer();
  // The acceptor's, when the connection is open.
  void offer_data() ABSL_LOCKS_EXCLUDED(mutex_);
  // The dialler's.
  Status on_data_offer(std::string_view header) ABSL_LOCKS_EXCLUDED(mutex_);
  void start_data(size_t index, const std::string& ticket, std::string key, StatusOr<UniqueFd> fd)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void no_data(const Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<std::shared_ptr<DataLane>> data_lanes() ABSL_LOCKS_EXCLUDED(mutex_);
  std::string describe_data() const ABSL_LOCKS_EXCLUDED(mutex_);

  const std::shared_ptr<GrpcTransportCore> core_;
  const bool dialled_;
  const Hello own_;
  const std::string address_;
  const std::shared_ptr<ArenaLink> arena_;
  const std::shared_ptr<FreeTimer> free_timer_;
  bool local_ = false;
  Lanes lanes_;  // constant once frames flow
  std::atomic<int64_t> arena_hits_{0};
  std::atomic<int64_t> arena_hit_bytes_{0};
  std::atomic<int64_t> arena_fallbacks_{0};
  std::atomic<int64_t> arena_fallback_bytes_{0};
  Hello peer_;  // constant once open
  // By index; none is replaced. Those below data_ready_ are constant.
  std::array<std::shared_ptr<DataLane>, kMaxLanes> data_;
  std::atomic<size_t> data_ready_{0};  // 0, or all of them when all are up
  const std::shared_ptr<DataTimer> data_timer_;

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ConnectionHandler> handler_ ABSL_GUARDED_BY(mutex_);
  GrpcDialDone done_ ABSL_GUARDED_BY(mutex_);
  size_t lanes_acked_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t lanes_ended_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t data_count_ ABSL_GUARDED_BY(mutex_) = 0;  // offered
  // Ever. The connection is lost when all that were begun have ended: the peer may have sent over
  // one that is not up here yet.
  size_t data_begun_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t data_up_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string why_no_data_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) =
      false;                                     // close() or fail() was called; `lost_.why` is set
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;  // a lane has ended
  Lost lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_CONNECTION_H_
