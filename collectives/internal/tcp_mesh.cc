#include "weft/collectives/internal/tcp_mesh.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "weft/collectives/internal/mesh.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/call_scope.h"
#include "weft/proto/collectives.pb.h"
#include "weft/transport/address.h"
#include "weft/transport/checked_credentials.h"

namespace weft::internal {
namespace {

constexpr uint32_t kMaxHello = 2048;
constexpr size_t kMaxRefusal = 1024;
// Strangers that say nothing: the oldest is closed for the next.
constexpr size_t kMaxWaiting = 1024;
// Bytes without an acknowledgement for so long end a connection.
constexpr absl::Duration kUserTimeout = absl::Minutes(10);

// A connection on which a hello is awaited.
struct Greeting {
  UniqueFd fd;
  std::unique_ptr<TlsStream> tls;  // with credentials
  bool proved = false;             // its handshake is over
  std::string bytes;
};

// Bytes of the hello, as recv() gives them; *why: of the end, where TLS knows it.
ssize_t receive_some(Greeting* from, char* to, size_t bytes, Status* why) {
  if (from->tls == nullptr) return recv(from->fd.get(), to, bytes, MSG_DONTWAIT);
  if (!from->proved) {
    const StatusOr<TlsState> state = from->tls->handshake();
    if (!state.ok()) {
      *why = state.status();
      return 0;
    }
    if (*state != TlsState::kDone) {
      errno = EAGAIN;
      return -1;
    }
    from->proved = true;
  }
  const StatusOr<TlsMoved> moved = from->tls->read({to, bytes});
  if (!moved.ok()) {
    *why = moved.status();
    return 0;
  }
  if (moved->bytes > 0 || moved->state == TlsState::kEnded) {
    return static_cast<ssize_t>(moved->bytes);
  }
  errno = EAGAIN;
  return -1;
}

// The hello behind its length.
std::string message_of(const wire::GroupHello& hello) {
  const std::string body = hello.SerializeAsString();
  const auto length = static_cast<uint32_t>(body.size());
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + body;
}

enum class Heard { kMore, kHello, kBad };

Heard hear(Greeting* from, wire::GroupHello* hello, Status* why) {
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
    const ssize_t n = receive_some(from, buffer, wanted - from->bytes.size(), why);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Heard::kMore;
    if (n <= 0) return Heard::kBad;
    from->bytes.append(buffer, static_cast<size_t>(n));
  }
}

class TcpConnector : Mesh {
 public:
  TcpConnector(const Membership& member, const TcpListener& listener,
               const std::vector<TcpMember>& members, const TcpSecurity& security,
               const std::vector<bool>& apart, absl::FunctionRef<Status()> given_up,
               Runtime& runtime, absl::Time deadline)
      : Mesh(member, identities_of(members), apart, given_up, runtime, deadline),
        listener_(listener),
        members_(members),
        security_(security),
        peers_(static_cast<size_t>(member.size)) {}

  StatusOr<std::vector<TcpPeer>> run() {
    for (int peer = 0; peer < member_.rank; ++peer) {
      if (apart(peer)) continue;
      for (int lane = 0; lane < kLanes; ++lane) WEFT_RETURN_IF_ERROR(dial(peer, lane));
    }
    WEFT_RETURN_IF_ERROR(accept_all());
    for (int peer = 0; peer < member_.rank; ++peer) {
      if (apart(peer)) continue;
      for (int lane = 0; lane < kLanes; ++lane) WEFT_RETURN_IF_ERROR(await_answer(peer, lane));
    }
    return std::move(peers_);
  }

 private:
  TcpPeer& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  const TcpMember& member_at(int peer) const { return members_[static_cast<size_t>(peer)]; }

  Status dial(int peer, int lane) {
    const TcpMember& to = member_at(peer);
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
    std::unique_ptr<TlsStream> tls;
    if (security_.on()) {
      auto proved = prove(fd.get(), peer);
      if (!proved.ok()) {
        return annotate(proved.status(), cat("cannot connect to rank ", peer, " at ", to.address));
      }
      tls = *std::move(proved);
    }
    WEFT_RETURN_IF_ERROR(greet(fd.get(), tls.get(), peer, lane));
    at(peer).lanes[lane] = std::move(fd);
    at(peer).tls[lane] = std::move(tls);
    return absl::OkStatus();
  }

  // The dialling side's handshake.
  StatusOr<std::unique_ptr<TlsStream>> prove(int fd, int peer) {
    WEFT_ASSIGN_OR_RETURN(
        std::unique_ptr<TlsStream> tls,
        TlsStream::with_certificates(fd, TlsRole::kClient, security_.certificates));
    while (true) {
      WEFT_ASSIGN_OR_RETURN(const TlsState state, tls->handshake());
      if (state == TlsState::kDone) break;
      const bool reads = state == TlsState::kWantRead;
      WEFT_RETURN_IF_ERROR(wait(fd, reads ? POLLIN : POLLOUT, peer, "to answer a TLS handshake"));
    }
    WEFT_RETURN_IF_ERROR(check_worker(*tls, peer));
    return tls;
  }

  // GROUP-TLS-1.
  Status check_worker(const TlsStream& tls, int peer) const {
    const TcpMember& claimed = member_at(peer);
    if (security_.shared_certificate || matches(tls.peer(), claimed.worker, claimed.job_rank)) {
      return absl::OkStatus();
    }
    return make_error(
        ErrorKind::kPermission,
        cat("the certificate of rank ", peer, " is that of ", describe(tls.peer()),
            ", and not of '", claimed.worker, "' with rank ", claimed.job_rank, " in its job"));
  }

  Status greet(int fd, TlsStream* tls, int peer, int lane) {
    wire::GroupHello hello = own_hello();
    hello.set_lane(static_cast<uint32_t>(lane));
    if (tls != nullptr) hello.set_token(security_.token);
    const std::string bytes = message_of(hello);
    // It fits into the buffer of a new socket.
    if (tls != nullptr) {
      const std::string_view piece = bytes;
      auto moved = tls->write({&piece, 1});
      if (!moved.ok()) return annotate(moved.status(), cat("cannot greet rank ", peer));
      WEFT_ASSIGN_OR_RETURN(const TlsState state, tls->flush());
      if (moved->bytes == bytes.size() && state == TlsState::kDone) return absl::OkStatus();
      return make_error(ErrorKind::kUnavailable, cat("cannot greet rank ", peer, ": cut short"));
    }
    const ssize_t n = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
    return make_error(ErrorKind::kUnavailable,
                      cat("cannot greet rank ", peer, ": ",
                          n < 0 ? system_error(errno) : std::string("cut short")));
  }

  // From the ranks above this one.
  Status accept_all() {
    int missing = 0;
    for (int peer = member_.rank + 1; peer < member_.size; ++peer) {
      if (!apart(peer)) missing += kLanes;
    }
    std::vector<Greeting> waiting;
    BlockingRegion region;
    WEFT_RETURN_IF_ERROR(region.status());
    while (missing > 0) {
      if (over()) return late_or_refused();
      std::vector<pollfd> fds{{listener_.fd(), POLLIN, 0}};
      for (const Greeting& one : waiting) fds.push_back({one.fd.get(), POLLIN, 0});
      if (poll(fds.data(), fds.size(), milliseconds_left()) == 0) {
        WEFT_RETURN_IF_ERROR(given_up_());
      }
      for (size_t i = 0; i < waiting.size();) {
        wire::GroupHello hello;
        Status why;
        const Heard heard = hear(&waiting[i], &hello, &why);
        if (heard == Heard::kMore) {
          ++i;
          continue;
        }
        if (heard == Heard::kHello) WEFT_RETURN_IF_ERROR(welcome(&waiting[i], hello, &missing));
        if (!why.ok()) refused_ = std::move(why);
        waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(i));
      }
      while (true) {
        Greeting next;
        next.fd = UniqueFd(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!next.fd.valid()) break;
        if (security_.on()) {
          WEFT_ASSIGN_OR_RETURN(next.tls,
                                TlsStream::with_certificates(next.fd.get(), TlsRole::kServer,
                                                             security_.certificates));
        }
        if (waiting.size() >= kMaxWaiting) waiting.erase(waiting.begin());
        waiting.push_back(std::move(next));
      }
    }
    return absl::OkStatus();
  }

  // What did not prove who it is may have been a member, and is then what is missing.
  Status late_or_refused() const {
    const Status status = late("connections", [this](int peer) { return !whole(peer); });
    if (refused_.ok()) return status;
    return annotate(status, cat("a connection was refused (", refused_.message(), ")"));
  }

  Status welcome(Greeting* from, const wire::GroupHello& hello, int* missing) {
    const int rank = dialling_rank(hello);
    if (rank < 0 || apart(rank) || hello.lane() >= kLanes || !fits(hello, rank)) {
      return absl::OkStatus();
    }
    const auto lane = static_cast<int>(hello.lane());
    if (at(rank).lanes[lane].valid()) return absl::OkStatus();
    if (from->tls != nullptr) {
      Status proved = check_worker(*from->tls, rank);
      if (proved.ok()) proved = check_token(hello, rank);
      if (!proved.ok()) {
        refuse(from->tls.get(), proved);
        refused_ = std::move(proved);
        return absl::OkStatus();
      }
    }
    set_tcp_options(from->fd.get(), kUserTimeout);
    WEFT_RETURN_IF_ERROR(greet(from->fd.get(), from->tls.get(), rank, lane));
    at(rank).lanes[lane] = std::move(from->fd);
    at(rank).tls[lane] = std::move(from->tls);
    --*missing;
    return absl::OkStatus();
  }

  // Tells the other side why; that it hears of it is not sure.
  void refuse(TlsStream* tls, const Status& why) const {
    wire::GroupHello hello;
    hello.set_refused(std::string(why.message().substr(0, kMaxRefusal)));
    const std::string bytes = message_of(hello);
    const std::string_view piece = bytes;
    if (const auto moved = tls->write({&piece, 1}); moved.ok()) (void)tls->flush();
  }

  Status check_token(const wire::GroupHello& hello, int peer) const {
    if (same_secret(hello.token(), security_.token)) return absl::OkStatus();
    return make_error(ErrorKind::kPermission, cat("rank ", peer, " has another cluster token"));
  }

  Status await_answer(int peer, int lane) {
    Greeting greeting{std::move(at(peer).lanes[lane]), std::move(at(peer).tls[lane]), true, {}};
    while (true) {
      wire::GroupHello hello;
      Status why;
      const Heard heard = hear(&greeting, &hello, &why);
      if (heard == Heard::kHello && fits(hello, peer)) {
        if (greeting.tls != nullptr) WEFT_RETURN_IF_ERROR(check_token(hello, peer));
        break;
      }
      if (heard != Heard::kMore) {
        const std::string where = cat("rank ", peer, " at ", member_at(peer).address);
        if (!why.ok()) return annotate(why, cat(where, " refuses this rank"));
        if (!hello.refused().empty()) {
          return make_error(ErrorKind::kPermission,
                            cat(where, " refuses this rank: ", hello.refused()));
        }
        return make_error(ErrorKind::kUnavailable,
                          cat(where, " does not greet as a member of this group"));
      }
      WEFT_RETURN_IF_ERROR(wait(greeting.fd.get(), POLLIN, peer, "to answer a hello"));
    }
    at(peer).lanes[lane] = std::move(greeting.fd);
    at(peer).tls[lane] = std::move(greeting.tls);
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
  const TcpSecurity& security_;
  std::vector<TcpPeer> peers_;
  Status refused_;  // the last one
};

}  // namespace

StatusOr<TcpListener> TcpListener::make(const std::string& host, bool beyond_loopback) {
  WEFT_ASSIGN_OR_RETURN(const BindHost at, resolve_bind_host(host));
  if (!at.loopback && !beyond_loopback) {
    return make_error(ErrorKind::kPermission,
                      cat("listening on ", host,
                          " would let other machines in without credentials; set them, or "
                          "allow_insecure"));
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
                                            const std::vector<TcpMember>& members,
                                            const TcpSecurity& security,
                                            const std::vector<bool>& apart,
                                            absl::FunctionRef<Status()> given_up, Runtime& runtime,
                                            absl::Time deadline) {
  return TcpConnector(member, listener, members, security, apart, given_up, runtime, deadline)
      .run();
}

}  // namespace weft::internal
