#include "weft/store/internal/tcp_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/call_scope.h"
#include "weft/store/internal/grpc_util.h"
#include "weft/store/internal/quiet_wait.h"
#include "weft/store/internal/tcp_data.h"
#include "weft/transport/address.h"

namespace weft::internal {
namespace {

// Answers that no repetition changes.
bool is_final(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNAUTHENTICATED: return true;
    default: return false;
  }
}

Status final_error(const StoreOp& op, const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    return op.error(ErrorKind::kUnimplemented, absl::StrCat("what answers there is no weft store: ",
                                                            grpc_status_text(status)));
  }
  const bool permission = status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
                          status.error_code() == grpc::StatusCode::UNAUTHENTICATED;
  return op.error(permission ? ErrorKind::kPermission : ErrorKind::kProtocol,
                  absl::StrCat("the server refuses: ", grpc_status_text(status)));
}

// A server that does not believe our certificate and one that is just being started anew look the
// same a few times.
constexpr int kTurnedAwayAttempts = 5;

std::shared_ptr<grpc::Channel> make_channel(const std::string& address, const GrpcTls* tls) {
  grpc::ChannelArguments arguments = store_channel_arguments();
  if (tls == nullptr) {
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  GrpcTls::prepare(&arguments);
  return grpc::CreateCustomChannel(address, tls->channel(), arguments);
}

}  // namespace

// An open stream on which nothing more happens: its end tells the server that we are gone.
struct TcpLink::Session {
  using Stub = grpc::TemplatedGenericStub<v1::StoreSessionRequest, v1::StoreSessionReply>;
  using Stream = grpc::ClientAsyncReaderWriter<v1::StoreSessionRequest, v1::StoreSessionReply>;

  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  std::unique_ptr<Stream> stream;
  v1::StoreSessionReply reply;

  // Waits for the one operation under way; false when it failed or the time was over.
  bool next(absl::Duration length) {
    void* tag = nullptr;
    bool ok = false;
    if (queue.AsyncNext(&tag, &ok, grpc_after(length)) == grpc::CompletionQueue::GOT_EVENT)
      return ok;
    context.TryCancel();
    queue.Next(&tag, &ok);
    return false;
  }
  // How it ended. REQUIRES: no operation is under way, and it has failed or was cancelled.
  grpc::Status finish() {
    grpc::Status status;
    stream->Finish(&status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    stream = nullptr;
    return status;
  }
  ~Session() {
    if (stream != nullptr) {
      context.TryCancel();
      finish();
    }
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }
};

class TcpLink::RequestId {
 public:
  RequestId(TcpLink* link, bool wanted) : link_(link) {
    if (!wanted) return;
    MutexLock lock(&link_->mutex_);
    id_ = link_->next_request_++;
    link_->in_flight_.insert(id_);
  }
  ~RequestId() {
    if (id_ == 0) return;
    MutexLock lock(&link_->mutex_);
    link_->in_flight_.erase(id_);
  }
  RequestId(const RequestId&) = delete;
  RequestId& operator=(const RequestId&) = delete;
  uint64_t id() const { return id_; }

 private:
  TcpLink* const link_;
  uint64_t id_ = 0;
};

TcpLink::TcpLink(std::shared_ptr<Runtime> runtime, std::string host, int port,
                 std::shared_ptr<const GrpcTls> tls)
    : runtime_(std::move(runtime)),
      url_(absl::StrCat("tcp://", join_host_port(host, port))),
      client_id_(std::max<uint64_t>(runtime_->random().next(), 1)),
      tls_(std::move(tls)),
      channel_(make_channel(join_host_port(host, port), tls_.get())),
      changed_(runtime_.get()) {}

TcpLink::~TcpLink() = default;

void TcpLink::wake() {
  MutexLock lock(&mutex_);
  changed_.notify_all();
}

Status TcpLink::open(const StoreOp& op, InterruptScope* scope) {
  RetryBackoff backoff(&runtime_->random());
  return open_session(op, scope, &backoff);
}

// LINK-2.
Status TcpLink::open_session(const StoreOp& op, InterruptScope* scope, RetryBackoff* backoff) {
  std::string last_error = "nobody has answered yet";
  int turned_away = 0;  // in a row
  while (true) {
    {
      MutexLock lock(&mutex_);
      // Under the lock, so that wake() cannot fall between this and the wait.
      if (scope->interrupted()) return op.interrupted();
      if (session_ != nullptr) return absl::OkStatus();
      if (runtime_->now() >= op.deadline) {
        lock.unlock();
        return out_of_time(op, backoff->attempts(), last_error);
      }
      if (opening_) {
        const Status waited = changed_.wait_until(&mutex_, op.deadline);
        if (error_kind(waited) == ErrorKind::kResource) return waited;
        continue;
      }
      opening_ = true;
    }
    bool closed_door = false;
    StatusOr<std::unique_ptr<Session>> session = try_session(op, scope, &closed_door);
    {
      MutexLock lock(&mutex_);
      opening_ = false;
      changed_.notify_all();
      if (session.ok()) {
        const v1::StoreSessionReply& reply = (*session)->reply;
        if (reply.server_id() == server_id_ && !reply.known()) ++memory_epoch_;
        server_id_ = reply.server_id();
        ++session_number_;
        session_ = *std::move(session);
        return absl::OkStatus();
      }
    }
    if (error_kind(session.status()) != ErrorKind::kUnavailable) return session.status();
    last_error = std::string(session.status().message());
    turned_away = closed_door ? turned_away + 1 : 0;
    if (tls_ != nullptr && turned_away >= kTurnedAwayAttempts) {
      return op.wrap(tls_->turned_away_error(turned_away));
    }
    WEFT_RETURN_IF_ERROR(pause(op, scope, backoff, last_error));
  }
}

StatusOr<std::unique_ptr<TcpLink::Session>> TcpLink::try_session(const StoreOp& op,
                                                                 InterruptScope* scope,
                                                                 bool* turned_away) {
  BlockingRegion region;
  WEFT_RETURN_IF_ERROR(region.status());
  auto session = std::make_unique<Session>();
  InterruptScope::Guard guard(scope, &session->context);
  v1::StoreSessionRequest request;
  request.set_magic(kStoreMagic);
  request.set_protocol(kStoreProtocol);
  request.set_client_id(client_id_);
  if (tls_ != nullptr) request.set_token(tls_->credentials().token);
  {
    MutexLock lock(&mutex_);
    request.set_last_server_id(server_id_);
  }
  Session::Stub stub(channel_);
  session->stream = stub.PrepareCall(&session->context, kStoreSessionMethod, &session->queue);
  const auto left = [&] { return op.deadline - runtime_->now(); };
  session->stream->StartCall(session.get());
  bool ok = session->next(left());
  if (ok) {
    session->stream->Write(request, session.get());
    ok = session->next(left());
  }
  if (ok) {
    session->stream->Read(&session->reply, session.get());
    ok = session->next(left());
  }
  if (ok) {
    const v1::StoreSessionReply& reply = session->reply;
    if (reply.magic() == kStoreMagic && reply.protocol() == kStoreProtocol &&
        reply.server_id() != 0) {
      return session;
    }
    return op.error(ErrorKind::kProtocol, "what answers there is no weft store of this protocol");
  }
  const grpc::Status status = session->finish();
  if (is_final(status.error_code())) return final_error(op, status);
  const GrpcTls::Fault fault = GrpcTls::fault(status);
  if (tls_ != nullptr && fault == GrpcTls::Fault::kHandshake) {
    return op.wrap(tls_->handshake_error(status));
  }
  *turned_away = fault == GrpcTls::Fault::kTurnedAway;
  return make_error(ErrorKind::kUnavailable,
                    absl::StrCat(grpc_status_text(status),
                                 *turned_away && tls_ == nullptr
                                     ? "; it takes no plain text, perhaps, and there are no "
                                       "credentials here"
                                     : ""));
}

void TcpLink::lose_session(uint64_t number) {
  std::unique_ptr<Session> old;  // ends outside of the lock
  MutexLock lock(&mutex_);
  if (number == session_number_) old = std::move(session_);
  lock.unlock();
}

Status TcpLink::pause(const StoreOp& op, InterruptScope* scope, RetryBackoff* backoff,
                      std::string_view last_error) {
  if (!scope->pause(backoff->next(), op.deadline, channel_.get())) return op.interrupted();
  if (runtime_->now() < op.deadline) return absl::OkStatus();
  return out_of_time(op, backoff->attempts(), last_error);
}

Status TcpLink::out_of_time(const StoreOp& op, int attempts, std::string_view last_error) const {
  return op.error(
      ErrorKind::kUnavailable,
      absl::StrCat("cannot reach the server within ", absl::FormatDuration(op.deadline - op.begin),
                   " (", attempts, " attempts, the last: ",
                   absl::string_view(last_error.data(), last_error.size()), ")"));
}

grpc::Status TcpLink::attempt(const StoreOp& op, InterruptScope* scope,
                              const v1::StoreRequest& request, v1::StoreReply* reply) {
  grpc::ClientContext context;
  context.set_deadline(grpc_after(op.deadline - runtime_->now()));
  InterruptScope::Guard guard(scope, &context);
  grpc::CompletionQueue queue;
  grpc::Status status;
  grpc::TemplatedGenericStub<v1::StoreRequest, v1::StoreReply> stub(channel_);
  auto call = stub.PrepareUnaryCall(&context, kStoreDoMethod, request, &queue);
  call->StartCall();
  call->Finish(reply, &status, &context);
  QuietWait(runtime_.get()).drain(&queue);  // returns when the one operation has
  return status;
}

StatusOr<v1::StoreReply> TcpLink::call(const StoreOp& op, InterruptScope* scope, bool changes,
                                       v1::StoreRequest request) {
  const RequestId id(this, changes);
  request.set_client_id(client_id_);
  request.set_request_id(id.id());
  RetryBackoff backoff(&runtime_->random());
  bool sent = false;
  uint64_t epoch = 0;
  while (true) {
    WEFT_RETURN_IF_ERROR(open_session(op, scope, &backoff));
    uint64_t session = 0;
    {
      MutexLock lock(&mutex_);
      session = session_number_;
      if (!sent) epoch = memory_epoch_;
      if (changes && epoch != memory_epoch_) {
        lock.unlock();
        return op.error(ErrorKind::kMaybeExecuted,
                        "the server was out of reach for so long that it has forgotten whether the "
                        "operation took effect");
      }
      request.set_done_below(in_flight_.empty() ? next_request_ : *in_flight_.begin());
    }
    v1::StoreReply reply;
    grpc::Status status;
    {
      BlockingRegion region;
      WEFT_RETURN_IF_ERROR(region.status());
      status = attempt(op, scope, request, &reply);
    }
    if (scope->interrupted()) return op.interrupted();
    if (status.ok()) {
      switch (reply.outcome()) {
        case v1::StoreReply::DONE:
        case v1::StoreReply::NOT_YET: return reply;
        case v1::StoreReply::FAILED:
          return op.wrap(make_error(static_cast<absl::StatusCode>(reply.error_code()),
                                    static_cast<ErrorKind>(reply.error_kind()), reply.error()));
        case v1::StoreReply::REFUSED_NO_SESSION: lose_session(session); continue;
        default:
          return op.error(ErrorKind::kProtocol,
                          absl::StrCat("the server answers with outcome ", reply.outcome()));
      }
    }
    if (is_final(status.error_code())) return final_error(op, status);
    if (runtime_->now() >= op.deadline ||
        status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      // A server that is there and does not answer is another matter than one that is not there.
      if (channel_->GetState(false) == GRPC_CHANNEL_READY)
        return op.deadline_error("no answer came");
      return out_of_time(op, backoff.attempts() + 1, grpc_status_text(status));
    }
    sent = true;
    lose_session(session);
    WEFT_RETURN_IF_ERROR(pause(op, scope, &backoff, grpc_status_text(status)));
  }
}

}  // namespace weft::internal
