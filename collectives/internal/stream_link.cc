#include "weft/collectives/internal/stream_link.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "weft/collectives/internal/awaited.h"
#include "weft/collectives/internal/stream_peer.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/call_scope.h"
#include "weft/common/mutex.h"
#include "weft/common/posix.h"
#include "weft/proto/collectives.pb.h"

namespace weft::internal {
namespace {

// Bytes of send() messages without a matching recv(); beyond it they stay in the kernel.
constexpr uint64_t kMaxParked = uint64_t{1} << 30;
constexpr size_t kMaxFaultText = 2048;
// Control sockets are asked every so many looks.
constexpr int kLooksPerControl = 64;
// How long a rank whose time is over waits to hear in which operation the others are.
constexpr absl::Duration kAnswers = absl::Milliseconds(100);
// How long the end of a link discards what peers go on to send.
constexpr absl::Duration kLinger = absl::Seconds(1);

class StreamLinkImpl : public StreamLink {
 public:
  StreamLinkImpl(const Membership& member, std::unique_ptr<Streams> streams,
                 std::shared_ptr<Runtime> runtime, UniqueFd wake)
      : member_(member),
        runtime_(std::move(runtime)),
        awaited_(member.size),
        streams_(std::move(streams)),
        wake_(std::move(wake)) {
    for (int peer = 0; peer < member.size; ++peer) {
      peers_.push_back(std::make_unique<StreamPeer>(member, peer));
    }
    polled_.reserve(1 + 3 * peers_.size());
  }

  ~StreamLinkImpl() override {
    // COLL-6: others may still read what this rank has sent of operations before its failure.
    const Status failure = own_failure();
    if (!failure.ok() && since_of(failure) == 0) return;
    const absl::Time until = runtime_->now() + kLinger;
    while (!streams_->drained() && runtime_->now() < until) (void)poll(nullptr, 0, 1);
  }

  Status exchange(const Header& mine, absl::Span<const Outgoing> sends,
                  absl::Span<const Incoming> receives, absl::Time deadline) override {
    current_ = mine;
    for (auto& peer : peers_) peer->begin_exchange();
    size_t left = sends.size() + receives.size();
    for (const Outgoing& out : sends) {
      at(out.peer).sends.messages.push_back(&out);
      messages_.fetch_add(1, std::memory_order_relaxed);
      bytes_.fetch_add(out.header.bytes, std::memory_order_relaxed);
    }
    for (const Incoming& in : receives) at(in.peer).receives.push_back(&in);
    return until(
        mine.sequence, deadline,
        [&](bool* moved) -> StatusOr<bool> {
          WEFT_RETURN_IF_ERROR(move_data(mine, &left, moved));
          return left == 0 && streams_->flush();
        },
        [&](std::vector<pollfd>* fds) {
          for (const auto& peer : peers_) {
            if (peer->rank == member_.rank || peer->data_ended) continue;
            // One whose next header is known has nothing more to say for now.
            streams_->poll_for(peer->rank, kDataLane, peer->awaited_bytes(),
                               !peer->sends.messages.empty(), fds);
          }
        },
        [&] { return late(mine); });
  }

  Status send_points(absl::Span<const Outgoing> sends, absl::Time deadline) override {
    for (auto& peer : peers_) peer->points.clear();
    size_t left = sends.size();
    for (const Outgoing& out : sends) {
      at(out.peer).points.messages.push_back(&out);
      messages_.fetch_add(1, std::memory_order_relaxed);
      bytes_.fetch_add(out.header.bytes, std::memory_order_relaxed);
    }
    return until(
        kNoOperation, deadline,
        [&](bool* moved) -> StatusOr<bool> {
          for (auto& peer : peers_) {
            if (!peer->write(*streams_, kPointLane, &peer->points, &left, moved)) {
              return ended(*peer, kNoOperation);
            }
          }
          // A peer that sends to this rank at the same time must not wait for it.
          WEFT_RETURN_IF_ERROR(read_points(moved));
          return left == 0 && streams_->flush();
        },
        [&](std::vector<pollfd>* fds) { poll_points(fds); },
        [&] {
          std::string text = "the time given is over; waited for room for a message to rank";
          for (const auto& peer : peers_) {
            if (!peer->points.messages.empty()) cat_to(&text, " ", peer->rank);
          }
          return make_error(ErrorKind::kDeadline, text);
        });
  }

  StatusOr<PointMessage> receive_point(int peer, int32_t tag, absl::Time deadline) override {
    for (auto& one : peers_) one->points.clear();
    point_from_ = peer;
    const absl::Cleanup from_none = [this] { point_from_ = -1; };
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
        kNoOperation, deadline,
        [&](bool* moved) -> StatusOr<bool> {
          // A second look would take the next message, and lose this one.
          if (found) return true;
          WEFT_RETURN_IF_ERROR(read_points(moved));
          look();
          if (!found && peer >= 0 && at(peer).points_ended) return ended(at(peer), kNoOperation);
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

  Status still_there(int peer, uint64_t position) override {
    const ControlLane& control = at(peer).control;
    return control.left() ? peer_left(peer, control.finished(), position) : absl::OkStatus();
  }

  void fail(const Status& cause, uint64_t sequence) override {
    wire::GroupFault fault;
    fault.set_kind(static_cast<uint32_t>(error_kind(cause)));
    fault.set_text(std::string(cause.message().substr(0, kMaxFaultText)));
    fault.set_sequence(sequence);
    fault.set_since(since_of(cause));
    {
      MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
      failure_ = cause;
      tell_locked(control_message(fault));
    }
    wake();
  }

  void leave(uint64_t finished) override {
    wire::GroupFault goodbye;
    goodbye.set_goodbye(true);
    goodbye.set_sequence(finished);
    MutexLock lock(&mutex_);
    tell_locked(control_message(goodbye));
  }

  Status look(uint64_t position) override {
    WEFT_RETURN_IF_ERROR(own_failure());
    WEFT_RETURN_IF_ERROR(read_control(position));
    for (const auto& peer : peers_) {
      if (peer->control.finished() < position) {
        WEFT_RETURN_IF_ERROR(still_there(peer->rank, position));
      }
    }
    return absl::OkStatus();
  }

  // REQUIRES: no operation is under way.
  std::vector<bool> gone() override {
    // Reads what has come; the errors are known already.
    std::vector<bool> out;
    for (const auto& peer : peers_) {
      // Each error is one message less, or the end.
      constexpr int kMessages = 16;
      for (int i = 0; i < kMessages && !read_control_of(*peer, 0).ok(); ++i) {
      }
      out.push_back(peer->control.left() || peer->control.ended());
    }
    return out;
  }

  Traffic traffic() const override {
    return {messages_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed)};
  }

  std::vector<int> awaited() override { return awaited_.get(); }

  Status until(uint64_t position, absl::Time deadline,
               absl::FunctionRef<StatusOr<bool>(bool* moved)> done,
               absl::FunctionRef<void(std::vector<pollfd>*)> fill,
               absl::FunctionRef<Status()> late) override {
    int looks = 0;
    const absl::Cleanup awaits_none = [this] { awaited_.clear(); };
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
          WEFT_RETURN_IF_ERROR(read_control(position));
          if (runtime_->now() >= deadline) return late();
        }
        if (looks > streams_->yields() && !may_yield(looks == streams_->yields() + 1)) {
          looks = streams_->looks();
          continue;
        }
        streams_->relax(looks);
        continue;
      }
      WEFT_RETURN_IF_ERROR(own_failure());
      WEFT_RETURN_IF_ERROR(read_control(position));
      const absl::Time now = runtime_->now();
      if (now >= deadline) return late();
      if (nap.begin()) continue;
      polled_.clear();
      polled_.push_back({wake_.get(), POLLIN, 0});
      for (const auto& peer : peers_) {
        const int fd = streams_->control(peer->rank);
        if (fd >= 0 && !peer->control.ended()) polled_.push_back({fd, POLLIN, 0});
      }
      fill(&polled_);
      note_awaited();
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

  // Note [Yields]. Where a rank has a core to itself, or shares it with other ranks of the group, a
  // yield costs less than a microsecond, and what is awaited comes sooner than by a wake-up. Where
  // another program wants the core, a yield gives away a time slice, several milliseconds; a thread
  // that sleeps gets its core back as soon as it is woken. So a thread that waits for longer than
  // kPatience sleeps, and after a yield of more than kSlice it yields no more for a while.
  bool may_yield(bool first) {
    constexpr absl::Duration kPatience = absl::Microseconds(200);
    constexpr absl::Duration kSlice = absl::Microseconds(100);
    constexpr absl::Duration kBackOff = absl::Milliseconds(100);
    const absl::Time now = runtime_->now();
    if (first) {
      yielding_ = yielded_ = now;
      return now >= yields_again_;
    }
    if (now - yielded_ > kSlice) yields_again_ = now + kBackOff;
    yielded_ = now;
    return now - yielding_ <= kPatience && now >= yields_again_;
  }

  void note_awaited() {
    awaited_.clear();
    for (const auto& peer : peers_) {
      const bool awaits = !peer->receives.empty() || !peer->sends.messages.empty() ||
                          !peer->points.messages.empty() || peer->rank == point_from_;
      if (awaits) awaited_.set(peer->rank);
    }
  }

  StreamPeer& at(int peer) { return *peers_[static_cast<size_t>(peer)]; }

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
      if (streams_->control(peer->rank) >= 0) streams_->say(peer->rank, bytes);
    }
  }

  // A connection of that peer is over: it left, or is gone.
  Status ended(StreamPeer& peer, uint64_t position) {
    // Its last words may be on their way on another connection.
    pollfd one = {streams_->control(peer.rank), POLLIN, 0};
    if (!peer.control.ended() && !peer.control.left()) (void)poll(&one, 1, 100);
    WEFT_RETURN_IF_ERROR(read_control(position));
    WEFT_RETURN_IF_ERROR(still_there(peer.rank, position));
    return peer_lost(peer.rank, "its connection ended");
  }

  Status read_control(uint64_t position) {
    for (const auto& peer : peers_) WEFT_RETURN_IF_ERROR(read_control_of(*peer, position));
    return absl::OkStatus();
  }
  Status read_control_of(StreamPeer& peer, uint64_t position) {
    return peer.control.read(*streams_, current_, position);
  }

  Status move_data(const Header& mine, size_t* left, bool* moved) {
    for (const auto& peer : peers_) {
      if (peer->rank == member_.rank) continue;
      if (!peer->write(*streams_, kDataLane, &peer->sends, left, moved)) {
        return ended(*peer, mine.sequence);
      }
      WEFT_RETURN_IF_ERROR(peer->read_data(*streams_, member_, mine, left, moved));
      if (peer->data_ended && !peer->receives.empty()) return ended(*peer, mine.sequence);
    }
    return absl::OkStatus();
  }

  // The error of a deadline. A neighbour that this rank waits for may itself wait for another one,
  // so all are asked where they are: a thread in an operation answers. Who does not answer, or is in
  // an earlier operation, is behind.
  Status late(const Header& mine) {
    wire::GroupFault question;
    question.set_asks(true);
    for (const auto& peer : peers_) peer->control.forget_answer();
    {
      MutexLock lock(&mutex_);
      tell_locked(control_message(question));
    }
    const auto behind = [&](const StreamPeer& peer) {
      const std::optional<Header>& answer = peer.control.answer();
      return peer.rank != member_.rank && (!answer.has_value() || answer->sequence < mine.sequence);
    };
    const auto answered = [&](const std::unique_ptr<StreamPeer>& peer) {
      return peer->rank == member_.rank || peer->control.ended() || peer->control.answer();
    };
    const absl::Time until = runtime_->now() + kAnswers;
    while (!std::all_of(peers_.begin(), peers_.end(), answered)) {
      const absl::Time now = runtime_->now();
      if (now >= until) break;
      polled_.clear();
      for (const auto& peer : peers_) {
        const int fd = streams_->control(peer->rank);
        if (fd >= 0 && !peer->control.ended()) polled_.push_back({fd, POLLIN, 0});
      }
      (void)poll(polled_.data(), polled_.size(), milliseconds_until(now, until));
      WEFT_RETURN_IF_ERROR(own_failure());
      WEFT_RETURN_IF_ERROR(read_control(mine.sequence));
    }
    std::vector<Awaited> awaited;
    for (const auto& peer : peers_) {
      if (behind(*peer))
        awaited.push_back({peer->rank, peer->control.answer().value_or(peer->last)});
    }
    if (awaited.empty()) {
      for (const auto& peer : peers_) {
        if (!peer->receives.empty() || !peer->sends.messages.empty()) {
          awaited.push_back({peer->rank, peer->last});
        }
      }
    }
    return deadline_error(mine, awaited);
  }

  void poll_points(std::vector<pollfd>* fds) {
    for (const auto& peer : peers_) {
      if (peer->rank == member_.rank || peer->points_ended) continue;
      streams_->poll_for(peer->rank, kPointLane, parked_bytes_ < kMaxParked ? 1 : 0,
                         !peer->points.messages.empty(), fds);
    }
  }

  Status read_points(bool* moved) {
    for (const auto& peer : peers_) {
      if (peer->rank == member_.rank) continue;
      WEFT_RETURN_IF_ERROR(
          peer->read_points(*streams_, kMaxParked, &parked_, &parked_bytes_, moved));
    }
    return absl::OkStatus();
  }

  const Membership member_;
  const std::shared_ptr<Runtime> runtime_;
  AwaitedRanks awaited_;
  const std::unique_ptr<Streams> streams_;
  const UniqueFd wake_;
  std::vector<std::unique_ptr<StreamPeer>> peers_;
  Header current_;  // the operation that this rank is in, or was last
  std::vector<pollfd> polled_;
  absl::Time yielding_;  // since when; of this wait
  absl::Time yielded_;   // when last
  absl::Time yields_again_ = absl::InfinitePast();
  int point_from_ = -1;  // the rank whose send() this rank waits for
  std::deque<PointMessage> parked_;
  uint64_t parked_bytes_ = 0;
  std::atomic<uint64_t> messages_{0};
  std::atomic<uint64_t> bytes_{0};
  Mutex mutex_;
  Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

ssize_t Streams::hear(int peer, char* to, size_t bytes) {
  return recv(control(peer), to, bytes, MSG_DONTWAIT);
}

void Streams::say(int peer, std::string_view message) {
  (void)!::send(control(peer), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

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
