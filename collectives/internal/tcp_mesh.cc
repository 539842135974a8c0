#include "weft/collectives/internal/tcp_mesh.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "weft/collectives/internal/mesh.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/call_scope.h"
#include "weft/proto/collectives.pb.h"
#include "weft/transport/address.h"

namespace weft::internal {
namespace {

constexpr uint32_t kMaxHello = 256;
// Strangers that say nothing: the oldest is closed for the next.
constexpr size_t kMaxWaiting = 1024;
// Bytes without an acknowledgement for so long end a connection.
constexpr absl::Duration kUserTimeout = absl::Minutes(10);

// A connection on which a hello is awaited.
struct Greeting {
  UniqueFd fd;
  std::string bytes;
};

enum class Heard { kMore, kHello, kBad };

Heard hear(Greeting* from, wire::GroupHello* hello) {
  while (true) {
    uint32_t length = 0;
    size_t wanted = sizeof length;
    if (from->bytes.size() >= sizeof length) {
      std::memcpy(&length, from->bytes.data(), sizeof length);
      if (length > kMaxHello) return Heard::kBad;
      wanted += length;
      if (from->bytes.size() == wanted) {
        return hello->ParseFromArray(from->bytes.data() + sizeof length, static_cast<int>(length))
                   ? Heard::kHello
                   : Heard::kBad;
      }
    }
    char buffer[kMaxHello + sizeof length];
    const ssize_t n = recv(from->fd.get(), buffer, wanted - from->bytes.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Heard::kMore;
    if (n <= 0) return Heard::kBad;
    from->bytes.append(buffer, static_cast<size_t>(n));
  }
}

class TcpConnector : Mesh {
 public:
  TcpConnector(const Membership& member, const TcpListener& listener,
               const std::vector<TcpMember>& members, Runtime& runtime, absl::Time deadline)
      : Mesh(member, identities_of(members), runtime, deadline),
        listener_(listener),
        members_(members),
        peers_(static_cast<size_t>(member.size)) {}

  StatusOr<std::vector<TcpPeer>> run() {
    for (int peer = 0; peer < member_.rank; ++peer) {
      for (int lane = 0; lane < kLanes; ++lane) WEFT_RETURN_IF_ERROR(dial(peer, lane));
    }
    WEFT_RETURN_IF_ERROR(accept_all());
    for (int peer = 0; peer < member_.rank; ++peer) {
      for (int lane = 0; lane < kLanes; ++lane) WEFT_RETURN_IF_ERROR(await_answer(peer, lane));
    }
    return std::move(peers_);
  }

 private:
  Status dial(int peer, int lane) {
    const TcpMember& to = members_[static_cast<size_t>(peer)];
    const auto failed = [&](std::string_view why) {
      return make_error(ErrorKind::kUnavailable,
                        cat("cannot connect to rank ", peer, " at ", to.address, ": ", why));
    };
    auto begun = begin_connect(to.address);
    if (!begun.ok()) return failed(std_view(begun.status().message()));
    UniqueFd fd = *std::move(begun);
    WEFT_RETURN_IF_ERROR(wait(fd.get(), POLLOUT, peer, "to take a connection"));
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) return failed(system_error(error));
    set_tcp_options(fd.get(), kUserTimeout);
    WEFT_RETURN_IF_ERROR(greet(fd.get(), peer, lane));
    peers_[static_cast<size_t>(peer)].lanes[lane] = std::move(fd);
    return absl::OkStatus();
  }

  Status greet(int fd, int peer, int lane) {
    wire::GroupHello hello = own_hello();
    hello.set_lane(static_cast<uint32_t>(lane));
    const std::string body = hello.SerializeAsString();
    const auto length = static_cast<uint32_t>(body.size());
    std::string bytes(sizeof length, '\0');
    std::memcpy(bytes.data(), &length, sizeof length);
    bytes += body;
    // It fits into the buffer of a new socket.
    const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
    return make_error(ErrorKind::kUnavailable,
                      cat("cannot greet rank ", peer, ": ",
                          n < 0 ? system_error(errno) : std::string("cut short")));
  }

  // From the ranks above this one.
  Status accept_all() {
    int missing = (member_.size - 1 - member_.rank) * kLanes;
    std::vector<Greeting> waiting;
    BlockingRegion region;
    WEFT_RETURN_IF_ERROR(region.status());
    while (missing > 0) {
      if (over()) return late("connections", [this](int peer) { return !whole(peer); });
      std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
      for (const Greeting& one : waiting) fds.push_back({one.fd.get(), POLLIN, 0});
      (void)poll(fds.data(), fds.size(), milliseconds_left());
      for (size_t i = 0; i < waiting.size();) {
        wire::GroupHello hello;
        const Heard heard = hear(&waiting[i], &hello);
        if (heard == Heard::kMore) {
          ++i;
          continue;
        }
        if (heard == Heard::kHello) WEFT_RETURN_IF_ERROR(welcome(&waiting[i].fd, hello, &missing));
        waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(i));
      }
      while (true) {
        UniqueFd fd(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!fd.valid()) break;
        if (waiting.size() >= kMaxWaiting) waiting.erase(waiting.begin());
        waiting.push_back({std::move(fd), {}});
      }
    }
    return absl::OkStatus();
  }

  Status welcome(UniqueFd* fd, const wire::GroupHello& hello, int* missing) {
    const int rank = dialling_rank(hello);
    if (rank < 0 || hello.lane() >= kLanes || !fits(hello, rank)) return absl::OkStatus();
    UniqueFd& place = peers_[static_cast<size_t>(rank)].lanes[hello.lane()];
    if (place.valid()) return absl::OkStatus();
    set_tcp_options(fd->get(), kUserTimeout);
    WEFT_RETURN_IF_ERROR(greet(fd->get(), rank, static_cast<int>(hello.lane())));
    place = std::move(*fd);
    --*missing;
    return absl::OkStatus();
  }

  Status await_answer(int peer, int lane) {
    UniqueFd& fd = peers_[static_cast<size_t>(peer)].lanes[lane];
    Greeting greeting{std::move(fd), {}};
    while (true) {
      wire::GroupHello hello;
      const Heard heard = hear(&greeting, &hello);
      if (heard == Heard::kHello && fits(hello, peer)) break;
      if (heard != Heard::kMore) {
        return make_error(ErrorKind::kUnavailable,
                          cat("rank ", peer, " at ", members_[static_cast<size_t>(peer)].address,
                              " does not greet as a member of this group"));
      }
      WEFT_RETURN_IF_ERROR(wait(greeting.fd.get(), POLLIN, peer, "to answer a hello"));
    }
    fd = std::move(greeting.fd);
    return absl::OkStatus();
  }

  bool whole(int peer) const {
    const TcpPeer& one = peers_[static_cast<size_t>(peer)];
    return std::all_of(std::begin(one.lanes), std::end(one.lanes),
                       [](const UniqueFd& fd) { return fd.valid(); });
  }

  static std::vector<uint64_t> identities_of(const std::vector<TcpMember>& members) {
    std::vector<uint64_t> out;
    for (const TcpMember& one : members) out.push_back(one.identity);
    return out;
  }

  const TcpListener& listener_;
  const std::vector<TcpMember>& members_;
  std::vector<TcpPeer> peers_;
};

}  // namespace

StatusOr<TcpListener> TcpListener::make(const std::string& host, bool allow_insecure) {
  WEFT_ASSIGN_OR_RETURN(const BindHost at, resolve_bind_host(host));
  if (!at.loopback && !allow_insecure) {
    return make_error(ErrorKind::kPermission,
                      cat("listening on ", host,
                          " would let other machines in without credentials; say allow_insecure "
                          "if that is meant"));
  }
  if (at.wildcard) {
    return make_error(ErrorKind::kInvalidArgument,
                      cat("the others cannot dial ", host, ": give the address of an interface"));
  }
  TcpListener out;
  WEFT_ASSIGN_OR_RETURN(out.fd_, listen_on_port(at, 0));
  sockaddr_storage name = {};
  socklen_t length = sizeof name;
  if (getsockname(out.fd_.get(), reinterpret_cast<sockaddr*>(&name), &length) != 0) {
    return make_error(ErrorKind::kResource, cat("no port: ", system_error(errno)));
  }
  const int port =
      ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(name).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(name).sin_port);
  out.address_ = join_host_port(at.host, port);
  return out;
}

StatusOr<std::vector<TcpPeer>> connect_mesh(const Membership& member, const TcpListener& listener,
                                            const std::vector<TcpMember>& members, Runtime& runtime,
                                            absl::Time deadline) {
  return TcpConnector(member, listener, members, runtime, deadline).run();
}

}  // namespace weft::internal
