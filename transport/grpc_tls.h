#ifndef WEFT_TRANSPORT_GRPC_TLS_H_
#define WEFT_TRANSPORT_GRPC_TLS_H_

// GrpcTls: checked credentials as gRPC takes them, for a listener and for diallers. Both sides
// verify the other's certificate during the handshake of TLS, so a peer without a certificate of
// our CA reaches no line of HTTP/2. A thread of gRPC's checks the files once per refresh interval.
//
// gRPC's own check of host names is off: workers are told apart by names of their own (check_peer),
// which do not depend on the machine that they run on. Threads: any; constant after make().

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/runtime.h"
#include "weft/transport/checked_credentials.h"

// gRPC stays out of what is installed.
namespace grpc {
class AuthContext;
class ChannelArguments;
class ChannelCredentials;
class ServerCredentials;
class Status;
}  // namespace grpc

namespace weft::internal {

class WEFT_API GrpcTls {
 public:
  // Errors: see check_credentials().
  static StatusOr<std::shared_ptr<const GrpcTls>> make(const Credentials& credentials,
                                                       Runtime& runtime);

  const CheckedCredentials& credentials() const { return credentials_; }
  std::shared_ptr<grpc::ServerCredentials> server() const { return server_; }
  std::shared_ptr<grpc::ChannelCredentials> channel() const { return channel_; }
  // What every channel with channel() needs.
  static void prepare(grpc::ChannelArguments* arguments);

  // Whether our certificate is one for this name: the others would turn us away.
  Status check_own_name(std::string_view name) const;
  // Whether the certificate on the other end of a call says that it is `name` with this rank.
  // Always OK when certificates are shared.
  Status check_peer(const grpc::AuthContext& peer, std::string_view name,
                    std::optional<uint32_t> rank) const;
  // Whether the token that came with a hello is ours.
  Status check_token(std::string_view token, std::string_view from) const;

  // What a call that could not begin says about TLS.
  enum class Fault {
    kNone,        // nothing
    kHandshake,   // the handshake failed here, and will again
    kTurnedAway,  // the listener ended the connection when it had seen our certificate, or it died
  };
  static Fault fault(const grpc::Status& status);
  // kHandshake as an error of kind permission.
  Status handshake_error(const grpc::Status& status) const;
  // kTurnedAway, several times in a row.
  Status turned_away_error(int attempts) const;

 private:
  GrpcTls() = default;

  CheckedCredentials credentials_;
  std::shared_ptr<grpc::ServerCredentials> server_;
  std::shared_ptr<grpc::ChannelCredentials> channel_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_GRPC_TLS_H_
