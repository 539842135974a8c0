#include "weft/collectives/internal/tcp_link.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace weft::internal {
namespace {

// Looks at the sockets so often before it sleeps.
constexpr int kLooks = 20;
// Pieces of unread bytes that are discarded at a time at the end of the link.
constexpr int kDiscards = 256;

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
  // A socket that is closed with bytes unread resets its connection, and what this rank has written
  // and the peer has not received yet is lost. So what has come is read, until no more comes; the
  // kernel delivers the rest after the close.
  bool drained() override {
    bool quiet = true;
    for (const TcpPeer& peer : peers_) {
      for (const UniqueFd& lane : peer.lanes) {
        if (!lane.valid()) continue;
        char buffer[16 << 10];
        int unsent = 0;
        bool some = false;
        for (int i = 0; i < kDiscards; ++i) {
          const ssize_t n = recv(lane.get(), buffer, sizeof buffer, MSG_DONTWAIT);
          if (n <= 0 && (n == 0 || errno != EINTR)) break;
          some = true;
        }
        if (some && ioctl(lane.get(), SIOCOUTQ, &unsent) == 0 && unsent > 0) quiet = false;
      }
    }
    return quiet;
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
