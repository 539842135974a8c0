#include "weft/transport/internal/grpc/newcomers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/posix.h"
#include "weft/transport/address.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {
namespace {

struct Ends {
  sockaddr_storage own = {};
  sockaddr_storage peer = {};
};

bool ends_of(int fd, Ends* out) {
  socklen_t length = sizeof out->own;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&out->own), &length) != 0) return false;
  length = sizeof out->peer;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&out->peer), &length) == 0;
}

void fill(const sockaddr_storage& at, __be16* port, __be32* host) {
  if (at.ss_family == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(at);
    *port = in.sin6_port;
    std::memcpy(host, &in.sin6_addr, sizeof in.sin6_addr);
  } else {
    const auto& in = reinterpret_cast<const sockaddr_in&>(at);
    *port = in.sin_port;
    std::memcpy(host, &in.sin_addr, sizeof in.sin_addr);
  }
}

// The socket at the other end, as the kernel's own table has it. False: it does not say.
bool ask_for_peer(const Ends& ends, inet_diag_msg* out, bool* gone) {
  const UniqueFd link(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!link.valid()) return false;
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } question = {};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = static_cast<uint8_t>(ends.own.ss_family);
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0u;
  inet_diag_sockid& id = question.request.id;
  fill(ends.peer, &id.idiag_sport, id.idiag_src);
  fill(ends.own, &id.idiag_dport, id.idiag_dst);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  if (send(link.get(), &question, sizeof question, 0) != sizeof question) return false;
  alignas(nlmsghdr) char bytes[4096];
  // The kernel answers such a question before send() returns.
  const ssize_t n = recv(link.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  nlmsghdr header = {};
  if (n < static_cast<ssize_t>(sizeof header)) return false;
  std::memcpy(&header, bytes, sizeof header);
  if (header.nlmsg_type == NLMSG_ERROR) {
    nlmsgerr error = {};
    if (n < static_cast<ssize_t>(NLMSG_HDRLEN + sizeof error)) return false;
    std::memcpy(&error, bytes + NLMSG_HDRLEN, sizeof error);
    *gone = error.error == -ENOENT;
    // ENOENT is also the answer of a kernel without this table, which then has none of our own.
    return *gone;
  }
  if (n < static_cast<ssize_t>(NLMSG_HDRLEN + sizeof *out)) return false;
  std::memcpy(out, bytes + NLMSG_HDRLEN, sizeof *out);
  return true;
}

// Unique among all sockets since the system was started; 0 when `fd` is none.
uint64_t cookie_of(int fd) {
  uint64_t cookie = 0;
  socklen_t length = sizeof cookie;
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

// How many bytes the kernel has received for this connection; 0 where it does not say.
uint64_t bytes_received(int fd) {
  // tcpi_bytes_received in the tcp_info of <linux/tcp.h>. The one of <netinet/tcp.h> ends before it,
  // and no source may include both.
  constexpr size_t kAt = 128;
  char info[kAt + sizeof(uint64_t)] = {};
  socklen_t length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &length) != 0 || length < sizeof info) return 0;
  uint64_t bytes = 0;
  std::memcpy(&bytes, info + kAt, sizeof bytes);
  return bytes;
}

// False: there is no descriptor to do it with, so it has to be tried again.
bool shut_down(int fd, uint64_t cookie) {
  // The number may be another socket's by now; that of a duplicate stays.
  const UniqueFd same(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!same.valid()) return errno != EMFILE && errno != ENFILE;
  if (cookie_of(same.get()) == cookie) (void)shutdown(same.get(), SHUT_RDWR);
  return true;
}

}  // namespace

PeerOwner owner_of_peer(int fd) {
  Ends ends;
  if (!ends_of(fd, &ends)) return PeerOwner::kOther;
  uid_t user = 0;
  if (ends.own.ss_family == AF_UNIX) {
    const StatusOr<uid_t> there = peer_user(fd);
    if (!there.ok()) return PeerOwner::kUnknown;
    user = *there;
  } else {
    inet_diag_msg peer = {};
    bool gone = false;
    if (!ask_for_peer(ends, &peer, &gone)) return PeerOwner::kUnknown;
    if (gone) {
      // Does the table have this very socket?
      std::swap(ends.own, ends.peer);
      bool none = false;
      return ask_for_peer(ends, &peer, &none) && !none ? PeerOwner::kOther : PeerOwner::kUnknown;
    }
    // A socket that its process has closed belongs to user 0 and has no inode.
    if (peer.idiag_inode == 0 || peer.idiag_state == TCP_LISTEN) return PeerOwner::kOther;
    user = peer.idiag_uid;
  }
  return user == geteuid() || user == 0 ? PeerOwner::kOwn : PeerOwner::kOther;
}

std::string remote_address(int fd) {
  Ends ends;
  if (!ends_of(fd, &ends)) return "";
  char host[INET6_ADDRSTRLEN] = "";
  if (ends.peer.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(ends.peer);
    inet_ntop(AF_INET, &in.sin_addr, host, sizeof host);
    return join_host_port(host, ntohs(in.sin_port));
  }
  if (ends.peer.ss_family != AF_INET6) return "";
  const auto& in = reinterpret_cast<const sockaddr_in6&>(ends.peer);
  if (IN6_IS_ADDR_V4MAPPED(&in.sin6_addr)) {
    inet_ntop(AF_INET, in.sin6_addr.s6_addr + 12, host, sizeof host);
  } else {
    inet_ntop(AF_INET6, &in.sin6_addr, host, sizeof host);
  }
  return join_host_port(host, ntohs(in.sin6_port));
}

void Newcomers::add(int fd, absl::Time until) {
  Newcomer one{fd, cookie_of(fd), remote_address(fd), until};
  if (one.cookie == 0 || one.address.empty()) return;
  MutexLock lock(&mutex_);
  all_.push_back(std::move(one));
}

void Newcomers::accepted(std::string_view address) {
  // gRPC's name has the zone of a link-local address.
  std::string wanted(address);
  const size_t zone = wanted.find('%');
  const size_t end = wanted.rfind(']');
  if (zone != std::string::npos && end != std::string::npos && zone < end) {
    wanted.erase(zone, end - zone);
  }
  MutexLock lock(&mutex_);
  std::erase_if(all_, [&](const Newcomer& one) { return one.address == wanted; });
}

std::vector<std::string> Newcomers::cut(absl::Time now) {
  std::vector<std::string> why;
  MutexLock lock(&mutex_);
  size_t excess = all_.size() > kMaxNewcomers ? all_.size() - kMaxNewcomers : 0;
  std::erase_if(all_, [&](const Newcomer& one) {
    if (cookie_of(one.fd) != one.cookie) return true;  // gRPC has closed it
    const uint64_t bytes = bytes_received(one.fd);
    std::string reason;
    if (bytes > kMaxBytes) {
      reason = absl::StrCat(bytes, " bytes came without a hello");
    } else if (one.until <= now) {
      reason = "no hello came in its time";
    } else if (excess > 0) {
      reason = absl::StrCat(kMaxNewcomers, " others came after it and wait for their hello, too");
    }
    if (reason.empty() || !shut_down(one.fd, one.cookie)) return false;
    if (excess > 0) --excess;
    why.push_back(absl::StrCat("a connection from ", one.address, " was cut: ", reason));
    return true;
  });
  return why;
}

bool Newcomers::empty() {
  MutexLock lock(&mutex_);
  return all_.empty();
}

void Newcomers::clear() {
  MutexLock lock(&mutex_);
  all_.clear();
}

}  // namespace weft::internal
