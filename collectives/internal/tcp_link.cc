#include "weft/collectives/internal/tcp_link.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "weft/common/mutex.h"
#include "weft/transport/tls_stream.h"

namespace weft::internal {
namespace {

// Looks at the sockets so often before it sleeps.
constexpr int kLooks = 20;
// Pieces of unread bytes that are discarded at a time at the end of the link.
constexpr int kDiscards = 256;
// A thread that awaits so many bytes or more sleeps until the kernel has them, or as many as a piece
// has. Woken for every packet it would take the core from what computes some hundred times for 32 MiB.
constexpr size_t kLeastAwaited = 64 << 10;
// Bytes of the socket for one read inside TLS. A read that goes on to the end of the connection
// loses what it has.
constexpr size_t kTlsTurn = 16 << 10;

class TcpStreams : public Streams {
 public:
  explicit TcpStreams(std::vector<TcpPeer> peers)
      : peers_(std::move(peers)), cut_short_(peers_.size(), false), low_water_(peers_.size(), 1) {}

  Moved read(int peer, int lane, char* to, size_t bytes, size_t* got) override {
    if (TlsStream* const tls = tls_of(peer, lane); tls != nullptr) {
      const StatusOr<TlsMoved> moved = tls->read({to, bytes}, kTlsTurn);
      // A connection that was tampered with is one that has ended.
      if (!moved.ok()) return Moved::kEnd;
      *got = moved->bytes;
      if (moved->bytes > 0) return Moved::kBytes;
      return moved->state == TlsState::kEnded ? Moved::kEnd : Moved::kNothing;
    }
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
    if (TlsStream* const tls = tls_of(peer, lane); tls != nullptr) {
      constexpr size_t kMost = 2;  // header and body
      std::string_view pieces[kMost];
      const size_t n = std::min(count, kMost);
      for (size_t i = 0; i < n; ++i) {
        pieces[i] = {static_cast<const char*>(parts[i].iov_base), parts[i].iov_len};
      }
      const StatusOr<TlsMoved> moved = tls->write({pieces, n});
      if (!moved.ok()) return Moved::kEnd;
      *sent = moved->bytes;
      return moved->bytes > 0 ? Moved::kBytes : Moved::kNothing;
    }
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

  bool flush() override {
    bool all = true;
    for (const TcpPeer& peer : peers_) {
      for (const int lane : {kDataLane, kPointLane}) {
        TlsStream* const tls = peer.tls[lane].get();
        if (tls == nullptr || !tls->pending()) continue;
        const StatusOr<TlsState> state = tls->flush();
        // The end of a broken connection is seen by the next that reads or writes.
        all = all && (!state.ok() || *state == TlsState::kDone);
      }
    }
    return all;
  }

  int control(int peer) const override { return fd(peer, kControlLane); }
  ssize_t hear(int peer, char* to, size_t bytes) override {
    TlsStream* const tls = tls_of(peer, kControlLane);
    if (tls == nullptr) return Streams::hear(peer, to, bytes);
    const StatusOr<TlsMoved> moved = tls->read({to, bytes}, kTlsTurn);
    if (moved.ok() && moved->bytes == 0 && moved->state != TlsState::kEnded) {
      errno = EAGAIN;
      return -1;
    }
    return moved.ok() ? static_cast<ssize_t>(moved->bytes) : 0;
  }
  void say(int peer, std::string_view message) override {
    TlsStream* const tls = tls_of(peer, kControlLane);
    if (tls == nullptr) return Streams::say(peer, message);
    const MutexLock lock(&say_mutex_);
    const auto at = static_cast<size_t>(peer);
    if (cut_short_[at]) return;
    const StatusOr<TlsMoved> moved = tls->write({&message, 1});
    // The peer would take the rest of another message for the rest of this one.
    cut_short_[at] = !moved.ok() || moved->bytes < message.size();
    if (moved.ok()) (void)tls->flush();
  }
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
  void poll_for(int peer, int lane, size_t to_read, bool to_write,
                std::vector<pollfd>* fds) override {
    const TlsStream* const tls = tls_of(peer, lane);
    if (tls == nullptr && lane == kDataLane && to_read > 0) set_low_water(peer, to_read);
    to_write = to_write || (tls != nullptr && tls->pending());
    const auto events = static_cast<short>((to_read > 0 ? POLLIN : 0) | (to_write ? POLLOUT : 0));
    if (events != 0 && fd(peer, lane) >= 0) fds->push_back({fd(peer, lane), events, 0});
  }

 private:
  int fd(int peer, int lane) const { return peers_[static_cast<size_t>(peer)].lanes[lane].get(); }

  TlsStream* tls_of(int peer, int lane) const {
    return peers_[static_cast<size_t>(peer)].tls[lane].get();
  }

  // A socket that ends, and one whose buffer is full, is readable below its low water, too.
  void set_low_water(int peer, size_t awaited) {
    const int wanted =
        awaited < kLeastAwaited ? 1 : static_cast<int>(std::min<size_t>(awaited, kPieceBytes));
    int& now = low_water_[static_cast<size_t>(peer)];
    if (now == wanted) return;
    now = wanted;
    setsockopt(fd(peer, kDataLane), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
  }

  const std::vector<TcpPeer> peers_;
  Mutex say_mutex_;
  std::vector<bool> cut_short_ ABSL_GUARDED_BY(say_mutex_);
  std::vector<int> low_water_;  // of the sockets for data
};

}  // namespace

std::unique_ptr<Streams> make_tcp_streams(std::vector<TcpPeer> peers) {
  return std::make_unique<TcpStreams>(std::move(peers));
}

StatusOr<std::unique_ptr<StreamLink>> make_tcp_link(const Membership& member,
                                                    std::vector<TcpPeer> peers,
                                                    std::shared_ptr<Runtime> runtime) {
  return make_stream_link(member, make_tcp_streams(std::move(peers)), std::move(runtime));
}

}  // namespace weft::internal
