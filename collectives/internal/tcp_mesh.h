#ifndef WEFT_COLLECTIVES_INTERNAL_TCP_MESH_H_
#define WEFT_COLLECTIVES_INTERNAL_TCP_MESH_H_

// TcpMesh: connections between all members of a group, three per pair: one for operations, one for
// send() and recv(), one for faults and goodbyes. The higher rank dials. A connection
// without the right hello is closed, and no other one is affected.
//
// With credentials a connection begins with a handshake of TLS 1.3, in which both sides show their
// certificates; the hello follows inside.
//
// GROUP-TLS-1: a connection is taken for that of a rank only if the certificate of its other side
// names its worker, and the rank in the job where the certificate has one (unless all have one
// certificate). Who the worker of a rank is the membership says in a group of workers, and the
// record that the rank has written to the store in others.
//
// Threads: one; the sockets then belong to the link.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/stream_link.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"
#include "weft/transport/tls_stream.h"

namespace weft::internal {

struct TcpPeer {
  UniqueFd lanes[kLanes];
  // With credentials: of the sockets, after their handshakes.
  std::unique_ptr<TlsStream> tls[kLanes];
};

// Each rank's address, its life, and the worker that its certificate names.
struct TcpMember {
  std::string address;
  uint64_t identity = 0;
  std::string worker{};
  uint32_t job_rank = 0;
};

// How a group proves its members; without certificates it does not.
struct TcpSecurity {
  std::shared_ptr<const TlsCertificates> certificates;
  bool shared_certificate = false;
  std::string token{};

  bool on() const { return certificates != nullptr; }
};

class WEFT_API TcpListener {
 public:
  // Loopback, unless `beyond_loopback`: with credentials or allow_insecure. Error, kind permission:
  // the host is more than loopback.
  static StatusOr<TcpListener> make(const std::string& host, bool beyond_loopback);

  const std::string& address() const { return address_; }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::string address_;
};

// The peers by rank; this rank's own has no sockets, nor has one that `apart` says is reached in
// another way (empty: none is). `given_up`: see making.h. Errors name the
// rank: unavailable, it cannot be reached; deadline, it does not dial, or does not answer;
// permission, it does not prove who it is, or does not believe this rank.
StatusOr<std::vector<TcpPeer>> connect_mesh(const Membership& member, const TcpListener& listener,
                                            const std::vector<TcpMember>& members,
                                            const TcpSecurity& security,
                                            const std::vector<bool>& apart,
                                            absl::FunctionRef<Status()> given_up, Runtime& runtime,
                                            absl::Time deadline);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_TCP_MESH_H_
