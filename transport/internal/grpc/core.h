#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_CORE_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_CORE_H_

// GrpcTransportCore: what the parts of one grpc transport share: the poller, the server, the lanes
// that are alive, the connections, time limits, counters. Connections hold it; it holds connections
// until they are lost.
//
// Threads: all methods from anywhere unless said otherwise. No lock of the core is held while a
// callback runs; lanes' locks may be taken under the core's, never the other way round.

#include <grpcpp/grpcpp.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/transport/channel.h"
#include "weft/transport/grpc_tls.h"
#include "weft/transport/grpc_transport.h"
#include "weft/transport/internal/grpc/connection.h"
#include "weft/transport/internal/grpc/lane.h"
#include "weft/transport/internal/grpc/listener.h"
#include "weft/transport/internal/grpc/poller.h"
#include "weft/transport/internal/local/gate.h"
#include "weft/transport/internal/wire/handshake.h"
#include "weft/transport/transport.h"

namespace weft::internal {

class GrpcServer;

class GrpcTransportCore : public std::enable_shared_from_this<GrpcTransportCore> {
 public:
  // `tls` is null when traffic is plain text.
  GrpcTransportCore(const TransportContext& context, const GrpcTransportOptions& options,
                    std::shared_ptr<const GrpcTls> tls);
  ~GrpcTransportCore();

  StatusOr<std::string> listen(const ListenOptions& options, std::shared_ptr<Acceptor> acceptor);
  void connect(std::string_view address, const Hello& hello, absl::Time deadline,
               std::shared_ptr<ConnectionHandler> handler, Transport::DialDone done);
  void shutdown();
  std::vector<std::pair<std::string, int64_t>> counters() const;

  // ---- for lanes, connections and the server -------------------------------------------------
  const GrpcTransportOptions& options() const { return options_; }
  const TransportContext& context() const { return context_; }
  const std::shared_ptr<const GrpcTls>& tls() const { return tls_; }
  Runtime& runtime() { return *context_.runtime; }
  // One poller for all lanes: of two, each would wait for what the other hands it (poller.h).
  grpc::CompletionQueue* poller_queue() { return poller_->queue(); }
  GrpcPoller* poller() { return poller_.get(); }
  ListenerCounters* listener_counters() { return &listener_counters_; }

  // The lane may start operations until lane_gone(). False: the transport is closing; the lane
  // counts all the same and must be aborted.
  bool lane_born(std::shared_ptr<GrpcLane> lane) ABSL_LOCKS_EXCLUDED(mutex_);
  void lane_gone(GrpcLane* lane) ABSL_LOCKS_EXCLUDED(mutex_);
  // Other operations on the queues: begin_operation() false means that none may start.
  bool begin_operation() ABSL_LOCKS_EXCLUDED(mutex_);
  void end_operation() ABSL_LOCKS_EXCLUDED(mutex_);

  // A dialler's lane: new_lane() makes it, and start_lane() dials; one that must not start any more ends at once.
  std::shared_ptr<GrpcClientLane> new_lane(int number, GrpcLaneHost* host);
  void start_lane(const std::shared_ptr<GrpcClientLane>& lane, std::string_view address,
                  bool local);

  void remember(std::shared_ptr<GrpcConnection> connection) ABSL_LOCKS_EXCLUDED(mutex_);
  // The accepted connection of this hello; null when there is none.
  std::shared_ptr<GrpcConnection> accepted(const Hello& hello) ABSL_LOCKS_EXCLUDED(mutex_);
  void forget(GrpcConnection* connection) ABSL_LOCKS_EXCLUDED(mutex_);
  void set_deadline(absl::Time when, std::weak_ptr<Timed> what) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether a hello without TLS is acceptable: its ticket lay at our private socket, or it needs no
  // ticket.
  Status check_user(const Hello& theirs);
  bool same_user_only() const { return same_user_only_.load(); }
  // One end of each channel, for a connection there.
  GrpcChannels::List make_channels(const ChannelSite& site);
  // The session of the peer that left the ticket at our private socket; null when there is none.
  std::shared_ptr<LocalSession> claim(std::string_view ticket) { return gate_->claim(ticket); }
  // Whether diallers may show sockets of channels, and such a socket.
  bool takes_sockets() const;
  void take_socket(const std::string& ticket, UniqueFd fd);
  // Null: there is none, or no room.
  std::shared_ptr<char> allocate_shared(size_t bytes);
  void sweep();
  std::shared_ptr<WaitDriver> wait_driver() const { return poller_; }
  absl::Time drain_deadline() { return runtime().now() + options_.drain_timeout; }

 private:
  class FailedDial;

  void start_poller_locked(std::unique_ptr<grpc::CompletionQueue> queue)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fire() ABSL_LOCKS_EXCLUDED(mutex_);
  bool wait_until_idle(absl::Time deadline, bool operations) ABSL_LOCKS_EXCLUDED(mutex_);
  void fail_dial(GrpcDialDone done, Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  // What connect() does, once; `done` may be asked to do it again.
  void dial(std::string_view address, const Hello& hello, absl::Time deadline,
            std::shared_ptr<ConnectionHandler> handler, GrpcDialDone done);
  // Dials, and again while a TLS listener ends the connections.
  void dial_tls(std::string address, Hello hello, absl::Time deadline,
                std::shared_ptr<ConnectionHandler> handler, Transport::DialDone done, int attempt);

  const TransportContext context_;
  const GrpcTransportOptions options_;
  const std::shared_ptr<const GrpcTls> tls_;
  const std::shared_ptr<GrpcPoller> poller_;
  const std::shared_ptr<LocalGate> gate_;
  const std::vector<std::shared_ptr<ChannelBackend>> backends_;
  std::atomic<bool> same_user_only_{false};  // set by listen()
  ListenerCounters listener_counters_;

  mutable Mutex mutex_;
  Condition changed_;
  bool poller_started_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<GrpcLane*, std::shared_ptr<GrpcLane>> lanes_ ABSL_GUARDED_BY(mutex_);
  // Statistics of the lanes that are gone, by number.
  std::array<LaneStats, kMaxLanes> past_lanes_ ABSL_GUARDED_BY(mutex_);
  std::map<GrpcConnection*, std::shared_ptr<GrpcConnection>> connections_ ABSL_GUARDED_BY(mutex_);
  int operations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::multimap<absl::Time, std::weak_ptr<Timed>> deadlines_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Timer> timer_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<GrpcServer> server_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_CORE_H_
