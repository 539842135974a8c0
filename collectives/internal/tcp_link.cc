#include "weft/collectives/internal/tcp_link.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include "weft/collectives/internal/point_reader.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/call_scope.h"
#include "weft/common/mutex.h"
#include "weft/proto/collectives.pb.h"

namespace weft::internal {
namespace {

// Looks at the sockets so often before it sleeps.
constexpr int kLooks = 20;
// Messages of send() that nobody has asked for yet: beyond it they stay in the kernel.
constexpr uint64_t kMaxParked = uint64_t{1} << 30;
constexpr uint32_t kMaxFault = 64 << 10;
constexpr size_t kMaxFaultText = 4096;

enum class Moved { kBytes, kNothing, kEnd };

std::string fault_bytes(const wire::GroupFault& fault) {
  const std::string body = fault.SerializeAsString();
  const auto length = static_cast<uint32_t>(body.size());
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + body;
}

class TcpLink : public Link {
 public:
  TcpLink(const Membership& member, std::vector<TcpPeer> peers, std::shared_ptr<Runtime> runtime,
          UniqueFd wake)
      : member_(member), runtime_(std::move(runtime)), wake_(std::move(wake)) {
    for (int peer = 0; peer < member.size; ++peer) {
      peers_.push_back(std::make_unique<Peer>(member, peer));
      for (int lane = 0; lane < kLanes; ++lane) {
        peers_.back()->fds[lane] = std::move(peers[static_cast<size_t>(peer)].lanes[lane]);
      }
    }
  }

  Status exchange(const Header& mine, absl::Span<const Outgoing> sends,
                  absl::Span<const Incoming> receives, absl::Time deadline) override {
    for (auto& peer : peers_) {
      peer->sends.clear();
      peer->receives.clear();
      peer->sent = 0;
    }
    size_t left = sends.size() + receives.size();
    for (const Outgoing& out : sends) {
      at(out.peer).sends.push_back(&out);
      messages_.fetch_add(1, std::memory_order_relaxed);
      bytes_.fetch_add(out.header.bytes, std::memory_order_relaxed);
    }
    for (const Incoming& in : receives) at(in.peer).receives.push_back(&in);
    return until(
        deadline, [&] { return left == 0; },
        [&](bool* moved) { return move_data(mine, &left, moved); },
        [&](std::vector<pollfd>* fds) {
          for (const auto& peer : peers_) {
            short events = 0;
            if (!peer->sends.empty()) events |= POLLOUT;
            // One whose next header is known has nothing more to say for now.
            if (!peer->receives.empty() || peer->header_got < sizeof(Header)) events |= POLLIN;
            if (events != 0 && peer->fds[kDataLane].valid() && !peer->data_ended) {
              fds->push_back({peer->fds[kDataLane].get(), events, 0});
            }
          }
        },
        [&] {
          std::vector<Awaited> awaited;
          for (const auto& peer : peers_) {
            if (!peer->receives.empty() || !peer->sends.empty()) {
              awaited.push_back({peer->rank, peer->last});
            }
          }
          return deadline_error(mine, awaited);
        });
  }

  Status send_points(absl::Span<const Outgoing> sends, absl::Time deadline) override {
    for (auto& peer : peers_) {
      peer->points.clear();
      peer->points_sent = 0;
    }
    size_t left = sends.size();
    for (const Outgoing& out : sends) {
      at(out.peer).points.push_back(&out);
      messages_.fetch_add(1, std::memory_order_relaxed);
      bytes_.fetch_add(out.header.bytes, std::memory_order_relaxed);
    }
    return until(
        deadline, [&] { return left == 0; },
        [&](bool* moved) {
          for (auto& peer : peers_) {
            WEFT_RETURN_IF_ERROR(
                write(*peer, kPointLane, &peer->points, &peer->points_sent, &left, moved));
          }
          // Whoever sends to us meanwhile must not wait for us.
          return read_points(moved);
        },
        [&](std::vector<pollfd>* fds) { poll_points(fds); },
        [&] {
          std::string text = "the time given is over; waited for room for a message to rank";
          for (const auto& peer : peers_) {
            if (!peer->points.empty()) cat_to(&text, " ", peer->rank);
          }
          return make_error(ErrorKind::kDeadline, text);
        });
  }

  StatusOr<PointMessage> receive_point(int peer, int32_t tag, absl::Time deadline) override {
    for (auto& one : peers_) one->points.clear();
    PointMessage out;
    bool found = false;
    const auto look = [&] {
      for (auto it = parked_.begin(); it != parked_.end(); ++it) {
        if ((peer >= 0 && it->peer != peer) || it->header.tag != tag) continue;
        out = std::move(*it);
        parked_bytes_ -= out.header.bytes;
        parked_.erase(it);
        found = true;
        return;
      }
    };
    look();
    WEFT_RETURN_IF_ERROR(until(
        deadline, [&] { return found; },
        [&](bool* moved) {
          WEFT_RETURN_IF_ERROR(read_points(moved));
          look();
          if (!found && peer >= 0 && at(peer).points_ended) return ended(at(peer));
          return absl::OkStatus();
        },
        [&](std::vector<pollfd>* fds) { poll_points(fds); },
        [&] {
          return make_error(
              ErrorKind::kDeadline,
              cat("the time given is over; waited for a message of ",
                  peer >= 0 ? cat("rank ", peer) : std::string("any rank"), ", tag ", tag));
        }));
    return out;
  }

  void fail(const Status& cause, uint64_t sequence) override {
    wire::GroupFault fault;
    fault.set_kind(static_cast<uint32_t>(error_kind(cause)));
    fault.set_text(std::string(cause.message().substr(0, kMaxFaultText)));
    fault.set_sequence(sequence);
    {
      MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
      failure_ = cause;
      tell_locked(fault_bytes(fault));
    }
    wake();
  }

  void leave() override {
    wire::GroupFault goodbye;
    goodbye.set_goodbye(true);
    MutexLock lock(&mutex_);
    tell_locked(fault_bytes(goodbye));
  }

  Traffic traffic() const override {
    return {messages_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed)};
  }

 private:
  struct Peer {
    Peer(const Membership& member, int rank_in)
        : rank(rank_in), reader(member.group, member.generation, rank_in) {}
    const int rank;
    UniqueFd fds[kLanes];

    std::deque<const Outgoing*> sends;
    uint64_t sent = 0;  // of the first, header included
    std::deque<const Incoming*> receives;
    Header header;  // the next one that this peer has sent, as far as it has come
    size_t header_got = 0;
    bool header_checked = false;
    uint64_t body_got = 0;
    Header last;
    bool data_ended = false;

    std::deque<const Outgoing*> points;
    uint64_t points_sent = 0;
    PointReader reader;
    bool points_ended = false;

    std::string control;
    bool control_ended = false;
    bool left = false;  // it said goodbye
  };

  Peer& at(int peer) { return *peers_[static_cast<size_t>(peer)]; }

  // Calls `move` until `done`; sleeps when nothing moves.
  template <class Done, class Move, class Fill, class Late>
  Status until(absl::Time deadline, Done done, Move move, Fill fill, Late late) {
    int looks = 0;
    while (true) {
      bool moved = false;
      WEFT_RETURN_IF_ERROR(own_failure());
      WEFT_RETURN_IF_ERROR(move(&moved));
      if (done()) return absl::OkStatus();
      if (moved) {
        looks = 0;
        continue;
      }
      WEFT_RETURN_IF_ERROR(read_control());
      const absl::Time now = runtime_->now();
      if (now >= deadline) return late();
      if (++looks < kLooks) {
        sched_yield();
        continue;
      }
      polled_.clear();
      polled_.push_back({wake_.get(), POLLIN, 0});
      for (const auto& peer : peers_) {
        if (peer->fds[kControlLane].valid() && !peer->control_ended) {
          polled_.push_back({peer->fds[kControlLane].get(), POLLIN, 0});
        }
      }
      fill(&polled_);
      BlockingRegion region;
      WEFT_RETURN_IF_ERROR(region.status());
      (void)poll(polled_.data(), polled_.size(), milliseconds_until(now, deadline));
    }
  }

  Status own_failure() {
    MutexLock lock(&mutex_);
    return failure_;
  }
  void wake() {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }
  // What the other side does not read is lost: it then hears of the end by that of the connection.
  void tell_locked(const std::string& bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const auto& peer : peers_) {
      if (!peer->fds[kControlLane].valid()) continue;
      (void)!::send(peer->fds[kControlLane].get(), bytes.data(), bytes.size(),
                    MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  // A connection of that peer is over: it left, or is gone.
  Status ended(Peer& peer) {
    // Its last words may be on their way on another connection.
    pollfd one = {peer.fds[kControlLane].get(), POLLIN, 0};
    if (!peer.control_ended && !peer.left) (void)poll(&one, 1, 100);
    WEFT_RETURN_IF_ERROR(read_control());
    if (peer.left) return peer_left(peer.rank);
    return peer_lost(peer.rank, "its connection ended");
  }

  Status read_control() {
    for (const auto& peer : peers_) {
      if (!peer->fds[kControlLane].valid() || peer->control_ended) continue;
      char buffer[4096];
      while (true) {
        const ssize_t n = recv(peer->fds[kControlLane].get(), buffer, sizeof buffer, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n > 0) peer->control.append(buffer, static_cast<size_t>(n));
        WEFT_RETURN_IF_ERROR(decode_control(*peer));
        if (n > 0) continue;
        peer->control_ended = true;
        if (!peer->left) return peer_lost(peer->rank, "its connection ended");
        break;
      }
    }
    return absl::OkStatus();
  }

  Status decode_control(Peer& peer) {
    while (true) {
      uint32_t length = 0;
      if (peer.control.size() < sizeof length) return absl::OkStatus();
      std::memcpy(&length, peer.control.data(), sizeof length);
      if (length > kMaxFault) return peer_lost(peer.rank, "it sent no fault of a member");
      if (peer.control.size() < sizeof length + length) return absl::OkStatus();
      wire::GroupFault fault;
      if (!fault.ParseFromArray(peer.control.data() + sizeof length, static_cast<int>(length))) {
        return peer_lost(peer.rank, "it sent no fault of a member");
      }
      peer.control.erase(0, sizeof length + length);
      if (!fault.goodbye()) return fault_of(peer.rank, fault.kind(), fault.text());
      peer.left = true;
    }
  }

  // As much as goes out now.
  Status write(Peer& peer, int lane, std::deque<const Outgoing*>* queue, uint64_t* sent,
               size_t* left, bool* moved) {
    while (!queue->empty()) {
      const Outgoing& out = *queue->front();
      iovec parts[2];
      size_t count = 0;
      if (*sent < sizeof(Header)) {
        parts[count++] = {const_cast<char*>(reinterpret_cast<const char*>(&out.header)) + *sent,
                          sizeof(Header) - *sent};
      }
      const uint64_t body = *sent > sizeof(Header) ? *sent - sizeof(Header) : 0;
      if (body < out.header.bytes) {
        parts[count++] = {const_cast<char*>(out.data) + body, out.header.bytes - body};
      }
      msghdr message = {};
      message.msg_iov = parts;
      message.msg_iovlen = count;
      const ssize_t n = sendmsg(peer.fds[lane].get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return absl::OkStatus();
        return ended(peer);
      }
      *moved = true;
      *sent += static_cast<uint64_t>(n);
      if (*sent < sizeof(Header) + out.header.bytes) continue;
      queue->pop_front();
      *sent = 0;
      --*left;
    }
    return absl::OkStatus();
  }

  Status move_data(const Header& mine, size_t* left, bool* moved) {
    for (const auto& peer : peers_) {
      if (!peer->fds[kDataLane].valid()) continue;
      WEFT_RETURN_IF_ERROR(write(*peer, kDataLane, &peer->sends, &peer->sent, left, moved));
      WEFT_RETURN_IF_ERROR(read_data(*peer, mine, left, moved));
    }
    return absl::OkStatus();
  }

  Moved read_some(int fd, char* to, size_t bytes, size_t* got) {
    while (true) {
      const ssize_t n = recv(fd, to, bytes, MSG_DONTWAIT);
      if (n > 0) {
        *got = static_cast<size_t>(n);
        return Moved::kBytes;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Moved::kNothing;
      return Moved::kEnd;
    }
  }

  Status read_data(Peer& peer, const Header& mine, size_t* left, bool* moved) {
    while (!peer.data_ended) {
      size_t got = 0;
      if (peer.header_got < sizeof(Header)) {
        char* const place = reinterpret_cast<char*>(&peer.header) + peer.header_got;
        const Moved what =
            read_some(peer.fds[kDataLane].get(), place, sizeof(Header) - peer.header_got, &got);
        if (what == Moved::kNothing) break;
        if (what == Moved::kEnd) {
          peer.data_ended = true;
          break;
        }
        *moved = true;
        peer.header_got += got;
        if (peer.header_got < sizeof(Header)) continue;
        WEFT_RETURN_IF_ERROR(
            check_origin(peer.header, member_.group, member_.generation, peer.rank));
      }
      if (peer.receives.empty()) {
        return check_ahead(peer.header, mine, peer.rank);
      }
      const Incoming& in = *peer.receives.front();
      if (!peer.header_checked) {
        WEFT_RETURN_IF_ERROR(check_expected(peer.header, in.expected, peer.rank));
        peer.header_checked = true;
      }
      if (peer.body_got < in.expected.bytes) {
        const Moved what = read_some(peer.fds[kDataLane].get(), in.data + peer.body_got,
                                     in.expected.bytes - peer.body_got, &got);
        if (what == Moved::kNothing) break;
        if (what == Moved::kEnd) {
          peer.data_ended = true;
          break;
        }
        *moved = true;
        peer.body_got += got;
        if (peer.body_got < in.expected.bytes) continue;
      }
      peer.last = peer.header;
      peer.header_got = 0;
      peer.header_checked = false;
      peer.body_got = 0;
      peer.receives.pop_front();
      --*left;
      *moved = true;
    }
    if (peer.data_ended && !peer.receives.empty()) return ended(peer);
    return absl::OkStatus();
  }

  void poll_points(std::vector<pollfd>* fds) {
    for (const auto& peer : peers_) {
      if (!peer->fds[kPointLane].valid() || peer->points_ended) continue;
      short events = parked_bytes_ < kMaxParked ? POLLIN : 0;
      if (!peer->points.empty()) events |= POLLOUT;
      if (events != 0) fds->push_back({peer->fds[kPointLane].get(), events, 0});
    }
  }

  Status read_points(bool* moved) {
    for (const auto& peer : peers_) {
      if (!peer->fds[kPointLane].valid()) continue;
      while (!peer->points_ended && parked_bytes_ < kMaxParked) {
        size_t room = 0;
        char* const place = peer->reader.place(&room);
        size_t got = 0;
        const Moved what = read_some(peer->fds[kPointLane].get(), place, room, &got);
        if (what == Moved::kNothing) break;
        if (what == Moved::kEnd) {
          peer->points_ended = true;
          break;
        }
        *moved = true;
        WEFT_RETURN_IF_ERROR(peer->reader.took(got));
        if (!peer->reader.whole()) continue;
        PointMessage message;
        message.peer = peer->rank;
        message.header = peer->reader.take(&message.body);
        parked_bytes_ += message.header.bytes;
        parked_.push_back(std::move(message));
      }
    }
    return absl::OkStatus();
  }

  const Membership member_;
  const std::shared_ptr<Runtime> runtime_;
  const UniqueFd wake_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<pollfd> polled_;
  std::deque<PointMessage> parked_;
  uint64_t parked_bytes_ = 0;
  std::atomic<uint64_t> messages_{0};
  std::atomic<uint64_t> bytes_{0};
  Mutex mutex_;
  Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

StatusOr<std::unique_ptr<Link>> make_tcp_link(const Membership& member, std::vector<TcpPeer> peers,
                                              std::shared_ptr<Runtime> runtime) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) {
    return make_error(ErrorKind::kResource, cat("no eventfd: ", system_error(errno)));
  }
  return std::unique_ptr<Link>(
      std::make_unique<TcpLink>(member, std::move(peers), std::move(runtime), std::move(wake)));
}

}  // namespace weft::internal
