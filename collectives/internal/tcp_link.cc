#include "weft/collectives/internal/tcp_link.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace weft::internal {
namespace {

// Looks at the sockets so often before it sleeps.
constexpr int kLooks = 20;

class TcpStreams : public Streams {
 public:
  explicit TcpStreams(std::vector<TcpPeer> peers) : peers_(std::move(peers)) {}

  Moved read(int peer, int lane, char* to, size_t bytes, size_t* got) override {
    while (true) {
      const ssize_t n = recv(fd(peer, lane), to, bytes, MSG_DONTWAIT);
      if (n > 0) {
        *got = static_cast<size_t>(n);
        return Moved::kBytes;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Moved::kNothing;
      return Moved::kEnd;
    }
  }

  Moved write(int peer, int lane, const iovec* parts, size_t count, size_t* sent) override {
    msghdr message = {};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = count;
    while (true) {
      const ssize_t n = sendmsg(fd(peer, lane), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) {
        *sent = static_cast<size_t>(n);
        return Moved::kBytes;
      }
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return Moved::kNothing;
      return Moved::kEnd;
    }
  }

  int control(int peer) const override { return fd(peer, kControlLane); }
  int looks() const override { return kLooks; }
  void relax(int look) override {
    (void)look;
    sched_yield();
  }
  void poll_for(int peer, int lane, bool to_read, bool to_write,
                std::vector<pollfd>* fds) override {
    const auto events = static_cast<short>((to_read ? POLLIN : 0) | (to_write ? POLLOUT : 0));
    if (events != 0 && fd(peer, lane) >= 0) fds->push_back({fd(peer, lane), events, 0});
  }

 private:
  int fd(int peer, int lane) const { return peers_[static_cast<size_t>(peer)].lanes[lane].get(); }

  const std::vector<TcpPeer> peers_;
};

}  // namespace

StatusOr<std::unique_ptr<StreamLink>> make_tcp_link(const Membership& member,
                                                    std::vector<TcpPeer> peers,
                                                    std::shared_ptr<Runtime> runtime) {
  return make_stream_link(member, std::make_unique<TcpStreams>(std::move(peers)),
                          std::move(runtime));
}

}  // namespace weft::internal
