#include "weft/transport/internal/grpc/listener.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/internal/descriptors.h"
#include "weft/transport/local_socket.h"

namespace weft::internal {
namespace {

// ACCEPT-1.
constexpr absl::Duration kFirstPause = absl::Milliseconds(10);
constexpr absl::Duration kLongestPause = absl::Seconds(1);
// ACCEPT-2. A shortage that is over by then goes unnoticed.
constexpr absl::Duration kTellAfter = absl::Milliseconds(300);
constexpr absl::Duration kBetweenTold = absl::Milliseconds(50);
constexpr absl::Duration kBetweenWarnings = absl::Minutes(1);
// Then the other listener has its turn, and the end is looked for.
constexpr int kAcceptsAtOnce = 64;
// Connections that have not said yet what they are; one more, and the oldest is gRPC's to judge.
constexpr size_t kMaxUnsorted = 256;

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
  keep_spare();
  WEFT_ASSIGN_OR_RETURN(listeners_[0], listen_on_port(host, port));
  if (!local.empty()) {
    WEFT_ASSIGN_OR_RETURN(listeners_[1],
                          listen_local(local_socket_name(local), SOCK_STREAM, SOMAXCONN));
  }
  // Inherited by what is accepted.
  set_tcp_options(listeners_[0].get(), user_timeout);
  return port_of(listeners_[0].get());
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
  std::vector<pollfd> all;
  while (true) {
    const bool pausing = pause > absl::ZeroDuration();
    // poll() passes over descriptors below zero.
    all.assign({{wake_.get(), POLLIN, 0},
                {pausing ? -1 : listeners_[0].get(), POLLIN, 0},
                {pausing ? -1 : listeners_[1].get(), POLLIN, 0}});
    for (const Unsorted& one : unsorted_) {
      all.push_back({one.fd.get(), static_cast<short>(POLLIN | POLLRDHUP), 0});
    }
    absl::Duration patience = pausing ? pause : absl::InfiniteDuration();
    // The oldest is the first.
    if (!unsorted_.empty()) {
      patience = std::min(patience, unsorted_.front().until - runtime_->now());
    }
    if (!newcomers_.empty()) patience = std::min(patience, Newcomers::kTick);
    (void)poll(all.data(), all.size(),
               patience == absl::InfiniteDuration()
                   ? -1
                   : static_cast<int>(absl::ToInt64Milliseconds(std::max(
                         absl::Ceil(patience, absl::Milliseconds(1)), absl::ZeroDuration()))));
    if (all[0].revents != 0) break;
    size_t at = 3;
    const absl::Time now = runtime_->now();
    std::erase_if(unsorted_, [&](Unsorted& one) {
      const short events = all[at++].revents;
      return (events != 0 && sort(&one, events)) || one.until <= now;
    });
    cut_newcomers();
    if (!spare_.valid()) keep_spare();
    bool all_in = true;
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if (listeners_[i].valid() && (pausing || all[i + 1].revents != 0)) {
        all_in = accept_from(i) && all_in;
      }
    }
    if (all_in) {
      pause = absl::ZeroDuration();
      stalled_since_ = absl::InfiniteFuture();
    } else {
      pause = is_short() ? kBetweenTold : std::clamp(2 * pause, kFirstPause, kLongestPause);
    }
  }
  unsorted_.clear();
  newcomers_.clear();
}

void GrpcListener::turned_away(std::string_view why) {
  counters_->turned_away.fetch_add(1, std::memory_order_relaxed);
  if (runtime_->now() < next_turned_away_) return;
  next_turned_away_ = runtime_->now() + kBetweenWarnings;
  WEFT_LOG(log_, kWarning) << why << " (the next such line comes in a minute at the earliest)";
}

void GrpcListener::cut_newcomers() {
  for (const std::string& why : newcomers_.cut(runtime_->now())) turned_away(why);
}

bool GrpcListener::is_own(size_t which, int fd) {
  if (!own_user_only_) return true;
  switch (owner_of_peer(fd)) {
    case PeerOwner::kOwn: return true;
    case PeerOwner::kOther:
      turned_away(absl::StrCat(
          "a connection ",
          which == 0 ? absl::StrCat("from ", remote_address(fd)) : "to the local socket",
          " of a process that has ended or is not of user ", geteuid(),
          " was closed: this worker listens on loopback without credentials. "
          "Set credentials (docs/security.md), or WEFT_SAME_USER=0"));
      return false;
    case PeerOwner::kUnknown: break;
  }
  // Its hello is refused, as it has no ticket.
  if (!owner_unknown_told_) {
    WEFT_LOG(log_, kWarning) << "this system does not say who opened a connection over loopback: "
                                "other users reach gRPC's parser";
  }
  owner_unknown_told_ = true;
  return true;
}

void GrpcListener::hand_over(int listener, UniqueFd fd) {
  if (listener == listeners_[0].get()) newcomers_.add(fd.get(), runtime_->now() + hello_timeout_);
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
  connection.listener_fd = listener;
  connection.fd = fd.release();  // the server's from now on
  acceptor_->HandleNewConnection(&connection);
}

bool GrpcListener::sort(Unsorted* one, short events) {
  const int fd = one->fd.get();
  char greeting[kSocketGreetingBytes];
  const ssize_t n = recv(fd, greeting, sizeof greeting, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (n <= 0) return true;
  if (greeting[0] != kSocketMagic[0]) {
    hand_over(listeners_[one->which].get(), std::move(one->fd));
    return true;
  }
  if (static_cast<size_t>(n) < sizeof greeting) {
    // It is looked at again when all is there.
    const int all = sizeof greeting;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &all, sizeof all);
    return (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  }
  (void)!recv(fd, greeting, sizeof greeting, MSG_DONTWAIT);
  const int any = 1;
  setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &any, sizeof any);
  if (std::string_view(greeting, kSocketMagic.size()) == kSocketMagic) {
    on_socket_(std::string(greeting + kSocketMagic.size(), kSocketTicketBytes), std::move(one->fd));
  }
  return true;
}

bool GrpcListener::accept_from(size_t which) {
  const int listener = listeners_[which].get();
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      take_in(which, UniqueFd(fd));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
    if (concerns_one_connection(errno)) continue;
    const int code = errno;
    counters_->stalls.fetch_add(1, std::memory_order_relaxed);
    if (runtime_->now() >= next_warning_) {
      next_warning_ = runtime_->now() + kBetweenWarnings;
      WEFT_LOG(log_, kWarning) << "cannot accept connections: " << system_error(code)
                               << "; whoever dials waits, and it is tried again. "
                               << no_descriptors_left().message();
    }
    stalled_since_ = std::min(stalled_since_, runtime_->now());
    if (runtime_->now() - stalled_since_ >= kTellAfter) accept_to_tell(which);
    return false;
  }
  return true;
}

void GrpcListener::take_in(size_t which, UniqueFd fd) {
  counters_->accepted.fetch_add(1, std::memory_order_relaxed);
  if (!is_own(which, fd.get())) return;
  if (on_socket_ == nullptr) return hand_over(listeners_[which].get(), std::move(fd));
  Unsorted one{which, std::move(fd), runtime_->now() + patience_};
  if (sort(&one, 0)) return;
  if (unsorted_.size() >= kMaxUnsorted) {
    Unsorted& oldest = unsorted_.front();
    hand_over(listeners_[oldest.which].get(), std::move(oldest.fd));
    unsorted_.erase(unsorted_.begin());
  }
  unsorted_.push_back(std::move(one));
}

void GrpcListener::keep_spare() {
  spare_.reset(eventfd(0, EFD_CLOEXEC));
  short_.store(!spare_.valid());
}

void GrpcListener::accept_to_tell(size_t which) {
  if (!spare_.valid()) return;
  // Before the hello can come.
  short_.store(true);
  spare_.reset();
  const int fd = accept4(listeners_[which].get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd >= 0) {
    take_in(which, UniqueFd(fd));
  } else {
    keep_spare();
  }
}

}  // namespace weft::internal
