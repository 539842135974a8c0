#include "weft/store/internal/tcp_server.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/store/internal/address.h"
#include "weft/store/internal/checks.h"
#include "weft/store/internal/grpc_util.h"
#include "weft/store/internal/quiet_wait.h"

namespace weft::internal {
namespace {

constexpr int kMaxRequestBytes = 8 << 20;
// What gRPC gets to return open calls after stop() has answered them.
constexpr absl::Duration kShutdownBound = absl::Seconds(5);

uint64_t nonzero(Random& random) { return std::max<uint64_t>(random.next(), 1); }

}  // namespace

// One call of gRPC, from the slot that accepts it to its last event.
struct TcpServer::Call {
  grpc::GenericServerContext context;
  grpc::GenericServerAsyncReaderWriter stream{&context};
  grpc::ByteBuffer bytes;
  Tag accepted, read, written, finished, done;
  int pending = 0;         // events still to come
  bool finishing = false;  // Finish was asked for
  bool writing = false;    // the reply to a session request is on its way
  bool over = false;       // the client got its answer or is gone
  uint64_t session = 0;    // the client's id, when this is its session
  v1::StoreRequest request;
  std::multimap<std::string, Call*>::iterator parked_at;
  std::multimap<absl::Time, Call*>::iterator expires_at;
  bool parked = false;
  bool expires = false;
};

TcpServer::TcpServer(const TcpStoreServerOptions& options, std::shared_ptr<Runtime> runtime)
    : runtime_(std::move(runtime)),
      host_(options.host),
      data_(nonzero(runtime_->random()), options.max_bytes),
      clients_changed_(runtime_.get()) {}

StatusOr<std::unique_ptr<TcpServer>> TcpServer::start(const TcpStoreServerOptions& options,
                                                      std::shared_ptr<Runtime> runtime) {
  WEFT_RETURN_IF_ERROR(check_listen_address(
      options.host, options.port, options.allow_insecure || !options.credentials.empty()));
  WEFT_RETURN_IF_ERROR(check_can_bind(options.host, options.port));
  std::shared_ptr<const GrpcTls> tls;
  if (!options.credentials.empty()) {
    WEFT_ASSIGN_OR_RETURN(tls, GrpcTls::make(options.credentials, *runtime));
  }
  std::unique_ptr<TcpServer> self(new TcpServer(options, std::move(runtime)));
  self->tls_ = tls;
  const std::string address = join_host_port(options.host, options.port);
  grpc::ServerBuilder builder;
  // Without this a second server would share the port and take half of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.AddListeningPort(
      address, tls == nullptr ? grpc::InsecureServerCredentials() : tls->server(), &self->port_);
  builder.RegisterAsyncGenericService(&self->service_);
  self->queue_ = builder.AddCompletionQueue();
  self->server_ = builder.BuildAndStart();
  if (self->server_ == nullptr || self->port_ == 0) {
    {
      MutexLock lock(&self->stop_mutex_);
      self->stopped_ = true;  // nothing to stop
    }
    if (self->server_ != nullptr) self->server_->Shutdown();
    self->queue_->Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (self->queue_->Next(&tag, &ok)) {
    }
    return make_error(ErrorKind::kUnavailable,
                      absl::StrCat("cannot listen to ", address, ": taken a moment ago"));
  }
  self->thread_ = self->runtime_->spawn("weft-store", [server = self.get()] { server->poll(); });
  return self;
}

int TcpServer::num_clients() const {
  MutexLock lock(&mutex_);
  return num_clients_;
}

TcpServer::~TcpServer() { stop(absl::ZeroDuration()); }

void TcpServer::stop(absl::Duration linger) {
  MutexLock stopping(&stop_mutex_);
  if (stopped_) return;
  stopped_ = true;
  {
    MutexLock lock(&mutex_);
    const absl::Time deadline = deadline_after(runtime_->now(), linger);
    while (num_clients_ > 0 && runtime_->now() < deadline) {
      if (!clients_changed_.wait_until(&mutex_, deadline).ok()) break;
    }
  }
  close_alarm_.Set(queue_.get(), gpr_now(GPR_CLOCK_MONOTONIC), &close_tag_);
  server_->Shutdown(grpc_after(kShutdownBound));
  down_alarm_.Set(queue_.get(), gpr_now(GPR_CLOCK_MONOTONIC), &down_tag_);
  thread_->join();
}

void TcpServer::poll() {
  accept();
  bool down = false;
  bool queue_open = true;
  void* tag = nullptr;
  bool ok = false;
  QuietWait wait(runtime_.get(), absl::Milliseconds(10));
  while (true) {
    if (down && queue_open && accepting_ == 0 && calls_.empty()) {
      queue_->Shutdown();
      queue_open = false;
    }
    const absl::Time expiry = expiries_.empty() ? absl::InfiniteFuture() : expiries_.begin()->first;
    const auto status = wait.next(queue_.get(), &tag, &ok, expiry);
    if (status == grpc::CompletionQueue::SHUTDOWN) return;
    if (status == grpc::CompletionQueue::GOT_EVENT) {
      Tag* const event = static_cast<Tag*>(tag);
      if (event == &close_tag_) {
        begin_closing();
      } else if (event == &down_tag_) {
        down = true;
      } else {
        on_event(event->call, event->event, ok);
      }
    }
    expire_parked();
  }
}

void TcpServer::accept() {
  auto owned = std::make_unique<Call>();
  Call* const call = owned.get();
  call->accepted = {call, Event::kAccepted};
  call->read = {call, Event::kRead};
  call->written = {call, Event::kWritten};
  call->finished = {call, Event::kFinished};
  call->done = {call, Event::kDone};
  calls_.emplace(call, std::move(owned));
  ++accepting_;
  call->context.AsyncNotifyWhenDone(&call->done);
  service_.RequestCall(&call->context, &call->stream, queue_.get(), queue_.get(), &call->accepted);
}

void TcpServer::on_event(Call* call, Event event, bool ok) {
  if (event == Event::kAccepted) {
    on_accepted(call, ok);
    return;
  }
  --call->pending;
  switch (event) {
    case Event::kRead: on_read(call, ok); break;
    case Event::kWritten:
      // Only sessions write without finishing; then they wait for the client's end.
      call->writing = false;
      if (ok && !call->over && !closing_) {
        ++call->pending;
        call->stream.Read(&call->bytes, &call->read);
      } else if (!call->over) {
        finish(call, grpc::Status(grpc::StatusCode::UNAVAILABLE, "the store server is leaving"));
      }
      break;
    case Event::kDone:
      call->over = true;
      unpark(call);
      if (call->session != 0) {
        data_.close_session(std::exchange(call->session, 0), runtime_->now());
        count_clients();
      }
      break;
    default: break;
  }
  release_if_done(call);
}

void TcpServer::on_accepted(Call* call, bool ok) {
  --accepting_;
  if (!ok) {  // the server is being shut down; there will be no kDone for a call that never was
    calls_.erase(call);
    return;
  }
  ++call->pending;  // kDone
  const std::string& method = call->context.method();
  if (closing_) {
    finish(call, grpc::Status(grpc::StatusCode::UNAVAILABLE, "the store server is leaving"));
    return;
  }
  accept();
  if (method != kStoreSessionMethod && method != kStoreDoMethod) {
    finish(call, grpc::Status(grpc::StatusCode::UNIMPLEMENTED,
                              "this is a weft store, it has no such method"));
    return;
  }
  ++call->pending;
  call->stream.Read(&call->bytes, &call->read);
}

void TcpServer::on_read(Call* call, bool ok) {
  if (call->over || call->finishing) return;
  if (closing_) {
    finish(call, grpc::Status(grpc::StatusCode::UNAVAILABLE, "the store server is leaving"));
  } else if (call->session != 0) {
    finish(call, ok ? grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "one message per session")
                    : grpc::Status::OK);
  } else if (!ok) {
    finish(call, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "a call without a message"));
  } else if (call->context.method() == kStoreSessionMethod) {
    begin_session(call);
  } else {
    begin_operation(call);
  }
}

void TcpServer::begin_session(Call* call) {
  v1::StoreSessionRequest request;
  if (!from_bytes(&call->bytes, &request)) {
    finish(call, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "not a session request"));
    return;
  }
  if (tls_ != nullptr) {
    const Status token = tls_->check_token(request.token(), "the client");
    if (!token.ok()) {
      finish(call, grpc::Status(grpc::StatusCode::PERMISSION_DENIED, std::string(token.message())));
      return;
    }
  }
  StatusOr<v1::StoreSessionReply> reply = data_.open_session(request, runtime_->now());
  if (!reply.ok()) {
    finish(call, grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                              std::string(reply.status().message())));
    return;
  }
  call->session = request.client_id();
  count_clients();
  grpc::ByteBuffer bytes;
  to_bytes(*reply, &bytes);
  ++call->pending;
  call->writing = true;
  call->stream.Write(bytes, &call->written);
}

void TcpServer::begin_operation(Call* call) {
  if (!from_bytes(&call->bytes, &call->request)) {
    finish(call, grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "not a store request"));
    return;
  }
  call->bytes.Clear();
  run_operation(call);
}

void TcpServer::run_operation(Call* call) {
  TcpData::Result result = data_.handle(call->request);
  if (!result.parked_on.empty()) {
    park(call, result.parked_on);
    return;
  }
  reply(call, result.reply);
  if (!result.changed.empty()) wake_parked(result.changed);
}

void TcpServer::reply(Call* call, const v1::StoreReply& reply) {
  unpark(call);
  grpc::ByteBuffer bytes;
  to_bytes(reply, &bytes);
  call->finishing = true;
  ++call->pending;
  call->stream.WriteAndFinish(bytes, grpc::WriteOptions(), grpc::Status::OK, &call->finished);
}

void TcpServer::finish(Call* call, const grpc::Status& status) {
  if (call->finishing || call->over) return;
  call->finishing = true;
  ++call->pending;
  call->stream.Finish(status, &call->finished);
}

void TcpServer::park(Call* call, const std::string& key) {
  if (call->parked) parked_.erase(call->parked_at);
  call->parked_at = parked_.emplace(key, call);
  call->parked = true;
  if (call->expires) return;
  const uint32_t ms = call->request.has_wait_keys() ? call->request.wait_keys().max_wait_ms()
                                                    : call->request.wait_change().max_wait_ms();
  call->expires_at = expiries_.emplace(runtime_->now() + absl::Milliseconds(ms), call);
  call->expires = true;
}

void TcpServer::unpark(Call* call) {
  if (std::exchange(call->parked, false)) parked_.erase(call->parked_at);
  if (std::exchange(call->expires, false)) expiries_.erase(call->expires_at);
}

void TcpServer::wake_parked(const std::string& key) {
  const auto [first, last] = parked_.equal_range(key);
  std::vector<Call*> waiting;
  for (auto it = first; it != last; ++it) waiting.push_back(it->second);
  // A wait changes nothing, so this does not come here again.
  for (Call* call : waiting) run_operation(call);
}

void TcpServer::expire_parked() {
  if (expiries_.empty()) return;
  const absl::Time now = runtime_->now();
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    Call* const call = expiries_.begin()->second;
    reply(call, data_.not_yet(call->request));
  }
}

void TcpServer::begin_closing() {
  closing_ = true;
  for (const auto& [key, call] : calls_) {
    // A session that is still being answered ends when that is done: one write at a time.
    if (call->writing || (!call->parked && call->session == 0)) continue;
    unpark(call.get());
    finish(call.get(), grpc::Status(grpc::StatusCode::UNAVAILABLE, "the store server is leaving"));
  }
}

void TcpServer::release_if_done(Call* call) {
  if (call->pending == 0 && call->over) calls_.erase(call);
}

void TcpServer::count_clients() {
  int n = 0;
  for (const auto& [key, call] : calls_) n += call->session != 0;
  MutexLock lock(&mutex_);
  num_clients_ = n;
  clients_changed_.notify_all();
}

}  // namespace weft::internal

namespace weft {

TcpStoreServer::TcpStoreServer(std::unique_ptr<internal::TcpServer> server)
    : server_(std::move(server)) {}
TcpStoreServer::~TcpStoreServer() = default;

StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::start(
    const TcpStoreServerOptions& options, std::shared_ptr<Runtime> runtime) {
  auto server = internal::TcpServer::start(options, std::move(runtime));
  if (!server.ok()) {
    return annotate(server.status(),
                    absl::StrCat("cannot start a store server at tcp://",
                                 internal::join_host_port(options.host, options.port)));
  }
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(*std::move(server)));
}

int TcpStoreServer::port() const { return server_->port(); }
std::string TcpStoreServer::url() const {
  return absl::StrCat("tcp://", internal::join_host_port(server_->host(), server_->port()));
}
int TcpStoreServer::num_clients() const { return server_->num_clients(); }
void TcpStoreServer::stop(Timeout linger) { server_->stop(linger.value_or(absl::Seconds(10))); }

}  // namespace weft
