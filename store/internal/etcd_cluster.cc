#include "weft/store/internal/etcd_cluster.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "weft/common/files.h"
#include "weft/proto/etcd.pb.h"
#include "weft/store/internal/address.h"
#include "weft/store/internal/grpc_util.h"
#include "weft/store/internal/quiet_wait.h"
#include "weft/transport/checked_credentials.h"
#include "weft/transport/grpc_tls.h"

namespace weft::internal {
namespace {

using grpc::protobuf::MessageLite;

constexpr char kAuthenticate[] = "/etcdserverpb.Auth/Authenticate";
// Longer than an election of etcd takes by its defaults.
constexpr absl::Duration kMemberTime = absl::Seconds(5);
constexpr int kEndedAsTheyBegan = 5;
constexpr size_t kMaxEndpoints = 64;

Status wrong(std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("an etcd store: ", std::string(what)));
}

StatusOr<std::string> read_password(const EtcdStoreOptions& options, Runtime& runtime) {
  const bool has_password = !options.password.empty() || !options.password_file.empty();
  if (options.user.empty()) {
    if (has_password) return wrong("there is a password and no user");
    return std::string();
  }
  if (!has_password) {
    return wrong(absl::StrCat("user '", options.user,
                              "' has no password: give password_file (the URL's password_file=)"));
  }
  if (!options.password.empty() && !options.password_file.empty()) {
    return wrong("both password and password_file are given");
  }
  std::string password = options.password;
  if (password.empty()) {
    StatusOr<std::string> text = runtime.files().read(options.password_file);
    if (!text.ok()) {
      return wrong(absl::StrCat("cannot read the password file '", options.password_file,
                                "': ", std::string(text.status().message())));
    }
    password = *std::move(text);
  }
  password = std::string(absl::StripAsciiWhitespace(password));
  if (password.empty()) return wrong("the password is empty");
  return password;
}

bool is_about(const grpc::Status& status, absl::string_view words) {
  return absl::StrContains(status.error_message(), words);
}

}  // namespace

StatusOr<std::unique_ptr<EtcdCluster>> EtcdCluster::make(const std::vector<EtcdEndpoint>& endpoints,
                                                         const EtcdStoreOptions& options,
                                                         std::shared_ptr<Runtime> runtime) {
  if (endpoints.empty() || endpoints.size() > kMaxEndpoints) {
    return wrong(absl::StrCat("1 to ", kMaxEndpoints, " endpoints are allowed, given are ",
                              endpoints.size()));
  }
  Runtime& system = *runtime;
  std::unique_ptr<EtcdCluster> out(new EtcdCluster(std::move(runtime)));
  out->prefix_ = options.prefix;
  out->user_ = options.user;
  WEFT_ASSIGN_OR_RETURN(out->password_, read_password(options, system));
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  const bool has_tls =
      !options.ca_file.empty() || !options.cert_file.empty() || !options.key_file.empty();
  if (has_tls) {
    WEFT_ASSIGN_OR_RETURN(ClientTls tls, check_client_files({.ca_file = options.ca_file,
                                                             .cert_file = options.cert_file,
                                                             .key_file = options.key_file},
                                                            system));
    credentials = grpc::SslCredentials({.pem_root_certs = std::move(tls.ca),
                                        .pem_private_key = std::move(tls.key),
                                        .pem_cert_chain = std::move(tls.cert)});
    out->ca_file_ = options.ca_file;
    out->cert_file_ = options.cert_file;
  }
  for (const EtcdEndpoint& at : endpoints) {
    WEFT_RETURN_IF_ERROR(check_dial_address("an etcd", at.host, at.port));
    if (!has_tls && !options.user.empty() && !options.allow_insecure &&
        !check_listen_address(at.host, 0, false).ok()) {
      return make_error(
          ErrorKind::kPermission,
          absl::StrCat("an etcd store: the password of user '", options.user, "' would travel to '",
                       at.host,
                       "' in plain text: give ca_file (the URL's ca=), or allow_insecure "
                       "(allow_insecure=1) in a network that you trust"));
    }
    const std::string address = join_host_port(at.host, at.port);
    absl::StrAppend(&out->addresses_, out->addresses_.empty() ? "" : ",", address);
    out->channels_.push_back(
        grpc::CreateCustomChannel(address, credentials, store_channel_arguments()));
  }
  return out;
}

void EtcdCluster::Route::sign(grpc::ClientContext* context) const {
  if (!token.empty()) context->AddMetadata("token", token);
}

std::shared_ptr<grpc::Channel> EtcdCluster::channel() const {
  MutexLock lock(&mutex_);
  return channels_[current_];
}

grpc::Status EtcdCluster::route(InterruptScope* scope, absl::Time deadline, Route* out) {
  {
    MutexLock lock(&mutex_);
    *out = {channels_[current_], token_};
  }
  if (user_.empty() || !out->token.empty()) return grpc::Status::OK;
  etcdserverpb::AuthenticateRequest request;
  request.set_name(user_);
  request.set_password(password_);
  etcdserverpb::AuthenticateResponse reply;
  const grpc::Status status = send(*out, scope, deadline, kAuthenticate, request, &reply);
  settle(*out, status);
  if (!status.ok()) return status;
  out->token = reply.token();
  MutexLock lock(&mutex_);
  token_ = reply.token();
  return status;
}

bool EtcdCluster::settle(const Route& route, const grpc::Status& status) {
  const bool is_away = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                       status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  const bool is_stale = status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
                        is_about(status, "auth store is old") ||
                        is_about(status, "invalid auth token");
  MutexLock lock(&mutex_);
  // The second are the words after a handshake whose certificate the other side did not like.
  const bool is_turned_away = GrpcTls::fault(status) == GrpcTls::Fault::kTurnedAway ||
                              is_about(status, "Endpoint read failed");
  turned_away_ = is_turned_away ? turned_away_ + 1 : 0;
  if (is_away && channels_[current_] == route.channel) current_ = (current_ + 1) % channels_.size();
  if (is_stale && token_ == route.token) token_.clear();
  return is_stale && !route.token.empty();
}

grpc::Status EtcdCluster::send(const Route& route, InterruptScope* scope, absl::Time deadline,
                               const char* method, const MessageLite& request, MessageLite* reply) {
  const absl::Time now = runtime_->now();
  if (has_several()) deadline = std::min(deadline, now + kMemberTime);
  grpc::ClientContext context;
  context.set_deadline(grpc_after(deadline - now));
  route.sign(&context);
  InterruptScope::Guard guard(scope, &context);
  grpc::CompletionQueue queue;
  grpc::Status status;
  grpc::TemplatedGenericStub<MessageLite, MessageLite> stub(route.channel);
  auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  call->Finish(reply, &status, &context);
  QuietWait(runtime_.get()).drain(&queue);
  return status;
}

grpc::Status EtcdCluster::call(InterruptScope* scope, absl::Time deadline, const char* method,
                               const MessageLite& request, MessageLite* reply) {
  for (bool is_second = false;; is_second = true) {
    Route where;
    grpc::Status status = route(scope, deadline, &where);
    if (!status.ok()) return status;
    status = send(where, scope, deadline, method, request, reply);
    if (!settle(where, status) || is_second) return status;
  }
}

std::string EtcdCluster::hint() const {
  MutexLock lock(&mutex_);
  if (turned_away_ < kEndedAsTheyBegan) return "";
  const char* const what =
      ca_file_.empty() ? "does it want TLS (ca_file, the URL's ca=)?"
      : cert_file_.empty()
          ? "it speaks plain text, or wants a client's certificate (cert_file and key_file, the "
            "URL's cert= and key=)"
          : "it speaks plain text, or does not believe the certificate that cert_file names";
  return absl::StrCat("it ended ", turned_away_, " connections as they began: ", what);
}

std::optional<Status> EtcdCluster::tls_error(const StoreOp& op, const grpc::Status& status) const {
  // In plain text an etcd that is just starting does the same.
  if (ca_file_.empty()) return std::nullopt;
  const std::string text = grpc_status_text(status);
  if (GrpcTls::fault(status) == GrpcTls::Fault::kHandshake) {
    return op.error(
        ErrorKind::kPermission,
        absl::StrCat("the certificate of that etcd is not believed: no authority in '", ca_file_,
                     "' has signed it, it is out of date, or it is for "
                     "another host (",
                     text, ")"));
  }
  const std::string why = hint();
  if (why.empty()) return std::nullopt;
  return op.error(ErrorKind::kPermission,
                  absl::StrCat("no answer of etcd: ", why, " (", text, ")"));
}

std::optional<Status> EtcdCluster::error_if_final(const StoreOp& op, const grpc::Status& status) {
  const std::string refusal = absl::StrCat("etcd refuses: ", grpc_status_text(status));
  if (is_about(status, "user name is empty")) {
    return op.error(ErrorKind::kPermission,
                    absl::StrCat(refusal,
                                 "; it has users: give user and password_file (the URL's "
                                 "user=NAME&password_file=FILE)"));
  }
  if (is_about(status, "authentication is not enabled")) {
    return op.error(ErrorKind::kInvalidArgument,
                    absl::StrCat(refusal, "; it has no users: leave user (user=) out"));
  }
  if (is_about(status, "authentication failed")) {
    return op.error(ErrorKind::kPermission, absl::StrCat(refusal, "; is there a user '", user_,
                                                         "', and is this the password?"));
  }
  switch (status.error_code()) {
    case grpc::StatusCode::UNIMPLEMENTED:
      return op.error(ErrorKind::kUnimplemented,
                      absl::StrCat("what answers there is no etcd: ", grpc_status_text(status)));
    case grpc::StatusCode::PERMISSION_DENIED:
      if (user_.empty()) return op.error(ErrorKind::kPermission, refusal);
      return op.error(ErrorKind::kPermission, absl::StrCat(refusal, "; user '", user_,
                                                           "' needs a role with `etcdctl role "
                                                           "grant-permission ROLE readwrite ",
                                                           prefix_, "/ --prefix`"));
    case grpc::StatusCode::UNAUTHENTICATED: return op.error(ErrorKind::kPermission, refusal);
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION: return op.error(ErrorKind::kProtocol, refusal);
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      // Its database is full; "too many requests" passes.
      if (!is_about(status, "space")) return std::nullopt;
      return op.error(ErrorKind::kResource, refusal);
    case grpc::StatusCode::UNAVAILABLE: return tls_error(op, status);
    default: return std::nullopt;
  }
}

}  // namespace weft::internal
