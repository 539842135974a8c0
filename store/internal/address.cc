#include "weft/store/internal/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {
namespace {

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

StatusOr<AddressList> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("cannot resolve host '", host, "': ", ::gai_strerror(error)));
  }
  return AddressList(found, ::freeaddrinfo);
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  }
  return false;
}

}  // namespace

StatusOr<HostPort> parse_store_address(std::string_view text, int default_port) {
  const auto bad = [&](std::string_view why) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("'", view(text), "' is not host:port: ", view(why)));
  };
  HostPort out;
  std::string_view port;
  if (!text.empty() && text[0] == '[') {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return bad("] is missing");
    out.host = text.substr(1, end - 1);
    port = text.substr(end + 1);
  } else {
    const size_t colon = text.find(':');
    out.host = text.substr(0, colon);
    port = colon == std::string_view::npos ? "" : text.substr(colon);
    if (port.find(':', 1) != std::string_view::npos) return bad("write an IPv6 address in []");
  }
  if (out.host.empty()) return bad("there is no host");
  if (port.empty() && default_port >= 0) {
    out.port = default_port;
    return out;
  }
  if (port.size() < 2 || port[0] != ':' || !absl::SimpleAtoi(view(port.substr(1)), &out.port) ||
      port.find_first_not_of("0123456789", 1) != std::string_view::npos || out.port > 65535) {
    return bad("the port is no number from 0 to 65535");
  }
  return out;
}

Status check_dial_address(std::string_view what, std::string_view host, int port) {
  if (!host.empty() && port > 0 && port <= 65535) return absl::OkStatus();
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("cannot connect to ", view(what), " at '", view(host), "', port ",
                                 port, ": a host and a port from 1 to 65535 are needed"));
}

Status check_listen_address(const std::string& host, int port, bool allow) {
  if (port < 0 || port > 65535) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("port ", port, " is not from 0 to 65535"));
  }
  WEFT_ASSIGN_OR_RETURN(const AddressList addresses, resolve(host, port));
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    if (allow || is_loopback(a->ai_addr)) continue;
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("the store has no credentials, and '", host,
                                   "' can be reached from other machines; give it some "
                                   "(WEFT_TLS_CERT and so on), listen to 127.0.0.1, or allow it "
                                   "with allow_insecure"));
  }
  return absl::OkStatus();
}

Status check_can_bind(const std::string& host, int port) {
  WEFT_ASSIGN_OR_RETURN(const AddressList addresses, resolve(host, port));
  int error = 0;
  for (const addrinfo* a = addresses.get(); a != nullptr && error == 0; a = a->ai_next) {
    const int fd = ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) {
      error = errno;
      continue;
    }
    const int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd, a->ai_addr, a->ai_addrlen) != 0 || ::listen(fd, 1) != 0) error = errno;
    ::close(fd);
  }
  if (error == 0) return absl::OkStatus();
  return make_error(
      ErrorKind::kUnavailable,
      absl::StrCat("cannot listen to ", join_host_port(host, port), ": ", std::strerror(error)));
}

}  // namespace weft::internal
