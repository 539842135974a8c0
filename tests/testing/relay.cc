#include "weft/tests/testing/relay.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "weft/tests/testing/loopback.h"

namespace weft::testing {
namespace {

constexpr size_t kBuffer = 256u << 10;

int64_t now_millis() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::unique_ptr<Relay> Relay::start(std::string_view target) {
  std::unique_ptr<Relay> relay(new Relay());
  const size_t colon = target.rfind(':');
  if (colon == std::string_view::npos) return nullptr;
  relay->target_port_ = std::stoi(std::string(target.substr(colon + 1)));
  relay->listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in in = loopback(0);
  socklen_t length = sizeof in;
  if (relay->listener_ < 0 ||
      bind(relay->listener_, reinterpret_cast<sockaddr*>(&in), sizeof in) != 0 ||
      listen(relay->listener_, 64) != 0 ||
      getsockname(relay->listener_, reinterpret_cast<sockaddr*>(&in), &length) != 0 ||
      pipe2(relay->wake_, O_CLOEXEC | O_NONBLOCK) != 0) {
    return nullptr;
  }
  relay->address_ = "127.0.0.1:" + std::to_string(ntohs(in.sin_port));
  relay->thread_ = std::thread([r = relay.get()] { r->run(); });
  return relay;
}

Relay::~Relay() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  for (const int fd : {listener_, wake_[0], wake_[1]}) {
    if (fd >= 0) close(fd);
  }
}

void Relay::wake() {
  if (wake_[1] >= 0) (void)!write(wake_[1], "w", 1);
}

void Relay::add(const RelayRule& rule) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rules_.push_back(rule);
  }
  wake();
}

void Relay::clear() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rules_.clear();
    for (Link& link : links_) {
      for (Pipe& pipe : link.pipes) {
        pipe.stalled = false;
        pipe.delay_millis = 0;
        pipe.throttle_bytes = 0;
        pipe.hold_until = 0;
        pipe.used.clear();
      }
    }
  }
  wake();
}

void Relay::cut_all(bool reset) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Link& link : links_) close_link(&link, reset);
  }
  wake();
}

void Relay::refuse(bool refuse) {
  std::lock_guard<std::mutex> lock(mutex_);
  refuse_ = refuse;
}

int Relay::accepted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return accepted_;
}

int Relay::open() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(
      std::count_if(links_.begin(), links_.end(), [](const Link& l) { return !l.dead; }));
}

uint64_t Relay::bytes(bool to_target) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_[to_target ? 0 : 1];
}

uint64_t Relay::passed(int connection, bool to_target) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Link& link : links_) {
    if (link.number == connection && !link.dead) return link.pipes[to_target ? 0 : 1].passed;
  }
  return 0;
}

void Relay::close_link(Link* link, bool reset) {
  if (link->dead) return;
  link->dead = true;
  for (const int fd : {link->client, link->target}) {
    if (reset) {
      const linger now = {1, 0};
      setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    close(fd);
  }
}

void Relay::accept_one() {
  const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (client < 0) return;
  const int number = accepted_++;
  const int target = refuse_ ? -1 : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in in = loopback(target_port_);
  if (target < 0 || connect(target, reinterpret_cast<const sockaddr*>(&in), sizeof in) != 0) {
    if (target >= 0) close(target);
    close(client);
    return;
  }
  fcntl(target, F_SETFL, O_NONBLOCK);
  const int on = 1;
  setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(target, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  Link link;
  link.number = number;
  link.client = client;
  link.target = target;
  link.pipes[0].from = client;
  link.pipes[0].to = target;
  link.pipes[1].from = target;
  link.pipes[1].to = client;
  links_.push_back(std::move(link));
}

// What the rules say at this place of the stream; `may_pass` shrinks to the next rule's byte.
void Relay::apply(Link* link, Pipe* pipe, bool to_target, size_t* may_pass) {
  pipe->used.resize(rules_.size());
  for (size_t i = 0; i < rules_.size() && !link->dead; ++i) {
    const RelayRule& rule = rules_[i];
    if (pipe->used[i] || rule.to_target != to_target) continue;
    if (rule.connection >= 0 && rule.connection != link->number) continue;
    if (pipe->passed < rule.at_byte) {
      *may_pass = std::min<size_t>(*may_pass, rule.at_byte - pipe->passed);
      continue;
    }
    pipe->used[i] = true;
    switch (rule.action) {
      case RelayAction::kNone: break;
      case RelayAction::kCut: close_link(link, false); break;
      case RelayAction::kReset: close_link(link, true); break;
      case RelayAction::kHalfClose:
        pipe->buffer.clear();
        pipe->ended = true;
        break;
      case RelayAction::kStall: pipe->stalled = true; break;
      case RelayAction::kDelay: pipe->delay_millis = rule.millis; break;
      case RelayAction::kThrottle:
        pipe->throttle_bytes = static_cast<size_t>(rule.count);
        pipe->throttle_left = pipe->throttle_bytes;
        pipe->throttle_millis = rule.millis;
        break;
      case RelayAction::kGarbage: {
        std::string garbage;
        for (int b = 0; b < rule.count; ++b) garbage.push_back(static_cast<char>(b * 37 + 11));
        pipe->buffer.insert(0, garbage);
        break;
      }
      case RelayAction::kFlip:
        for (size_t b = 0; b < pipe->buffer.size() && b < static_cast<size_t>(rule.count); ++b) {
          pipe->buffer[b] = static_cast<char>(pipe->buffer[b] ^ 0x5a);
        }
        break;
    }
  }
}

void Relay::move(Link* link, Pipe* pipe, bool to_target) {
  char block[64 << 10];
  while (!link->dead && !pipe->ended && pipe->buffer.size() < kBuffer) {
    const ssize_t n = recv(pipe->from, block, sizeof block, 0);
    if (n > 0) {
      pipe->buffer.append(block, static_cast<size_t>(n));
      if (pipe->delay_millis > 0) pipe->hold_until = now_millis() + pipe->delay_millis;
      continue;
    }
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (n < 0) return close_link(link, true);
    pipe->ended = true;
  }
  while (!link->dead) {
    size_t may_pass = std::numeric_limits<size_t>::max();
    apply(link, pipe, to_target, &may_pass);
    if (link->dead || pipe->stalled || pipe->buffer.empty()) break;
    if (pipe->hold_until > now_millis()) break;
    if (pipe->throttle_bytes > 0) may_pass = std::min(may_pass, pipe->throttle_left);
    const ssize_t n = ::send(pipe->to, pipe->buffer.data(), std::min(may_pass, pipe->buffer.size()),
                             MSG_NOSIGNAL);
    if (n <= 0) {
      if (n < 0 && errno != EAGAIN && errno != EINTR) close_link(link, true);
      break;
    }
    pipe->buffer.erase(0, static_cast<size_t>(n));
    pipe->passed += static_cast<uint64_t>(n);
    bytes_[to_target ? 0 : 1] += static_cast<uint64_t>(n);
    if (pipe->throttle_bytes == 0) continue;
    pipe->throttle_left -= static_cast<size_t>(n);
    if (pipe->throttle_left > 0) continue;
    pipe->throttle_left = pipe->throttle_bytes;
    pipe->hold_until = now_millis() + pipe->throttle_millis;
  }
  if (!link->dead && pipe->ended && pipe->buffer.empty() && !pipe->shut && !pipe->stalled) {
    pipe->shut = true;
    shutdown(pipe->to, SHUT_WR);
    if (link->pipes[0].shut && link->pipes[1].shut) close_link(link, false);
  }
}

void Relay::run() {
  while (true) {
    std::vector<pollfd> fds;
    int timeout = -1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) break;
      links_.remove_if([](const Link& l) { return l.dead; });
      fds.push_back({listener_, POLLIN, 0});
      fds.push_back({wake_[0], POLLIN, 0});
      for (Link& link : links_) {
        short events[2] = {0, 0};  // client, target
        for (int i = 0; i < 2; ++i) {
          Pipe& pipe = link.pipes[i];
          if (!pipe.ended && pipe.buffer.size() < kBuffer) events[i] |= POLLIN;
          if (pipe.buffer.empty() || pipe.stalled) continue;
          const int64_t wait = pipe.hold_until - now_millis();
          if (wait > 0) {
            if (timeout < 0 || wait < timeout) timeout = static_cast<int>(wait);
          } else {
            events[1 - i] |= POLLOUT;
          }
        }
        // A descriptor without events still reports errors, over and over: left out.
        if (events[0] != 0) fds.push_back({link.client, events[0], 0});
        if (events[1] != 0) fds.push_back({link.target, events[1], 0});
      }
    }
    if (poll(fds.data(), fds.size(), timeout) < 0 && errno != EINTR) break;
    std::lock_guard<std::mutex> lock(mutex_);
    char drained[64];
    while (read(wake_[0], drained, sizeof drained) > 0) {
    }
    if ((fds[0].revents & POLLIN) != 0) accept_one();
    for (Link& link : links_) {
      move(&link, &link.pipes[0], true);
      if (!link.dead) move(&link, &link.pipes[1], false);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (Link& link : links_) close_link(&link, true);
  links_.clear();
}

}  // namespace weft::testing
