#include "weft/transport/internal/local/gate.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {
namespace {

// What the epoll set tells apart; others are ids of attached sessions, which begin at 1.
constexpr uint64_t kWake = 0;
constexpr uint64_t kListener = ~uint64_t{0};
constexpr int kBacklog = 512;

bool watch(int epoll, int fd, uint64_t id, uint32_t events = EPOLLIN | EPOLLRDHUP) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

void LocalSession::done() { (void)shutdown(fd_.get(), SHUT_WR); }

LocalGate::~LocalGate() { stop(); }

Status LocalGate::start_locked() {
  if (stopped_) return make_error(ErrorKind::kState, "the transport is shut down");
  if (thread_ != nullptr) return absl::OkStatus();
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid() || !watch(epoll_.get(), wake_.get(), kWake)) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot watch local sockets: ", system_error(errno)));
  }
  thread_ = runtime_->spawn("weft-local", [this] { run(); });
  return absl::OkStatus();
}

Status LocalGate::listen(std::string_view name) {
  MutexLock lock(&mutex_);
  WEFT_RETURN_IF_ERROR(start_locked());
  WEFT_ASSIGN_OR_RETURN(listener_, listen_local(name, SOCK_SEQPACKET, kBacklog));
  if (!watch(epoll_.get(), listener_.get(), kListener)) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("cannot watch the local socket: ", system_error(errno)));
  }
  return absl::OkStatus();
}

StatusOr<std::shared_ptr<LocalSession>> LocalGate::visit(std::string_view name) {
  WEFT_ASSIGN_OR_RETURN(UniqueFd fd, connect_local(name));
  WEFT_ASSIGN_OR_RETURN(const uid_t user, peer_user(fd.get()));
  if (user != geteuid()) {
    return make_error(ErrorKind::kPermission,
                      absl::StrCat("the local socket @", view(name), " belongs to user ", user,
                                   ", this process to user ", geteuid()));
  }
  std::string ticket = random_bytes(runtime_->random(), kTicketBytes);
  WEFT_RETURN_IF_ERROR(send_local(fd.get(), ticket, {}));
  return std::make_shared<LocalSession>(std::move(fd), std::move(ticket));
}

// Takes in who stands at the door, and the tickets that they left.
void LocalGate::welcome_locked() {
  if (!listener_.valid()) return;
  while (true) {
    UniqueFd fd = accept_local(listener_.get());
    if (!fd.valid()) {
      // Without a descriptor to spare the visitor waits at the door: not watched, or the thread
      // would be woken for it again and again. The next hello looks in.
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      }
      break;
    }
    const StatusOr<uid_t> user = peer_user(fd.get());
    if (!user.ok() || *user != geteuid()) continue;
    if (visitors_.size() >= kMaxVisitors) visitors_.erase(visitors_.begin());
    const uint64_t id = ++last_id_;
    // Only for its end: what it leaves is read when a hello asks for it.
    (void)watch(epoll_.get(), fd.get(), id, EPOLLRDHUP);
    visitors_.emplace(id, Visitor{std::move(fd), {}});
  }
  for (auto it = visitors_.begin(); it != visitors_.end();) {
    Visitor& visitor = it->second;
    const StatusOr<LocalMessage> message = receive_local(visitor.fd.get());
    bool stays = message.ok() && message->what == LocalMessage::What::kNothingYet;
    if (!stays && message.ok() && visitor.ticket.empty() && message->bytes.size() == kTicketBytes &&
        message->files.empty()) {
      visitor.ticket = message->bytes;
      stays = true;
    }
    it = stays ? std::next(it) : visitors_.erase(it);
  }
}

bool LocalGate::knows(std::string_view ticket) {
  MutexLock lock(&mutex_);
  welcome_locked();
  bool found = false;
  for (const auto& [id, visitor] : visitors_) {
    found = same_bytes_in_constant_time(visitor.ticket, ticket) || found;
  }
  return found && !ticket.empty();
}

std::shared_ptr<LocalSession> LocalGate::claim(std::string_view ticket) {
  MutexLock lock(&mutex_);
  if (ticket.empty()) return nullptr;
  welcome_locked();
  for (auto it = visitors_.begin(); it != visitors_.end(); ++it) {
    if (!same_bytes_in_constant_time(it->second.ticket, ticket)) continue;
    (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->second.fd.get(), nullptr);
    auto session =
        std::make_shared<LocalSession>(std::move(it->second.fd), std::move(it->second.ticket));
    visitors_.erase(it);
    return session;
  }
  return nullptr;
}

Status LocalGate::attach(const std::shared_ptr<LocalSession>& session,
                         std::shared_ptr<LocalHandler> handler) {
  MutexLock lock(&mutex_);
  WEFT_RETURN_IF_ERROR(start_locked());
  const uint64_t id = ++last_id_;
  attached_.emplace(id, Attached{session, std::move(handler)});
  if (watch(epoll_.get(), session->fd_.get(), id)) return absl::OkStatus();
  attached_.erase(id);
  return make_error(ErrorKind::kResource,
                    absl::StrCat("cannot watch a local socket: ", system_error(errno)));
}

void LocalGate::sweep() {
  MutexLock lock(&mutex_);
  welcome_locked();
}

void LocalGate::stop() {
  std::unique_ptr<Thread> thread;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    thread = std::move(thread_);
    if (thread != nullptr) {
      const uint64_t one = 1;
      // The counter cannot overflow with one writer.
      (void)!write(wake_.get(), &one, sizeof one);
    }
  }
  if (thread != nullptr) thread->join();
  std::map<uint64_t, Attached> attached;
  MutexLock lock(&mutex_);
  listener_.reset();
  visitors_.clear();
  attached.swap(attached_);
  lock.unlock();
}

size_t LocalGate::visitors_for_test() {
  MutexLock lock(&mutex_);
  welcome_locked();
  return visitors_.size();
}

void LocalGate::run() {
  std::array<epoll_event, 16> events;
  while (true) {
    const int n = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
    for (int i = 0; i < n; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kListener) {
        MutexLock lock(&mutex_);
        welcome_locked();
      } else if (id != kWake) {
        read(id);
      }
    }
    MutexLock lock(&mutex_);
    if (stopped_) return;
  }
}

void LocalGate::read(uint64_t id) {
  Attached from;
  {
    MutexLock lock(&mutex_);
    const auto it = attached_.find(id);
    if (it == attached_.end()) return welcome_locked();  // a visitor that went away
    from = it->second;
  }
  bool end = false;
  while (!end) {
    StatusOr<LocalMessage> message = receive_local(from.session->fd_.get());
    end = !message.ok() || message->what == LocalMessage::What::kEnd;
    if (!end && message->what == LocalMessage::What::kNothingYet) return;
    if (!end) end = !from.handler->on_local_message(*std::move(message)).ok();
  }
  {
    MutexLock lock(&mutex_);
    (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, from.session->fd_.get(), nullptr);
    attached_.erase(id);
  }
  from.handler->on_local_end();
}

}  // namespace weft::internal
