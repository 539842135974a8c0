#ifndef WEFT_RPC_INTERNAL_GRPC_ADDRESS_H_
#define WEFT_RPC_INTERNAL_GRPC_ADDRESS_H_

// Addresses of the grpc transport: "127.0.0.1:4711", "[::1]:4711", "host.name:4711". Pure functions
// but for the look-up of names and for port_is_free(), which binds for a moment. Any thread.

#include <string>
#include <string_view>

#include "weft/common/error.h"

namespace weft::internal {

struct HostPort {
  std::string host;  // without brackets
  int port = 0;
};

StatusOr<HostPort> parse_host_port(std::string_view address);
// With brackets around an IPv6 address.
std::string join_host_port(std::string_view host, int port);
// What gRPC dials: "ipv4:127.0.0.1:4711", "ipv6:[::1]:4711", "dns:///host:4711".
// "localhost" is 127.0.0.1.
StatusOr<std::string> dial_target(std::string_view address);
// gRPC's name of a peer ("ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711") as an address.
std::string peer_address(std::string_view grpc_peer);

struct BindHost {
  std::string host;  // numeric, without brackets
  bool ipv6 = false;
  bool loopback = false;
  bool wildcard = false;  // all interfaces
};

// The host to listen on; "" is 127.0.0.1, a name is looked up.
StatusOr<BindHost> resolve_bind_host(std::string_view host);
// OK when a listener could be bound now; else the system's reason, naming the address.
Status port_is_free(const BindHost& host, int port);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_GRPC_ADDRESS_H_
