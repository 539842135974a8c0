#ifndef WEFT_STORE_INTERNAL_ADDRESS_H_
#define WEFT_STORE_INTERNAL_ADDRESS_H_

// Hosts and ports of stores: writing them, reading them, and what may be listened to. Any thread;
// resolving a name may take as long as the system's resolver does.

#include <string>
#include <string_view>

#include "weft/common/error.h"

namespace weft::internal {

// "127.0.0.1:29500", "[::1]:29500"
std::string host_port(std::string_view host, int port);

struct HostPort {
  std::string host;
  int port = 0;
};
// Reads what host_port() writes. The port may be 0; `default_port` is taken when there is none, -1
// means that there must be one.
StatusOr<HostPort> parse_host_port(std::string_view text, int default_port);

// Whether a server may bind there: permission when some address of `host` is not loopback and
// `allow_insecure` is false; invalid_argument for an unknown host or a port out of range.
Status check_listen_address(const std::string& host, int port, bool allow);

// Binds and lets go again: unavailable, with the system's reason, when that is not possible. gRPC
// says only that it failed, and on the log.
Status check_can_bind(const std::string& host, int port);

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_ADDRESS_H_
