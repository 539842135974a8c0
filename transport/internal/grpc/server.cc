#include "weft/transport/internal/grpc/server.h"

#include <chrono>
#include <utility>

#include <grpcpp/impl/rpc_service_method.h>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/proto/health.pb.h"
#include "weft/transport/internal/descriptors.h"

namespace weft::internal {
namespace {

constexpr int kHealthMethod = static_cast<int>(kMaxLanes);
// Streams per TCP connection: a lane, and room for health checks.
constexpr int kMaxStreams = 16;

}  // namespace

GrpcRawService::GrpcRawService() {
  using grpc::internal::RpcMethod;
  using grpc::internal::RpcServiceMethod;
  // gRPC keeps the pointers of the names: these live as long as the program.
  static constexpr const char* kLaneMethods[kMaxLanes] = {
      "/weft.v1.Transport/Lane0", "/weft.v1.Transport/Lane1", "/weft.v1.Transport/Lane2",
      "/weft.v1.Transport/Lane3", "/weft.v1.Transport/Lane4", "/weft.v1.Transport/Lane5",
      "/weft.v1.Transport/Lane6", "/weft.v1.Transport/Lane7"};
  for (int lane = 0; lane < static_cast<int>(kMaxLanes); ++lane) {
    AddMethod(new RpcServiceMethod(kLaneMethods[lane], RpcMethod::BIDI_STREAMING, nullptr));
    MarkMethodRaw(lane);
  }
  AddMethod(new RpcServiceMethod("/grpc.health.v1.Health/Check", RpcMethod::NORMAL_RPC, nullptr));
  MarkMethodRaw(kHealthMethod);
}

void GrpcRawService::request_lane(int lane, grpc::ServerContext* context, Stream* stream,
                                  grpc::ServerCompletionQueue* queue, void* tag) {
  RequestAsyncBidiStreaming(lane, context, stream, queue, queue, tag);
}

void GrpcRawService::request_health(grpc::ServerContext* context, grpc::ByteBuffer* request,
                                    grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>* writer,
                                    grpc::ServerCompletionQueue* queue, void* tag) {
  RequestAsyncUnary(kHealthMethod, context, request, writer, queue, queue, tag);
}

// ---- the server ------------------------------------------------------------------------------

GrpcServer::GrpcServer(std::shared_ptr<GrpcTransportCore> core, std::shared_ptr<Acceptor> acceptor)
    : core_(std::move(core)),
      acceptor_(std::move(acceptor)),
      listener_(core_->context().runtime, core_->context().log, core_->listener_counters()),
      table_(static_cast<size_t>(core_->options().max_half_open_lanes)) {}

StatusOr<int> GrpcServer::bind(const BindHost& host, int port, std::string_view local,
                               std::unique_ptr<grpc::CompletionQueue>* queue) {
  const GrpcTransportOptions& options = core_->options();
  WEFT_ASSIGN_OR_RETURN(const int bound,
                        listener_.open(host, port, local, options.keepalive_timeout));
  grpc::ServerBuilder builder;
  listener_.add_to(&builder, core_->tls() == nullptr ? grpc::InsecureServerCredentials()
                                                     : core_->tls()->server());
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             millis(options.handshake_timeout));
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  if (host.loopback) builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, millis(options.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, millis(options.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.SetMaxReceiveMessageSize(
      static_cast<int>(std::max(core_->context().max_frame_bytes, kMaxBatchBytes)));
  builder.SetMaxSendMessageSize(-1);  // the peer's hello says how much it takes
  builder.RegisterService(&service_);
  std::unique_ptr<grpc::ServerCompletionQueue> made = builder.AddCompletionQueue();
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    made->Shutdown();
    void* tag;
    bool ok;
    while (made->Next(&tag, &ok)) {
    }
    return make_error(ErrorKind::kInternal,
                      absl::StrCat("cannot listen on ", join_host_port(host.host, bound),
                                   ": gRPC made no server"));
  }
  queue_ = made.get();
  *queue = std::move(made);
  return bound;
}

void GrpcServer::start() {
  for (int lane = 0; lane < static_cast<int>(kMaxLanes); ++lane) post_accept(lane);
  post_health();
  if (core_->same_user_only()) listener_.only_own_user();
  listener_.set_hello_timeout(core_->options().handshake_timeout);
  if (core_->takes_sockets()) {
    listener_.take_sockets(core_->options().handshake_timeout,
                           [core = core_](std::string ticket, UniqueFd fd) {
                             core->take_socket(ticket, std::move(fd));
                           });
  }
  listener_.start();
}

void GrpcServer::shut_down(absl::Duration grace) {
  listener_.stop();
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(grace));
}

void GrpcServer::release() {
  acceptor_ = nullptr;
  server_ = nullptr;
}

void GrpcServer::post_accept(int lane) {
  if (!core_->begin_operation()) return;
  auto waiting = std::make_shared<GrpcServerLane>(core_, shared_from_this(), lane);
  waiting->wait_for_stream(&service_, queue_);
}

void GrpcServer::accepted(const std::shared_ptr<GrpcServerLane>& lane) {
  const bool alive = core_->lane_born(lane);
  core_->end_operation();
  if (alive) post_accept(lane->number());
  bool room;
  {
    MutexLock lock(&mutex_);
    ++half_open_;
    lane->counted = true;
    room = half_open_ <= core_->options().max_half_open_lanes;
  }
  lane->begin();
  if (!alive) {
    lane->abort(make_error(ErrorKind::kState, "the transport is shut down"));
  } else if (!room) {
    refuse(*lane, make_error(ErrorKind::kResource,
                             absl::StrCat(core_->options().max_half_open_lanes,
                                          " streams already wait here to complete their "
                                          "handshake: try again later")));
  } else {
    core_->set_deadline(core_->runtime().now() + core_->options().handshake_timeout, lane);
  }
}

void GrpcServer::refuse(GrpcLane& lane, const Status& why) {
  Frame answer;
  answer.kind = FrameKind::kHelloAck;
  answer.header = encode_refusal(why);
  lane.send_handshake(std::move(answer), /*last=*/true);
}

Status GrpcServer::check_credentials(GrpcLane& lane, const Hello& theirs,
                                     std::string_view token) const {
  const std::shared_ptr<const GrpcTls>& tls = core_->tls();
  if (tls == nullptr && lane.number() >= static_cast<int>(theirs.lanes)) {
    // Its ticket has been claimed with the connection.
    if (core_->accepted(theirs) != nullptr) return absl::OkStatus();
    return make_error(ErrorKind::kUnavailable, "there is no connection that this lane belongs to");
  }
  if (tls == nullptr) return core_->check_user(theirs);
  const std::shared_ptr<const grpc::AuthContext> peer = lane.peer_auth();
  if (peer == nullptr) return make_error(ErrorKind::kUnavailable, "the stream is gone");
  WEFT_RETURN_IF_ERROR(tls->check_peer(*peer, theirs.name, theirs.id));
  return tls->check_token(token, theirs.name);
}

void GrpcServer::lane_handshake(GrpcLane& lane, std::string_view header) {
  auto& own_lane = static_cast<GrpcServerLane&>(lane);
  std::string token;
  StatusOr<Hello> theirs = decode_hello(header, lane.number(), &token);
  if (!theirs.ok()) return refuse(lane, theirs.status());
  // First of all: a stranger is told nothing about this worker.
  const Status known = check_credentials(lane, *theirs, token);
  // A ticket at the private socket, too, could not be taken in for want of a descriptor.
  const bool is_short = listener_.is_short();
  if (is_short && (known.ok() || error_kind(known) == ErrorKind::kResource)) {
    core_->listener_counters()->refused.fetch_add(1, std::memory_order_relaxed);
    return refuse(lane, annotate(no_descriptors_left(), "the worker that was dialled"));
  }
  if (!known.ok()) return refuse(lane, known);
  StatusOr<Hello> ours = answer_hello(*acceptor_, *theirs, core_->context().max_frame_bytes);
  if (!ours.ok()) return refuse(lane, ours.status());
  listener_.accepted_hello(own_lane.remote());
  const LaneRef ref = std::static_pointer_cast<GrpcServerLane>(lane.shared_from_this());
  using Entry = std::unique_ptr<HalfOpenTable<LaneRef>::Entry>;
  StatusOr<Entry> complete = Entry();
  {
    MutexLock lock(&mutex_);
    own_lane.hello = *theirs;
    complete = table_.add(*theirs, lane.number(), ref);
  }
  if (!complete.ok()) return refuse(lane, complete.status());
  if (*complete == nullptr) return;
  open(*std::move(complete), *ours, lane.number() >= static_cast<int>(theirs->lanes));
}

void GrpcServer::open(std::unique_ptr<HalfOpenTable<LaneRef>::Entry> entry, const Hello& own,
                      bool late) {
  GrpcConnection::Lanes lanes;
  {
    MutexLock lock(&mutex_);
    for (const auto& [number, lane] : entry->lanes) {
      if (lane->counted) --half_open_;
      lane->counted = false;
      lanes.push_back(lane);
    }
  }
  for (const auto& lane : lanes) {
    if (lane->complete_handshake()) continue;
    // One of them broke while it waited: there is no connection.
    for (const auto& other : lanes) {
      other->abort(make_error(ErrorKind::kUnavailable, "another lane of the connection broke"));
    }
    return;
  }
  if (late) {
    const std::shared_ptr<GrpcConnection> connection = core_->accepted(entry->hello);
    if (connection != nullptr && connection->take_late(lanes, own)) return;
    for (const auto& lane : lanes) {
      lane->abort(make_error(ErrorKind::kUnavailable, "the connection has ended"));
    }
    return;
  }
  // LANES-1. What is sent from now on, by whichever thread, comes behind the answers; they leave when there is a handler
  // for what the dialler sends then.
  for (const auto& lane : lanes) {
    Frame answer;
    answer.kind = FrameKind::kHelloAck;
    answer.header = encode_ack(own, lane->number());
    lane->cork_handshake(std::move(answer));
  }
  const std::string address = lanes.back()->remote();
  ChannelSite site;
  site.local = address == kLocalPeer;
  site.session = core_->claim(entry->hello.ticket);
  site.first_lane = lanes.size() + entry->hello.late_lanes;
  site.max_lanes = site.first_lane - 1;
  auto connection = std::make_shared<GrpcConnection>(core_, own, entry->hello, address,
                                                     core_->make_channels(site), lanes);
  core_->remember(connection);
  for (const auto& lane : lanes) lane->allow_sends();
  connection->open_accepted(acceptor_->on_connection(connection));
  for (const auto& lane : lanes) lane->uncork();
}

Status GrpcServer::lane_own_frame(GrpcLane& lane, const FrameView& frame) {
  (void)lane;
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("a frame of kind ", view(frame_kind_name(frame.kind)),
                                 " before the connection is open"));
}

void GrpcServer::lane_ended(GrpcLane& lane, LaneEnd end) {
  // A lane whose connection never came to be: those that waited for it end as well.
  (void)end;
  auto& own_lane = static_cast<GrpcServerLane&>(lane);
  std::unique_ptr<HalfOpenTable<LaneRef>::Entry> entry;
  {
    MutexLock lock(&mutex_);
    if (own_lane.counted) --half_open_;
    own_lane.counted = false;
    entry = table_.remove_lane(own_lane.hello, lane.number(), &own_lane);
  }
  if (entry == nullptr) return;
  for (const auto& [number, other] : entry->lanes) {
    if (other.get() != &lane) {
      other->abort(make_error(ErrorKind::kUnavailable, "another lane of the connection broke"));
    }
  }
}

// ---- its streams -----------------------------------------------------------------------------

void GrpcServerLane::wait_for_stream(GrpcRawService* service, grpc::ServerCompletionQueue* queue) {
  self_ = std::static_pointer_cast<GrpcServerLane>(shared_from_this());
  service->request_lane(number(), context_.get(), stream_.get(), queue, &accept_event_);
}

void GrpcServerLane::on_accept(bool ok) {
  const std::shared_ptr<GrpcServerLane> self = std::move(self_);
  if (ok) return server_->accepted(self);
  core_->end_operation();
}

std::string GrpcServerLane::remote() {
  MutexLock lock(&context_mutex_);
  return context_ == nullptr ? std::string() : peer_address(context_->peer());
}

std::shared_ptr<const grpc::AuthContext> GrpcServerLane::peer_auth() {
  MutexLock lock(&context_mutex_);
  return context_ == nullptr ? nullptr : context_->auth_context();
}

void GrpcServerLane::on_deadline() {
  give_up_handshake(make_error(ErrorKind::kDeadline, "the handshake was not completed in time"));
}

void GrpcServerLane::cancel() {
  MutexLock lock(&context_mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

void GrpcServerLane::free_stream() {
  std::unique_ptr<grpc::ServerContext> context;
  {
    MutexLock lock(&context_mutex_);
    context = std::move(context_);
  }
  stream_ = nullptr;
}

void GrpcServerLane::judge_end(bool ok, LaneEnd* end) {
  if (!end->why.ok()) return;
  end->orderly = ok;
  if (!ok) end->why = make_error(ErrorKind::kUnavailable, "its stream broke");
}

// ---- health ----------------------------------------------------------------------------------

// One at a time: the next is taken when this one is answered.
class GrpcServer::HealthCall final {
 public:
  explicit HealthCall(std::shared_ptr<GrpcServer> server)
      : server_(std::move(server)), writer_(&context_) {}

  void wait(GrpcRawService* service, grpc::ServerCompletionQueue* queue) {
    service->request_health(&context_, &request_, &writer_, queue, &request_event_);
  }

 private:
  void on_request(bool ok) {
    if (!ok) return end(false);
    std::vector<grpc::Slice> slices;
    std::string bytes;
    const bool readable = request_.Dump(&slices).ok();
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
    v1::health::HealthCheckRequest request;
    if (!readable || !request.ParseFromString(bytes)) {
      return writer_.FinishWithError(
          grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "the request cannot be read"),
          &answer_event_);
    }
    if (!request.service().empty()) {
      return writer_.FinishWithError(
          grpc::Status(grpc::StatusCode::NOT_FOUND, "only the worker as a whole is known"),
          &answer_event_);
    }
    v1::health::HealthCheckResponse response;
    response.set_status(v1::health::HealthCheckResponse::SERVING);
    const std::string out = response.SerializeAsString();
    const grpc::Slice slice(out);
    writer_.Finish(grpc::ByteBuffer(&slice, 1), grpc::Status::OK, &answer_event_);
  }
  void on_answer(bool ok) {
    (void)ok;
    end(true);
  }
  void end(bool again) {
    const std::shared_ptr<GrpcServer> server = server_;
    delete this;
    if (again) server->post_health();
    server->core_->end_operation();
  }

  const std::shared_ptr<GrpcServer> server_;
  grpc::ServerContext context_;
  grpc::ByteBuffer request_;
  grpc::ServerAsyncResponseWriter<grpc::ByteBuffer> writer_;
  GrpcMemberEvent<HealthCall, &HealthCall::on_request> request_event_{this};
  GrpcMemberEvent<HealthCall, &HealthCall::on_answer> answer_event_{this};
};

void GrpcServer::post_health() {
  if (!core_->begin_operation()) return;
  // Owned by its operation; deletes itself when that is complete.
  (new HealthCall(shared_from_this()))->wait(&service_, queue_);
}

}  // namespace weft::internal
