#ifndef WEFT_COLLECTIVES_INTERNAL_TCP_LINK_H_
#define WEFT_COLLECTIVES_INTERNAL_TCP_LINK_H_

// The link over sockets of TCP. See tcp_mesh.h for the connections.

#include <memory>
#include <vector>

#include "weft/collectives/internal/stream_link.h"
#include "weft/collectives/internal/tcp_mesh.h"
#include "weft/common/api.h"
#include "weft/common/runtime.h"

namespace weft::internal {

WEFT_API std::unique_ptr<Streams> make_tcp_streams(std::vector<TcpPeer> peers);

WEFT_API StatusOr<std::unique_ptr<StreamLink>> make_tcp_link(const Membership& member,
                                                             std::vector<TcpPeer> peers,
                                                             std::shared_ptr<Runtime> runtime);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_TCP_LINK_H_
