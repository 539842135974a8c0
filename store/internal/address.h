#ifndef WEFT_STORE_INTERNAL_ADDRESS_H_
#define WEFT_STORE_INTERNAL_ADDRESS_H_

// Hosts and ports of stores: reading them, what may be dialled, and what may be listened to. Any
// thread; resolving a name may take as long as the system's resolver does.

#include <string>
#include <string_view>

#include "weft/common/error.h"
#include "weft/transport/address.h"

namespace weft::internal {

// Reads the address in a store URL, as join_host_port() writes it. The port may be 0;
// `default_port` is taken when there is none, -1 means that there must be one.
StatusOr<HostPort> parse_store_address(std::string_view text, int default_port);

// Returns invalid_argument unless a client can dial there: a host, and a port from 1 to 65535.
// `what` names the server in the error: "a store", "an etcd".
Status check_dial_address(std::string_view what, std::string_view host, int port);

// Whether a server may bind there: permission when some address of `host` is not loopback and
// `allow_insecure` is false; invalid_argument for an unknown host or a port out of range.
Status check_listen_address(const std::string& host, int port, bool allow);

// Binds and lets go again: unavailable, with the system's reason, when that is not possible. gRPC
// says only that it failed, and on the log.
Status check_can_bind(const std::string& host, int port);

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_ADDRESS_H_
