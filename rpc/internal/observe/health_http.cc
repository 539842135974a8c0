#include "weft/rpc/internal/observe/health_http.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/transport/address.h"

namespace weft::internal {
namespace {

// After an accept() that failed for want of descriptors or memory.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

std::string status_line(const char* status, const char* more = "") {
  return absl::StrCat("HTTP/1.1 ", status, "\r\n", more,
                      "Content-Length: 0\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n");
}

int port_of(int fd) {
  sockaddr_storage at = {};
  socklen_t size = sizeof at;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) != 0) return 0;
  return at.ss_family == AF_INET6 ? ntohs(reinterpret_cast<sockaddr_in6*>(&at)->sin6_port)
                                  : ntohs(reinterpret_cast<sockaddr_in*>(&at)->sin_port);
}

}  // namespace

std::string health_answer(std::string_view request, const HealthState& state) {
  const bool complete = request.find("\r\n\r\n") != std::string_view::npos ||
                        request.find("\n\n") != std::string_view::npos;
  if (!complete) {
    if (request.size() < kMostHealthRequest) return "";
    return status_line("431 Request Header Fields Too Large");
  }
  const std::string_view line = request.substr(0, request.find_first_of("\r\n"));
  const size_t first = line.find(' ');
  const size_t second = line.find(' ', first == std::string_view::npos ? first : first + 1);
  if (second == std::string_view::npos || line.substr(second + 1, 7) != "HTTP/1.") {
    return status_line("400 Bad Request");
  }
  const std::string_view method = line.substr(0, first);
  std::string_view path = line.substr(first + 1, second - first - 1);
  path = path.substr(0, path.find('?'));
  if (path != "/healthz" && path != "/readyz") return status_line("404 Not Found");
  if (method != "GET" && method != "HEAD") {
    return status_line("405 Method Not Allowed", "Allow: GET, HEAD\r\n");
  }
  const bool good = state.live.load() && (path == "/healthz" || state.ready.load());
  return status_line(good ? "200 OK" : "503 Service Unavailable");
}

HealthHttp::HealthHttp(std::shared_ptr<const HealthState> state, std::shared_ptr<Runtime> runtime)
    : state_(std::move(state)), runtime_(std::move(runtime)) {}

StatusOr<std::unique_ptr<HealthHttp>> HealthHttp::start(std::string_view address,
                                                        std::shared_ptr<const HealthState> state,
                                                        std::shared_ptr<Runtime> runtime) {
  const std::string what = absl::StrCat("WEFT_HEALTH '", std::string(address), "'");
  const StatusOr<HostPort> at = parse_host_port(address, /*any_port=*/true);
  if (!at.ok()) return annotate(at.status(), what);
  const StatusOr<BindHost> host = resolve_bind_host(at->host);
  if (!host.ok()) return annotate(host.status(), what);
  StatusOr<UniqueFd> listener = listen_on_port(*host, at->port);
  if (!listener.ok()) return annotate(listener.status(), what);
  std::unique_ptr<HealthHttp> made(new HealthHttp(std::move(state), std::move(runtime)));
  made->listener_ = *std::move(listener);
  made->wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made->wake_.valid()) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat(what, ": no descriptor: ", system_error(errno)));
  }
  made->port_ = port_of(made->listener_.get());
  made->address_ = join_host_port(host->host, made->port_);
  HealthHttp* const self = made.get();
  made->thread_ = self->runtime_->spawn("weft-health", [self] { self->serve(); });
  return made;
}

HealthHttp::~HealthHttp() {
  if (thread_ == nullptr) return;
  const uint64_t one = 1;
  while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) continue;
  thread_->join();
}

void HealthHttp::serve() {
  std::vector<pollfd> polled;
  while (true) {
    const absl::Time before = runtime_->now();
    const bool paused = before < accept_again_;
    polled.assign({{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}});
    // One that is full, or pauses, leaves clients in the kernel's queue.
    if (paused || clients_.size() >= kMostHealthClients) polled[1].fd = -1;
    absl::Time until = paused ? accept_again_ : absl::InfiniteFuture();
    for (const Client& client : clients_) {
      polled.push_back({client.fd.get(), POLLIN, 0});
      until = std::min(until, client.until);
    }
    const absl::Duration rest = std::max(until - before, absl::ZeroDuration());
    const int ms =
        until == absl::InfiniteFuture()
            ? -1
            : static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(rest, absl::Milliseconds(1))));
    if (::poll(polled.data(), polled.size(), ms) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;
    const absl::Time now = runtime_->now();
    for (size_t i = clients_.size(); i-- > 0;) {
      const bool over = polled[i + 2].revents != 0 && !read_from(&clients_[i]);
      if (over || now >= clients_[i].until) clients_.erase(clients_.begin() + i);
    }
    if (polled[1].revents != 0) accept_clients(now);
  }
}

void HealthHttp::accept_clients(absl::Time now) {
  while (clients_.size() < kMostHealthClients) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.valid()) {
      clients_.push_back({std::move(fd), now + kHealthClientTime});
      continue;
    }
    const bool went_away = errno == EINTR || errno == ECONNABORTED;
    if (went_away) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) accept_again_ = now + kAcceptPause;
    return;
  }
}

bool HealthHttp::read_from(Client* client) const {
  char buffer[kMostHealthRequest];
  const ssize_t n = ::recv(client->fd.get(), buffer, sizeof buffer, 0);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (n == 0) return false;
  if (client->answered) return true;
  const size_t room = kMostHealthRequest - client->request.size();
  client->request.append(buffer, std::min(static_cast<size_t>(n), room));
  const std::string answer = health_answer(client->request, *state_);
  if (answer.empty()) return true;
  client->answered = true;
  client->request = {};
  // It is the first that this socket sends, and fits its buffer.
  if (::send(client->fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL) < 0) return false;
  // Closed by the client, so that it reads the answer even when it has sent more than was read.
  return ::shutdown(client->fd.get(), SHUT_WR) == 0;
}

}  // namespace weft::internal
