#include "weft/rpc/internal/grpc/listener.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/local/socket.h"
#include "weft/rpc/internal/wire/text.h"

namespace weft::internal {
namespace {

// ACCEPT-1.
constexpr absl::Duration kFirstPause = absl::Milliseconds(10);
constexpr absl::Duration kLongestPause = absl::Seconds(1);
constexpr absl::Duration kBetweenWarnings = absl::Minutes(1);
// Then the other listener has its turn, and the end is looked for.
constexpr int kAcceptsAtOnce = 64;

StatusOr<int> port_of(int fd) {
  sockaddr_storage at = {};
  socklen_t length = sizeof at;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) != 0) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot tell the port of a listener: ", system_error(errno)));
  }
  return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(at).sin6_port
                                        : reinterpret_cast<const sockaddr_in&>(at).sin_port);
}

// Errors of the connection that was to be accepted: the next one may be better.
bool concerns_one_connection(int code) {
  switch (code) {
    case EINTR:
    case ECONNABORTED:
    case ENETDOWN:
    case EPROTO:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH: return true;
    default: return false;
  }
}

}  // namespace

StatusOr<int> GrpcListener::open(const BindHost& host, int port, std::string_view local,
                                 absl::Duration user_timeout) {
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot listen on ", host.host, ": ", system_error(errno)));
  }
  WEFT_ASSIGN_OR_RETURN(listeners_[0], listen_on_port(host, port));
  if (!local.empty()) {
    WEFT_ASSIGN_OR_RETURN(listeners_[1],
                          listen_local(local_socket_name(local), SOCK_STREAM, SOMAXCONN));
  }
  // Inherited by what is accepted.
  const int fd = listeners_[0].get();
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (user_timeout > absl::ZeroDuration() && user_timeout < absl::Hours(24)) {
    const unsigned ms = static_cast<unsigned>(absl::ToInt64Milliseconds(user_timeout));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
  }
  return port_of(fd);
}

void GrpcListener::add_to(grpc::ServerBuilder* builder,
                          std::shared_ptr<grpc::ServerCredentials> credentials) {
  using Type = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  acceptor_ =
      builder->experimental().AddExternalConnectionAcceptor(Type::FROM_FD, std::move(credentials));
}

void GrpcListener::start() {
  thread_ = runtime_->spawn("weft-accept", [this] { run(); });
}

void GrpcListener::stop() {
  if (thread_ != nullptr) {
    const uint64_t one = 1;
    // The counter cannot overflow with one writer.
    (void)!write(wake_.get(), &one, sizeof one);
    thread_->join();
    thread_ = nullptr;
  }
  for (UniqueFd& listener : listeners_) listener.reset();
}

void GrpcListener::run() {
  absl::Duration pause = absl::ZeroDuration();
  while (true) {
    const bool pausing = pause > absl::ZeroDuration();
    // poll() passes over descriptors below zero.
    std::array<pollfd, 3> all = {};
    all[0] = {wake_.get(), POLLIN, 0};
    all[1] = {pausing ? -1 : listeners_[0].get(), POLLIN, 0};
    all[2] = {pausing ? -1 : listeners_[1].get(), POLLIN, 0};
    (void)poll(all.data(), all.size(),
               pausing ? static_cast<int>(absl::ToInt64Milliseconds(pause)) : -1);
    if (all[0].revents != 0) return;
    bool all_in = true;
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if (listeners_[i].valid() && (pausing || all[i + 1].revents != 0)) {
        all_in = accept_from(listeners_[i].get()) && all_in;
      }
    }
    pause = all_in ? absl::ZeroDuration() : std::clamp(2 * pause, kFirstPause, kLongestPause);
  }
}

bool GrpcListener::accept_from(int listener) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      counters_->accepted.fetch_add(1, std::memory_order_relaxed);
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = listener;
      connection.fd = fd;  // the server's from now on
      acceptor_->HandleNewConnection(&connection);
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
    if (concerns_one_connection(errno)) continue;
    const int code = errno;
    counters_->stalls.fetch_add(1, std::memory_order_relaxed);
    if (runtime_->now() >= next_warning_) {
      next_warning_ = runtime_->now() + kBetweenWarnings;
      WEFT_LOG(log_, kWarning) << "cannot accept connections: " << system_error(code)
                               << "; whoever dials waits, and it is tried again";
    }
    return false;
  }
  return true;
}

}  // namespace weft::internal
