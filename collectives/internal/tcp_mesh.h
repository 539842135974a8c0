#ifndef WEFT_COLLECTIVES_INTERNAL_TCP_MESH_H_
#define WEFT_COLLECTIVES_INTERNAL_TCP_MESH_H_

// TcpMesh: connections between all members of a group, three per pair: one for operations, one for
// send() and recv(), one for faults and goodbyes. The higher rank dials. A connection
// without the right hello is closed, and no other one is affected.
//
// Threads: one; the sockets then belong to the link.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/collectives/internal/stream_link.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"
#include "weft/common/runtime.h"

namespace weft::internal {

struct TcpPeer {
  UniqueFd lanes[kLanes];
};

// Of every rank: where it listens, and its life.
struct TcpMember {
  std::string address;
  uint64_t identity = 0;
};

class TcpListener {
 public:
  // Loopback, unless `allow_insecure`. Errors, kind permission: the host is more than loopback.
  static StatusOr<TcpListener> make(const std::string& host, bool allow_insecure);

  const std::string& address() const { return address_; }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::string address_;
};

// The peers by rank; this rank's own has no sockets. Errors name the rank: unavailable, it cannot
// be reached; deadline, it does not dial.
StatusOr<std::vector<TcpPeer>> connect_mesh(const Membership& member, const TcpListener& listener,
                                            const std::vector<TcpMember>& members, Runtime& runtime,
                                            absl::Time deadline);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_TCP_MESH_H_
