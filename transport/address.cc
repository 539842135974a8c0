#include "weft/transport/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "weft/common/internal/text.h"
#include "weft/common/posix.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {
namespace {

bool numeric_v4(const std::string& host) {
  in_addr out;
  return inet_pton(AF_INET, host.c_str(), &out) == 1;
}

bool numeric_v6(const std::string& host) {
  in6_addr out;
  // A zone ("fe80::1%eth0") is left to the system.
  return inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &out) == 1;
}

Status bad_address(std::string_view address, std::string_view why) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("'", view(address), "' is not an address: ", view(why)));
}

// As gRPC's own listeners: a connection in its last minutes does not take the port, a listener
// does.
StatusOr<UniqueFd> bind_port(const BindHost& host, int port) {
  const auto failed = [&host, port](ErrorKind kind, std::string_view why) {
    return make_error(
        kind, absl::StrCat("cannot listen on ", join_host_port(host.host, port), ": ", view(why)));
  };
  UniqueFd fd(
      socket(host.ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return failed(ErrorKind::kResource, system_error(errno));
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  int result;
  if (host.ipv6) {
    const int off = 0;
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    sockaddr_in6 in = {};
    in.sin6_family = AF_INET6;
    in.sin6_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET6, host.host.c_str(), &in.sin6_addr);
    result = bind(fd.get(), reinterpret_cast<const sockaddr*>(&in), sizeof in);
  } else {
    sockaddr_in in = {};
    in.sin_family = AF_INET;
    in.sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, host.host.c_str(), &in.sin_addr);
    result = bind(fd.get(), reinterpret_cast<const sockaddr*>(&in), sizeof in);
  }
  if (result == 0) result = ::listen(fd.get(), SOMAXCONN);
  if (result == 0) return fd;
  if (errno == EADDRINUSE) return failed(ErrorKind::kResource, "the port is taken");
  return failed(ErrorKind::kInvalidArgument, system_error(errno));
}

// "-90d1b5e2a7f03c64", the same for all processes of a network namespace and for no other one of
// this machine or another; empty when the kernel does not tell.
std::string namespace_mark() {
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::getline(file, boot);
  struct stat at = {};
  if (boot.empty() || stat("/proc/self/ns/net", &at) != 0) return "";
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a: equal in every process, unlike absl::Hash
  for (const unsigned char c : absl::StrCat(boot, " ", at.st_dev, " ", at.st_ino)) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  return absl::StrCat("-", absl::Hex(hash, absl::kZeroPad16));
}

}  // namespace

StatusOr<HostPort> parse_host_port(std::string_view full, bool any_port) {
  const std::string_view address = split_address(full).tcp;
  HostPort out;
  std::string_view port;
  if (!address.empty() && address.front() == '[') {
    const size_t close = address.find(']');
    if (close == std::string_view::npos) return bad_address(address, "the ] is missing");
    out.host = std::string(address.substr(1, close - 1));
    port = address.substr(close + 1);
    if (port.empty() || port.front() != ':') return bad_address(address, "the port is missing");
    port.remove_prefix(1);
  } else {
    const size_t colon = address.rfind(':');
    if (colon == std::string_view::npos) return bad_address(address, "the port is missing");
    out.host = std::string(address.substr(0, colon));
    port = address.substr(colon + 1);
    if (out.host.find(':') != std::string::npos) {
      return bad_address(address, "an IPv6 address stands in brackets");
    }
  }
  if (out.host.empty()) return bad_address(address, "the host is missing");
  const int least = any_port ? 0 : 1;
  if (!absl::SimpleAtoi(view(port), &out.port) || out.port < least || out.port > 65535) {
    return bad_address(address, absl::StrCat("the port is not a number from ", least, " to 65535"));
  }
  return out;
}

std::string join_host_port(std::string_view host, int port) {
  if (host.find(':') != std::string_view::npos) return absl::StrCat("[", view(host), "]:", port);
  return absl::StrCat(view(host), ":", port);
}

StatusOr<std::string> dial_target(std::string_view address) {
  WEFT_ASSIGN_OR_RETURN(const HostPort at, parse_host_port(address));
  const std::string joined = join_host_port(at.host, at.port);
  if (numeric_v4(at.host)) return absl::StrCat("ipv4:", joined);
  if (numeric_v6(at.host)) return absl::StrCat("ipv6:", joined);
  // The resolver inside gRPC would leak a few bytes for it, each time.
  if (at.host == "localhost") return absl::StrCat("ipv4:127.0.0.1:", at.port);
  return absl::StrCat("dns:///", joined);
}

bool is_loopback(std::string_view address) {
  const StatusOr<HostPort> at = parse_host_port(address);
  if (!at.ok()) return false;
  return at->host == "localhost" || at->host == "::1" ||
         (numeric_v4(at->host) && absl::StartsWith(at->host, "127."));
}

std::string peer_address(std::string_view grpc_peer) {
  std::string out(grpc_peer);
  for (const char* prefix : {"ipv4:", "ipv6:"}) {
    if (absl::StartsWith(out, prefix)) out = out.substr(5);
  }
  if (absl::StartsWith(out, "unix")) return std::string(kLocalPeer);
  return absl::StrReplaceAll(out, {{"%5B", "["}, {"%5D", "]"}});
}

StatusOr<UniqueFd> begin_connect(std::string_view address) {
  WEFT_ASSIGN_OR_RETURN(const HostPort at, parse_host_port(address));
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(at.host.c_str(), std::to_string(at.port).c_str(), &hints, &found);
  if (code != 0) return bad_address(address, gai_strerror(code));
  UniqueFd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const bool begun = fd.valid() && (connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 ||
                                    errno == EINPROGRESS);
  const int why = errno;
  freeaddrinfo(found);
  if (begun) return fd;
  return make_error(fd.valid() ? ErrorKind::kUnavailable : ErrorKind::kResource,
                    absl::StrCat("cannot connect to ", view(address), ": ", system_error(why)));
}

void set_tcp_options(int fd, absl::Duration user_timeout) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (user_timeout <= absl::ZeroDuration() || user_timeout >= absl::Hours(24)) return;
  const unsigned ms = static_cast<unsigned>(absl::ToInt64Milliseconds(user_timeout));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
}

StatusOr<BindHost> resolve_bind_host(std::string_view given) {
  std::string host = given.empty() ? "127.0.0.1" : std::string(given);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (code != 0) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("cannot listen on '", host, "': ", gai_strerror(code)));
  }
  BindHost out;
  char text[INET6_ADDRSTRLEN] = {};
  if (found->ai_family == AF_INET6) {
    const auto* in = reinterpret_cast<const sockaddr_in6*>(found->ai_addr);
    out.ipv6 = true;
    out.loopback = IN6_IS_ADDR_LOOPBACK(&in->sin6_addr);
    out.wildcard = IN6_IS_ADDR_UNSPECIFIED(&in->sin6_addr);
    inet_ntop(AF_INET6, &in->sin6_addr, text, sizeof text);
  } else {
    const auto* in = reinterpret_cast<const sockaddr_in*>(found->ai_addr);
    const uint32_t ip = ntohl(in->sin_addr.s_addr);
    out.loopback = (ip >> 24) == 127;
    out.wildcard = ip == 0;
    inet_ntop(AF_INET, &in->sin_addr, text, sizeof text);
  }
  freeaddrinfo(found);
  out.host = text;
  return out;
}

Status port_is_free(const BindHost& host, int port) { return bind_port(host, port).status(); }

StatusOr<UniqueFd> listen_on_port(const BindHost& host, int port) {
  if (host.wildcard) {
    StatusOr<UniqueFd> both = bind_port({"::", /*ipv6=*/true, false, true}, port);
    // Without IPv6 what was asked for is tried, and its error told.
    if (both.ok()) return both;
  }
  return bind_port(host, port);
}

SplitAddress split_address(std::string_view address) {
  const size_t slash = address.find('/');
  if (slash == std::string_view::npos) return {address, {}};
  SplitAddress out{address.substr(0, slash), address.substr(slash + 1)};
  if (out.local == "tls" || out.local.substr(0, 4) == "tls/") {
    out.tls = true;
    out.local = out.local.substr(std::min<size_t>(4, out.local.size()));
  }
  return out;
}

std::string join_address(std::string_view tcp, std::string_view local, bool tls) {
  return absl::StrCat(view(tcp), tls ? "/tls" : "", local.empty() ? "" : "/", view(local));
}

std::string make_local(uint64_t drawn) {
  return absl::StrCat("local-", absl::Hex(drawn, absl::kZeroPad16), namespace_mark());
}

std::string local_socket_name(std::string_view local) { return absl::StrCat("weft-", view(local)); }

std::string local_target(std::string_view local) {
  return absl::StrCat("unix-abstract:", local_socket_name(local));
}

// Asked by trying to take the name: connecting would be a visitor to the listener.
std::string gate_name(std::string_view local) {
  return absl::StrCat("weft-", view(local), "-gate");
}

bool local_socket_exists(std::string_view local) {
  return local_name_is_taken(local_socket_name(local));
}

bool listener_has_ended(const SplitAddress& address) {
  // "local", what was drawn, and the namespace.
  const size_t mark = address.local.find('-', address.local.find('-') + 1);
  const bool marked = mark != std::string_view::npos && mark > 0;
  if (address.local.empty()) return false;
  if (marked ? address.local.substr(mark) != namespace_mark() : !is_loopback(address.tcp)) {
    return false;
  }
  if (local_socket_exists(address.local)) return false;
  const StatusOr<HostPort> at = parse_host_port(address.tcp);
  if (!at.ok()) return false;
  // To look a name up could take long.
  if (!is_loopback(address.tcp) && !numeric_v4(at->host) && !numeric_v6(at->host)) return false;
  const StatusOr<BindHost> host = resolve_bind_host(at->host);
  return host.ok() && port_is_free(*host, at->port).ok();
}

}  // namespace weft::internal
