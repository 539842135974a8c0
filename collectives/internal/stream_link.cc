#include "weft/collectives/internal/stream_link.h"

#include <poll.h>
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
#include "weft/common/posix.h"
#include "weft/proto/collectives.pb.h"

namespace weft::internal {
namespace {

// Bytes of send() messages without a matching recv(); beyond it they stay in the kernel.
constexpr uint64_t kMaxParked = uint64_t{1} << 30;
constexpr uint32_t kMaxFault = 64 << 10;
constexpr size_t kMaxFaultText = 2048;
// Control sockets are asked every so many looks.
constexpr int kLooksPerControl = 64;

std::string fault_bytes(const wire::GroupFault& fault) {
  const std::string body = fault.SerializeAsString();
  const auto length = static_cast<uint32_t>(body.size());
  std::string out(sizeof length, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + body;
}

class StreamLinkImpl : public StreamLink {
 public:
  StreamLinkImpl(const Membership& member, std::unique_ptr<Streams> streams,
                 std::shared_ptr<Runtime> runtime, UniqueFd wake)
      : member_(member),
        runtime_(std::move(runtime)),
        streams_(std::move(streams)),
        wake_(std::move(wake)) {
    for (int peer = 0; peer < member.size; ++peer) {
      peers_.push_back(std::make_unique<Peer>(member, peer));
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
        deadline,
        [&](bool* moved) -> StatusOr<bool> {
          WEFT_RETURN_IF_ERROR(move_data(mine, &left, moved));
          return left == 0;
        },
        [&](std::vector<pollfd>* fds) {
          for (const auto& peer : peers_) {
            if (peer->rank == member_.rank || peer->data_ended) continue;
            // One whose next header is known has nothing more to say for now.
            streams_->poll_for(peer->rank, kDataLane,
                               !peer->receives.empty() || peer->header_got < sizeof(Header),
                               !peer->sends.empty(), fds);
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
        deadline,
        [&](bool* moved) -> StatusOr<bool> {
          for (auto& peer : peers_) {
            WEFT_RETURN_IF_ERROR(
                write(*peer, kPointLane, &peer->points, &peer->points_sent, &left, moved));
          }
          // A peer that sends to this rank at the same time must not wait for it.
          WEFT_RETURN_IF_ERROR(read_points(moved));
          return left == 0;
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
        deadline,
        [&](bool* moved) -> StatusOr<bool> {
          WEFT_RETURN_IF_ERROR(read_points(moved));
          look();
          if (!found && peer >= 0 && at(peer).points_ended) return ended(at(peer));
          return found;
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

  Status still_there(int peer) override {
    return at(peer).left ? peer_left(peer) : absl::OkStatus();
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

  // REQUIRES: no operation is under way.
  std::vector<bool> gone() override {
    // Reads what has come; the errors are known already.
    std::vector<bool> out;
    for (const auto& peer : peers_) {
      // Each error is one message less, or the end.
      constexpr int kMessages = 16;
      for (int i = 0; i < kMessages && !read_control_of(*peer).ok(); ++i) {
      }
      out.push_back(peer->left || peer->control_ended);
    }
    return out;
  }

  Traffic traffic() const override {
    return {messages_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed)};
  }

  Status until(absl::Time deadline, absl::FunctionRef<StatusOr<bool>(bool* moved)> done,
               absl::FunctionRef<void(std::vector<pollfd>*)> fill,
               absl::FunctionRef<Status()> late) override {
    int looks = 0;
    Nap nap(streams_.get());
    while (true) {
      if (looks % kLooksPerControl == 0) WEFT_RETURN_IF_ERROR(own_failure());
      bool moved = false;
      WEFT_ASSIGN_OR_RETURN(const bool is_done, done(&moved));
      if (is_done) return absl::OkStatus();
      if (moved) {
        looks = 0;
        nap.end();
        continue;
      }
      ++looks;
      if (looks < streams_->looks()) {
        if (looks % kLooksPerControl == 0) {
          WEFT_RETURN_IF_ERROR(read_control());
          if (runtime_->now() >= deadline) return late();
        }
        streams_->relax(looks);
        continue;
      }
      WEFT_RETURN_IF_ERROR(own_failure());
      WEFT_RETURN_IF_ERROR(read_control());
      const absl::Time now = runtime_->now();
      if (now >= deadline) return late();
      if (nap.begin()) continue;
      polled_.clear();
      polled_.push_back({wake_.get(), POLLIN, 0});
      for (const auto& peer : peers_) {
        const int fd = streams_->control(peer->rank);
        if (fd >= 0 && !peer->control_ended) polled_.push_back({fd, POLLIN, 0});
      }
      fill(&polled_);
      {
        BlockingRegion region;
        WEFT_RETURN_IF_ERROR(region.status());
        (void)poll(polled_.data(), polled_.size(), milliseconds_until(now, deadline));
      }
      nap.end();
    }
  }

 private:
  // Between begin_sleep() and end_sleep().
  class Nap {
   public:
    explicit Nap(Streams* streams) : streams_(streams) {}
    ~Nap() { end(); }
    Nap(const Nap&) = delete;
    Nap& operator=(const Nap&) = delete;
    // True: it has just begun, and one more look is due.
    bool begin() {
      if (begun_) return false;
      streams_->begin_sleep();
      return begun_ = true;
    }
    void end() {
      if (begun_) streams_->end_sleep();
      begun_ = false;
    }

   private:
    Streams* const streams_;
    bool begun_ = false;
  };

  struct Peer {
    Peer(const Membership& member, int rank_in)
        : rank(rank_in), reader(member.group, member.generation, rank_in) {}
    const int rank;
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
    bool control_reset = false;
    bool control_ended = false;
    bool left = false;  // it said goodbye
  };

  Peer& at(int peer) { return *peers_[static_cast<size_t>(peer)]; }

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
      const int fd = streams_->control(peer->rank);
      if (fd >= 0) (void)!::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  // A connection of that peer is over: it left, or is gone.
  Status ended(Peer& peer) {
    // Its last words may be on their way on another connection.
    pollfd one = {streams_->control(peer.rank), POLLIN, 0};
    if (!peer.control_ended && !peer.left) (void)poll(&one, 1, 100);
    WEFT_RETURN_IF_ERROR(read_control());
    if (peer.left) return peer_left(peer.rank);
    return peer_lost(peer.rank, "its connection ended");
  }

  Status read_control() {
    for (const auto& peer : peers_) WEFT_RETURN_IF_ERROR(read_control_of(*peer));
    return absl::OkStatus();
  }

  Status read_control_of(Peer& peer) {
    const int fd = streams_->control(peer.rank);
    if (fd < 0 || peer.control_ended) return absl::OkStatus();
    char buffer[4096];
    while (true) {
      const ssize_t n = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return absl::OkStatus();
      // Of a peer that closed a Unix socket with rings unread: told once, before what it wrote.
      if (n < 0 && errno == ECONNRESET && !std::exchange(peer.control_reset, true)) continue;
      if (n > 0) peer.control.append(buffer, static_cast<size_t>(n));
      WEFT_RETURN_IF_ERROR(decode_control(peer));
      if (n > 0) continue;
      peer.control_ended = true;
      return peer.left ? absl::OkStatus() : peer_lost(peer.rank, "its connection ended");
    }
  }

  Status decode_control(Peer& peer) {
    while (true) {
      uint32_t length = 0;
      if (peer.control.size() < sizeof length) return absl::OkStatus();
      std::memcpy(&length, peer.control.data(), sizeof length);
      if (length == 0) {  // a ring of a peer that saw this thread sleep
        peer.control.erase(0, sizeof length);
        continue;
      }
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
      size_t n = 0;
      const Moved what = streams_->write(peer.rank, lane, parts, count, &n);
      if (what == Moved::kNothing && !over(peer)) return absl::OkStatus();
      if (what != Moved::kBytes) return ended(peer);
      *moved = true;
      *sent += n;
      if (*sent < sizeof(Header) + out.header.bytes) continue;
      queue->pop_front();
      *sent = 0;
      --*left;
    }
    return absl::OkStatus();
  }

  Status move_data(const Header& mine, size_t* left, bool* moved) {
    for (const auto& peer : peers_) {
      if (peer->rank == member_.rank) continue;
      WEFT_RETURN_IF_ERROR(write(*peer, kDataLane, &peer->sends, &peer->sent, left, moved));
      WEFT_RETURN_IF_ERROR(read_data(*peer, mine, left, moved));
    }
    return absl::OkStatus();
  }

  // Asked when nothing was there: nothing more will come.
  bool over(const Peer& peer) const { return peer.left && streams_->goodbye_comes_last(); }

  Status read_data(Peer& peer, const Header& mine, size_t* left, bool* moved) {
    while (!peer.data_ended) {
      size_t got = 0;
      if (peer.header_got < sizeof(Header)) {
        char* const place = reinterpret_cast<char*>(&peer.header) + peer.header_got;
        const Moved what =
            streams_->read(peer.rank, kDataLane, place, sizeof(Header) - peer.header_got, &got);
        if (what == Moved::kNothing && !over(peer)) break;
        if (what != Moved::kBytes) {
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
        const Moved what = streams_->read(peer.rank, kDataLane, in.data + peer.body_got,
                                          in.expected.bytes - peer.body_got, &got);
        if (what == Moved::kNothing && !over(peer)) break;
        if (what != Moved::kBytes) {
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
      if (peer->rank == member_.rank || peer->points_ended) continue;
      streams_->poll_for(peer->rank, kPointLane, parked_bytes_ < kMaxParked, !peer->points.empty(),
                         fds);
    }
  }

  Status read_points(bool* moved) {
    for (const auto& peer : peers_) {
      if (peer->rank == member_.rank) continue;
      while (!peer->points_ended && parked_bytes_ < kMaxParked) {
        size_t room = 0;
        char* const place = peer->reader.place(&room);
        size_t got = 0;
        const Moved what = streams_->read(peer->rank, kPointLane, place, room, &got);
        if (what == Moved::kNothing && !over(*peer)) break;
        if (what != Moved::kBytes) {
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
  const std::unique_ptr<Streams> streams_;
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

int milliseconds_until(absl::Time now, absl::Time deadline) {
  const absl::Duration left = deadline - now;
  if (left >= absl::Milliseconds(100)) return 100;
  return static_cast<int>(std::max<int64_t>(1, absl::ToInt64Milliseconds(left)));
}

StatusOr<std::unique_ptr<StreamLink>> make_stream_link(const Membership& member,
                                                       std::unique_ptr<Streams> streams,
                                                       std::shared_ptr<Runtime> runtime) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) {
    return make_error(ErrorKind::kResource, cat("no eventfd: ", system_error(errno)));
  }
  return std::unique_ptr<StreamLink>(std::make_unique<StreamLinkImpl>(
      member, std::move(streams), std::move(runtime), std::move(wake)));
}

}  // namespace weft::internal
