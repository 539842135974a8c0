#ifndef WEFT_TRANSPORT_ADDRESS_H_
#define WEFT_TRANSPORT_ADDRESS_H_

// Addresses of the grpc transport: "127.0.0.1:4711", "[::1]:4711", "host.name:4711", each with the
// name of a Unix socket behind it where there is one. Pure functions but for the look-up of names,
// and for listen_on_port(), port_is_free(), local_socket_exists() and listener_has_ended(), which
// ask the system. Any thread.

#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/posix.h"

namespace weft::internal {

struct HostPort {
  std::string host;  // without brackets
  int port = 0;
};

// Port 0 only where it means any free one.
WEFT_API StatusOr<HostPort> parse_host_port(std::string_view address, bool any_port = false);
// With brackets around an IPv6 address.
WEFT_API std::string join_host_port(std::string_view host, int port);
// What gRPC dials: "ipv4:127.0.0.1:4711", "ipv6:[::1]:4711", "dns:///host:4711".
// "localhost" is 127.0.0.1.
WEFT_API StatusOr<std::string> dial_target(std::string_view address);
// Whether the address can only mean this host: "127.0.0.1:4711", "[::1]:4711", "localhost:4711".
// There gRPC's probe of the bandwidth-delay product is off. It would measure the time that bytes
// wait for our own poller, and let 16 MiB and more gather before it: memory that no budget counts,
// and milliseconds of delay for the frames behind. Without it about 1 MiB is under way per lane.
WEFT_API bool is_loopback(std::string_view address);
// gRPC's name of a peer ("ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:4711") as an address; "unix:" is
// kLocalPeer.
inline constexpr std::string_view kLocalPeer = "this host";
WEFT_API std::string peer_address(std::string_view grpc_peer);

struct BindHost {
  std::string host;  // numeric, without brackets
  bool ipv6 = false;
  bool loopback = false;
  bool wildcard = false;  // all interfaces
};

// Listens there, without blocking. All interfaces means those of IPv6 and IPv4, where the system
// has both. Errors name the address; a port that is taken is of kind resource.
WEFT_API StatusOr<UniqueFd> listen_on_port(const BindHost& host, int port);
// A socket that does not block and is being connected to a numeric address. Errors name it.
WEFT_API StatusOr<UniqueFd> begin_connect(std::string_view address);
// For connections over TCP, whichever end: nothing waits for company, and the kernel gives up when
// bytes stay unacknowledged for so long.
WEFT_API void set_tcp_options(int fd, absl::Duration user_timeout);
// The host to listen on; "" is 127.0.0.1, a name is looked up.
WEFT_API StatusOr<BindHost> resolve_bind_host(std::string_view host);
// OK when a listener could be bound now; else the system's reason, naming the address.
WEFT_API Status port_is_free(const BindHost& host, int port);
// A listener may have an abstract Unix socket beside its port. Its name is random, so that no other
// process can take it first, and is part of the address: "127.0.0.1:4711/local-5c1f2a0e93b4d768".
// Such names belong to a network namespace, as ports do, and vanish with their sockets: where the
// name exists, the listener can be reached by it. A second number in it, where the kernel tells
// one, is that of the namespace: "10.0.0.5:4711/local-5c1f2a0e93b4d768-90d1b5e2a7f03c64".
//
// A listener that wants TLS says so in between, "127.0.0.1:4711/tls/local-...", so that a dialler
// without credentials can be told instead of being cut off. It is a hint for an error: what a
// dialler with credentials does never depends on it.
struct SplitAddress {
  std::string_view tcp;    // "127.0.0.1:4711"
  std::string_view local;  // "local-5c1f2a0e93b4d768", or empty
  bool tls = false;
};
WEFT_API SplitAddress split_address(std::string_view address);
WEFT_API std::string join_address(std::string_view tcp, std::string_view local, bool tls = false);
// The part that stands for a listener of this network namespace; `drawn` makes it unique.
WEFT_API std::string make_local(uint64_t drawn);
// The socket's name, and what gRPC dials for it.
WEFT_API std::string local_socket_name(std::string_view local);
WEFT_API std::string local_target(std::string_view local);
WEFT_API bool local_socket_exists(std::string_view local);
// Name of the private socket (LocalGate) that belongs to the local socket.
WEFT_API std::string gate_name(std::string_view local);
// True only when it is certain that the listener has ended: a listener with a local socket is in
// this network namespace when its address says so, or, where it does not say, when it listens on
// loopback; and now both its socket and its port are gone. A worker does not move, so it has ended.
// False for an address whose namespace has no number unique to it: clones of one machine name their
// namespaces alike.
WEFT_API bool listener_has_ended(const SplitAddress& address);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_ADDRESS_H_
