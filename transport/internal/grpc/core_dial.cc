// Dialling: from an address to a connection whose lanes are on their way.

#include <algorithm>
#include <utility>

#include <grpcpp/alarm.h>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/address.h"
#include "weft/transport/internal/descriptors.h"
#include "weft/transport/internal/grpc/core.h"
#include "weft/transport/internal/grpc/server.h"

namespace weft::internal {
namespace {

// A listener that does not believe our certificate and one that dies look the same the first time.
// One that has died is not reached the next time.
constexpr int kTlsAttempts = 3;

grpc::ChannelArguments lane_arguments(int lane, size_t max_frame_bytes, bool same_host,
                                      const GrpcTransportOptions& options, bool tls) {
  grpc::ChannelArguments args;
  if (tls) GrpcTls::prepare(&args);
  args.SetMaxReceiveMessageSize(static_cast<int>(std::max(max_frame_bytes, kMaxBatchBytes)));
  args.SetMaxSendMessageSize(-1);  // the peer's hello says how much it takes
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  args.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a TCP connection of its own
  args.SetInt("weft.lane", lane);
  if (same_host) args.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // A channel makes one attempt, and a new dial makes a new channel, so gRPC's waiting before a
  // second attempt (1 s by default) never shows; it is short all the same. The minimum is not set:
  // it is also the time that an attempt may take (20 s, cut by the dial's own deadline).
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, millis(options.keepalive_time));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, millis(options.keepalive_timeout));
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return args;
}

}  // namespace

// Tells a dial's failure on a poller, as every other outcome.
class GrpcTransportCore::FailedDial final : public GrpcEvent {
 public:
  FailedDial(std::shared_ptr<GrpcTransportCore> core, GrpcDialDone done, Status why)
      : core_(std::move(core)), done_(std::move(done)), why_(std::move(why)) {}
  void start() { alarm_.Set(core_->poller_queue(), gpr_now(GPR_CLOCK_MONOTONIC), this); }
  void complete(bool ok) override {
    (void)ok;
    const std::shared_ptr<GrpcTransportCore> core = core_;
    done_(why_, false);
    delete this;
    core->end_operation();
  }

 private:
  const std::shared_ptr<GrpcTransportCore> core_;
  const GrpcDialDone done_;
  const Status why_;
  grpc::Alarm alarm_;
};

void GrpcTransportCore::fail_dial(GrpcDialDone done, Status why) {
  if (!begin_operation()) return done(why, false);
  // Owned by its alarm; deletes itself.
  (new FailedDial(shared_from_this(), std::move(done), std::move(why)))->start();
}

void GrpcTransportCore::connect(std::string_view address, const Hello& hello, absl::Time deadline,
                                std::shared_ptr<ConnectionHandler> handler,
                                Transport::DialDone done) {
  if (tls_ != nullptr) {
    return dial_tls(std::string(address), hello, deadline, std::move(handler), std::move(done), 1);
  }
  dial(address, hello, deadline, std::move(handler),
       [done = std::move(done)](StatusOr<std::shared_ptr<Connection>> result, bool) {
         done(std::move(result));
       });
}

void GrpcTransportCore::dial_tls(std::string address, Hello hello, absl::Time deadline,
                                 std::shared_ptr<ConnectionHandler> handler,
                                 Transport::DialDone done, int attempt) {
  dial(address, hello, deadline, handler,
       [self = shared_from_this(), address, hello, deadline, handler, done = std::move(done),
        attempt](StatusOr<std::shared_ptr<Connection>> result, bool turned_away) {
         if (result.ok() || !turned_away) return done(std::move(result));
         if (attempt < kTlsAttempts) {
           return self->dial_tls(address, hello, deadline, handler, done, attempt + 1);
         }
         done(annotate(self->tls_->turned_away_error(attempt), absl::StrCat("dial of ", address)));
       });
}

void GrpcTransportCore::dial(std::string_view address, const Hello& hello, absl::Time deadline,
                             std::shared_ptr<ConnectionHandler> handler, GrpcDialDone done) {
  const std::string context = absl::StrCat("dial of ", view(address));
  bool closing;
  {
    MutexLock lock(&mutex_);
    closing = closing_;
    if (!closing && !poller_started_) {
      start_poller_locked(std::make_unique<grpc::CompletionQueue>());
    }
  }
  if (closing) {
    return done(
        make_error(ErrorKind::kState, absl::StrCat(context, ": the transport is shut down")),
        false);
  }
  if (deadline <= runtime().now()) {
    // The timer alone would race with a listener that is quick.
    return fail_dial(std::move(done),
                     make_error(ErrorKind::kDeadline,
                                absl::StrCat(context, ": the deadline was over before it began")));
  }
  const SplitAddress at = split_address(address);
  const bool local = options_.local_sockets && !at.local.empty() && local_socket_exists(at.local);
  if (!local && options_.local_sockets && listener_has_ended(at)) {
    return fail_dial(
        std::move(done),
        make_error(ErrorKind::kPeerLost,
                   absl::StrCat(context, ": nobody listens there any more, its worker has ended")));
  }
  const StatusOr<std::string> target =
      local ? StatusOr<std::string>(local_target(at.local)) : dial_target(address);
  Hello wanted = hello;
  if (wanted.lanes == 0) {
    wanted.lanes = 1;
    wanted.late_lanes =
        static_cast<uint32_t>(local ? options_.local_bulk_lanes : options_.bulk_lanes);
  }
  StatusOr<Hello> own = complete_hello(wanted, context_.max_frame_bytes, runtime().random());
  if (!target.ok()) return fail_dial(std::move(done), target.status());
  if (!own.ok()) return fail_dial(std::move(done), annotate(own.status(), context));
  if (at.tls && tls_ == nullptr) {
    return fail_dial(std::move(done),
                     make_error(ErrorKind::kPermission,
                                absl::StrCat(context,
                                             ": it wants TLS, and this worker has no credentials; "
                                             "set WEFT_TLS_CA, WEFT_TLS_CERT and WEFT_TLS_KEY")));
  }
  // gRPC's error for the same would not name the limit. One more for the private socket.
  const uint32_t sockets = own->lanes + (local ? 1 : 0);
  if (const Status room = check_descriptors(sockets); !room.ok()) {
    return fail_dial(std::move(done), make_error(ErrorKind::kUnavailable,
                                                 absl::StrCat(context, ": ", room.message())));
  }
  ChannelSite site;
  site.dialled = true;
  site.local = local;
  site.first_lane = own->lanes + own->late_lanes;
  site.max_lanes = site.first_lane - 1;
  if (local) {
    StatusOr<std::shared_ptr<LocalSession>> session = gate_->visit(gate_name(at.local));
    if (session.ok()) {
      own->ticket = (*session)->ticket();
      site.session = *std::move(session);
    } else if (error_kind(session.status()) == ErrorKind::kResource) {
      // There is no room now; without a ticket the listener might turn us away for good.
      return fail_dial(std::move(done),
                       make_error(ErrorKind::kUnavailable,
                                  absl::StrCat(context, ": ", session.status().message())));
    }
  }

  auto connection =
      std::make_shared<GrpcConnection>(shared_from_this(), *own, std::string(address),
                                       make_channels(site), std::move(handler), std::move(done));
  connection->set_local(local);
  std::vector<std::shared_ptr<GrpcClientLane>> lanes;
  GrpcConnection::Lanes base;
  for (uint32_t i = 0; i < own->lanes; ++i) {
    lanes.push_back(new_lane(static_cast<int>(i), connection.get()));
    base.push_back(lanes.back());
  }
  connection->set_lanes(std::move(base));
  remember(connection);
  set_deadline(deadline, connection);
  for (const auto& lane : lanes) start_lane(lane, address, local);
}

std::shared_ptr<GrpcClientLane> GrpcTransportCore::new_lane(int number, GrpcLaneHost* host) {
  return std::make_shared<GrpcClientLane>(
      number, context_.max_frame_bytes, poller_.get(), host, tls_,
      [self = shared_from_this()](GrpcLane* lane) { self->lane_gone(lane); });
}

void GrpcTransportCore::start_lane(const std::shared_ptr<GrpcClientLane>& lane,
                                   std::string_view address, bool local) {
  const SplitAddress at = split_address(address);
  const StatusOr<std::string> target =
      local ? StatusOr<std::string>(local_target(at.local)) : dial_target(address);
  const bool alive = lane_born(lane);
  lane->start(grpc::CreateCustomChannel(
                  target.value_or(""),  // the dial has found it
                  tls_ == nullptr ? grpc::InsecureChannelCredentials() : tls_->channel(),
                  lane_arguments(lane->number(), context_.max_frame_bytes,
                                 local || is_loopback(at.tcp), options_, tls_ != nullptr)),
              poller_queue());
  if (!alive) lane->abort(make_error(ErrorKind::kState, "the transport is shut down"));
}

}  // namespace weft::internal
