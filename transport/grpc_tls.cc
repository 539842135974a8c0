#include "weft/transport/grpc_tls.h"

#include <grpcpp/grpcpp.h>

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace weft::internal {
namespace {

// Sent in the place of a host name. A certificate that has it among its DNS names keeps gRPC from
// logging, at every connection, that it has not.
constexpr char kServerName[] = "worker.weft";

std::vector<std::string> values(const grpc::AuthContext& peer, const char* property) {
  std::vector<std::string> out;
  for (const grpc::string_ref& value : peer.FindPropertyValues(property)) {
    out.emplace_back(value.data(), value.size());
  }
  return out;
}

}  // namespace

StatusOr<std::shared_ptr<const GrpcTls>> GrpcTls::make(const Credentials& credentials,
                                                       Runtime& runtime) {
  std::shared_ptr<GrpcTls> self(new GrpcTls());
  WEFT_ASSIGN_OR_RETURN(self->credentials_, check_credentials(credentials, runtime));
  namespace tls = grpc::experimental;
  const auto files = std::make_shared<tls::FileWatcherCertificateProvider>(
      credentials.key_file, credentials.cert_file, credentials.ca_file,
      static_cast<unsigned>(absl::ToInt64Seconds(credentials.refresh)));
  // Adds no check to the one of the chain of signatures.
  const auto chain_only = std::make_shared<tls::NoOpCertificateVerifier>();

  tls::TlsServerCredentialsOptions server(files);
  server.watch_root_certs();
  server.watch_identity_key_cert_pairs();
  server.set_certificate_verifier(chain_only);
  server.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  self->server_ = tls::TlsServerCredentials(server);

  tls::TlsChannelCredentialsOptions channel;
  channel.set_certificate_provider(files);
  channel.watch_root_certs();
  channel.watch_identity_key_cert_pairs();
  channel.set_certificate_verifier(chain_only);
  channel.set_verify_server_certs(true);
  channel.set_check_call_host(false);
  self->channel_ = tls::TlsCredentials(channel);
  return std::shared_ptr<const GrpcTls>(std::move(self));
}

void GrpcTls::prepare(grpc::ChannelArguments* arguments) {
  arguments->SetSslTargetNameOverride(kServerName);
}

Status GrpcTls::check_own_name(std::string_view name) const {
  const Credentials& files = credentials_.files;
  if (files.shared_certificate || matches(credentials_.identities, name, std::nullopt)) {
    return absl::OkStatus();
  }
  return make_error(
      ErrorKind::kPermission,
      absl::StrCat("credentials: the certificate '", files.cert_file, "' is that of ",
                   describe(credentials_.identities), ", and this worker is '", std::string(name),
                   "': give it a certificate of its own, or set shared_certificate"));
}

Status GrpcTls::check_peer(const grpc::AuthContext& peer, std::string_view name,
                           std::optional<uint32_t> rank) const {
  if (!peer.IsPeerAuthenticated()) {
    return make_error(ErrorKind::kPermission, "the peer has shown no certificate");
  }
  if (credentials_.files.shared_certificate) return absl::OkStatus();
  const std::vector<std::string> common = values(peer, GRPC_X509_CN_PROPERTY_NAME);
  const std::vector<Identity> identities = identities_of(values(peer, GRPC_PEER_URI_PROPERTY_NAME),
                                                         common.empty() ? "" : common.front());
  if (matches(identities, name, rank)) return absl::OkStatus();
  return make_error(
      ErrorKind::kPermission,
      absl::StrCat("the certificate of the peer is that of ", describe(identities),
                   ", and not of '", std::string(name.substr(0, 128)), "'",
                   rank.has_value() ? absl::StrCat(" with rank ", *rank) : std::string()));
}

Status GrpcTls::check_token(std::string_view token, std::string_view from) const {
  const std::string who = absl::StrCat("'", std::string(from.substr(0, 128)), "'");
  if (credentials_.token.empty() && token.empty()) return absl::OkStatus();
  if (credentials_.token.empty()) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat(who,
                                   " sends a cluster token, and there is none here: set "
                                   "token_file (WEFT_TOKEN_FILE) on all workers or on none"));
  }
  if (token.empty()) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat(who,
                                   " sends no cluster token, and there is one here: set "
                                   "token_file (WEFT_TOKEN_FILE) on all workers"));
  }
  if (same_secret(token, credentials_.token)) return absl::OkStatus();
  return make_error(ErrorKind::kPermission, absl::StrCat("the cluster token of ", who,
                                                         " is not the one that is known here"));
}

// gRPC 1.51 reports the cause of a failed connection only as text. Tested with real sockets, so
// that a version with another text shows.
GrpcTls::Fault GrpcTls::fault(const grpc::Status& status) {
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return Fault::kNone;
  const std::string text = status.error_message();
  if (absl::StrContains(text, "SSL_ERROR_SSL")) return Fault::kHandshake;
  if (absl::StrContains(text, "andshake")) return Fault::kNone;
  // With TLS 1.3 the dialler is done before the listener has looked at its certificate.
  const bool closed = absl::StrContains(text, "Socket closed") ||
                      absl::StrContains(text, "Connection reset") ||
                      absl::StrContains(text, "Broken pipe");
  return closed ? Fault::kTurnedAway : Fault::kNone;
}

Status GrpcTls::handshake_error(const grpc::Status& status) const {
  const std::string text = status.error_message();
  const Credentials& files = credentials_.files;
  std::string why = "TLS could not be agreed on";
  if (absl::StrContains(text, "certificate verify failed")) {
    why = absl::StrCat("its certificate is not believed: no authority in '", files.ca_file,
                       "' has signed it, or it is out of date");
  } else if (absl::StrContains(text, "wrong version number")) {
    why =
        "it speaks plain text, and this worker has credentials: all workers of a job have them "
        "or none";
  }
  return make_error(ErrorKind::kPermission, absl::StrCat(why, " (", text, ")"));
}

Status GrpcTls::turned_away_error(int attempts) const {
  const Credentials& files = credentials_.files;
  return make_error(ErrorKind::kPermission,
                    absl::StrCat("it ended ", attempts,
                                 " connections when it had seen our certificate '", files.cert_file,
                                 "': no authority that it knows has signed it, or it is out of "
                                 "date"));
}

}  // namespace weft::internal
