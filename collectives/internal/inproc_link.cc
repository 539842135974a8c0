#include "weft/collectives/internal/inproc_link.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "weft/collectives/internal/awaited.h"
#include "weft/common/condition.h"
#include "weft/common/internal/text.h"

namespace weft::internal {

// One group in one generation. Messages of operations wait per sender, those of send() in the
// order of their arrival.
class InprocRoom {
 public:
  InprocRoom(std::shared_ptr<Runtime> runtime, int size) : runtime_(std::move(runtime)) {
    for (int i = 0; i < size; ++i) seats_.push_back(std::make_unique<Seat>(runtime_.get(), size));
  }

  struct Message {
    int from = 0;
    Header header;
    std::vector<char> body;
    absl::Time arrives;
  };
  struct Seat {
    Seat(Runtime* runtime, int size) : changed(runtime), from(static_cast<size_t>(size)) {}
    Condition changed;
    std::vector<std::deque<Message>> from;
    std::deque<Message> points;
    Header current;  // what this rank is in, or was last
    Status fault;
    bool here = true;
    uint64_t finished = 0;  // when it left
    bool killed = false;

    // The first one counts, unless the next one concerns operations before it.
    void take_fault(const Status& cause) {
      if (fault.ok() || since_of(cause) < since_of(fault)) fault = cause;
    }
    // The failure that concerns what has this position.
    Status fault_at(uint64_t position) const {
      return position >= since_of(fault) ? fault : absl::OkStatus();
    }
  };

  Mutex* mutex() ABSL_LOCK_RETURNED(mutex_) { return &mutex_; }
  Seat& seat(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return *seats_[static_cast<size_t>(rank)];
  }
  int size() const { return static_cast<int>(seats_.size()); }
  void wake_all_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const auto& seat : seats_) seat->changed.notify_all();
  }

  const std::shared_ptr<Runtime> runtime_;

 private:
  Mutex mutex_;
  std::vector<std::unique_ptr<Seat>> seats_;
};

namespace {

class InprocLink : public Link {
 public:
  InprocLink(std::shared_ptr<InprocFabricCore> fabric, std::shared_ptr<InprocRoom> room,
             const Membership& member)
      : fabric_(std::move(fabric)),
        room_(std::move(room)),
        member_(member),
        awaited_(member.size) {}

  Status exchange(const Header& mine, absl::Span<const Outgoing> sends,
                  absl::Span<const Incoming> receives, absl::Time deadline) override {
    WEFT_RETURN_IF_ERROR(post(sends, mine.sequence));
    size_t done = 0;
    taken_.assign(receives.size(), false);
    MutexLock lock(room_->mutex());
    room_->seat(member_.rank).current = mine;
    while (true) {
      InprocRoom::Seat& seat = room_->seat(member_.rank);
      const absl::Time now = room_->runtime_->now();
      absl::Time next = deadline;
      for (size_t i = 0; i < receives.size(); ++i) {
        if (taken_[i]) continue;
        const int peer = receives[i].peer;
        std::deque<InprocRoom::Message>& queue = seat.from[static_cast<size_t>(peer)];
        if (queue.empty()) {
          WEFT_RETURN_IF_ERROR(seat.fault_at(mine.sequence));
          WEFT_RETURN_IF_ERROR(still_there_locked(peer, mine.sequence));
          continue;
        }
        InprocRoom::Message& message = queue.front();
        if (!arrived(message, now, &next)) continue;
        WEFT_RETURN_IF_ERROR(check_origin(message.header, member_.group, member_.generation, peer));
        WEFT_RETURN_IF_ERROR(check_expected(message.header, receives[i].expected, peer));
        put(receives[i], message.body);
        queue.pop_front();
        taken_[i] = true;
        ++done;
      }
      // What has come in time is good, whatever went wrong behind it.
      if (done == receives.size()) return absl::OkStatus();
      WEFT_RETURN_IF_ERROR(seat.fault_at(mine.sequence));
      for (int peer = 0; peer < member_.size; ++peer) {
        const auto& queue = seat.from[static_cast<size_t>(peer)];
        if (queue.empty() || !arrived(queue.front(), now, &next)) continue;
        WEFT_RETURN_IF_ERROR(check_ahead(queue.front().header, mine, peer));
      }
      if (now >= deadline) return late_locked(mine, receives);
      for (size_t i = 0; i < receives.size(); ++i) {
        if (!taken_[i]) awaited_.set(receives[i].peer);
      }
      const Status waited = seat.changed.wait_until(room_->mutex(), next);
      awaited_.clear();
      if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return waited;
    }
  }

  Status send_points(absl::Span<const Outgoing> sends, absl::Time deadline) override {
    (void)deadline;
    return post(sends, kNoOperation);
  }

  StatusOr<PointMessage> receive_point(int peer, int32_t tag, absl::Time deadline) override {
    Header mine;
    mine.op = static_cast<uint8_t>(OpKind::kSend);
    mine.tag = tag;
    MutexLock lock(room_->mutex());
    while (true) {
      InprocRoom::Seat& seat = room_->seat(member_.rank);
      const absl::Time now = room_->runtime_->now();
      absl::Time next = deadline;
      WEFT_RETURN_IF_ERROR(seat.fault);
      for (auto it = seat.points.begin(); it != seat.points.end(); ++it) {
        if ((peer >= 0 && it->from != peer) || it->header.tag != tag) continue;
        if (!arrived(*it, now, &next)) continue;
        PointMessage out{it->from, it->header, std::move(it->body)};
        seat.points.erase(it);
        WEFT_RETURN_IF_ERROR(check_origin(out.header, member_.group, member_.generation, out.peer));
        return out;
      }
      if (peer >= 0) WEFT_RETURN_IF_ERROR(still_there_locked(peer, kNoOperation));
      if (now >= deadline) {
        return make_error(ErrorKind::kDeadline,
                          peer >= 0 ? "the time given is over; waited for a message of rank " +
                                          std::to_string(peer) + ", tag " + std::to_string(tag)
                                    : "the time given is over; waited for a message of any rank, "
                                      "tag " +
                                          std::to_string(tag));
      }
      if (peer >= 0) awaited_.set(peer);
      const Status waited = seat.changed.wait_until(room_->mutex(), next);
      awaited_.clear();
      if (!waited.ok() && error_kind(waited) != ErrorKind::kDeadline) return waited;
    }
  }

  std::vector<int> awaited() override { return awaited_.get(); }

  void fail(const Status& cause, uint64_t sequence) override {
    (void)sequence;
    MutexLock lock(room_->mutex());
    const uint64_t since = since_of(cause);
    InprocRoom::Seat& own = room_->seat(member_.rank);
    own.take_fault(cause);
    if (!own.killed) {
      const Status fault = fault_of(member_.rank, static_cast<uint32_t>(error_kind(cause)),
                                    std_view(cause.message()), since);
      for (int peer = 0; peer < member_.size; ++peer) {
        InprocRoom::Seat& seat = room_->seat(peer);
        if (peer != member_.rank && !seat.killed) seat.take_fault(fault);
      }
    }
    room_->wake_all_locked();
  }

  void leave(uint64_t finished) override {
    MutexLock lock(room_->mutex());
    room_->seat(member_.rank).here = false;
    room_->seat(member_.rank).finished = finished;
    room_->wake_all_locked();
  }

  Status look(uint64_t position) override {
    MutexLock lock(room_->mutex());
    WEFT_RETURN_IF_ERROR(room_->seat(member_.rank).fault_at(position));
    for (int peer = 0; peer < member_.size; ++peer) {
      const InprocRoom::Seat& seat = room_->seat(peer);
      const bool finished = !seat.killed && seat.finished >= position;
      if (!finished) WEFT_RETURN_IF_ERROR(still_there_locked(peer, position));
    }
    return absl::OkStatus();
  }

  std::vector<bool> gone() override {
    std::vector<bool> out;
    MutexLock lock(room_->mutex());
    for (int peer = 0; peer < member_.size; ++peer) {
      const InprocRoom::Seat& seat = room_->seat(peer);
      out.push_back(seat.killed || !seat.here);
    }
    return out;
  }

  Traffic traffic() const override {
    return {messages_.load(std::memory_order_relaxed), bytes_.load(std::memory_order_relaxed)};
  }

 private:
  static void put(const Incoming& in, const std::vector<char>& body) {
    if (body.empty()) return;
    if (in.taker == nullptr) {
      std::memcpy(in.data, body.data(), body.size());
      return;
    }
    for (uint64_t begin = 0; begin < body.size(); begin += kPieceBytes) {
      in.taker->take(begin, body.data() + begin, std::min(kPieceBytes, body.size() - begin));
    }
  }
  bool arrived(const InprocRoom::Message& message, absl::Time now, absl::Time* next) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(room_->mutex()) {
    if (fabric_->held(message.from, member_.rank)) return false;
    if (message.arrives <= now) return true;
    *next = std::min(*next, message.arrives);
    return false;
  }

  Status still_there_locked(int peer, uint64_t position)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(room_->mutex()) {
    const InprocRoom::Seat& seat = room_->seat(peer);
    if (seat.killed) return peer_lost(peer, "it was killed");
    if (!seat.here) return peer_left(peer, seat.finished, position);
    return absl::OkStatus();
  }

  Status late_locked(const Header& mine, absl::Span<const Incoming> receives)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(room_->mutex()) {
    // Who is not even in this operation; a neighbour may only wait for such a one itself.
    std::vector<Awaited> awaited;
    for (int peer = 0; peer < member_.size; ++peer) {
      const Header& current = room_->seat(peer).current;
      if (peer != member_.rank && current.sequence < mine.sequence) {
        awaited.push_back({peer, current});
      }
    }
    for (size_t i = 0; i < receives.size() && awaited.empty(); ++i) {
      if (!taken_[i]) awaited.push_back({receives[i].peer, mine});
    }
    return deadline_error(mine, awaited);
  }

  Status post(absl::Span<const Outgoing> sends, uint64_t position) {
    const bool points = position == kNoOperation;
    for (const Outgoing& out : sends) {
      InprocRoom::Message message;
      message.from = member_.rank;
      message.header = out.header;
      if (out.header.bytes > 0) message.body.assign(out.data, out.data + out.header.bytes);
      messages_.fetch_add(1, std::memory_order_relaxed);
      bytes_.fetch_add(out.header.bytes, std::memory_order_relaxed);
      message.arrives = fabric_->arrival();
      MutexLock lock(room_->mutex());
      InprocRoom::Seat& seat = room_->seat(out.peer);
      const InprocRoom::Seat& own = room_->seat(member_.rank);
      if (points || own.killed) WEFT_RETURN_IF_ERROR(own.fault);
      if (!seat.here || seat.killed) {
        WEFT_RETURN_IF_ERROR(own.fault_at(position));
        WEFT_RETURN_IF_ERROR(still_there_locked(out.peer, position));
      }
      auto& queue = points ? seat.points : seat.from[static_cast<size_t>(member_.rank)];
      // Of one sender nothing overtakes what was sent before.
      for (auto it = queue.rbegin(); it != queue.rend(); ++it) {
        if (it->from != member_.rank) continue;
        message.arrives = std::max(message.arrives, it->arrives);
        break;
      }
      queue.push_back(std::move(message));
      seat.changed.notify_all();
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<InprocFabricCore> fabric_;
  const std::shared_ptr<InprocRoom> room_;
  const Membership member_;
  AwaitedRanks awaited_;
  std::vector<bool> taken_;
  std::atomic<uint64_t> messages_{0};
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace

InprocFabricCore::InprocFabricCore(std::shared_ptr<Runtime> runtime,
                                   const InprocFabricOptions& options)
    : runtime_(std::move(runtime)),
      delay_max_(options.delay_max.value_or(runtime_->simulated() ? absl::Microseconds(200)
                                                                  : absl::ZeroDuration())) {}

std::unique_ptr<Link> InprocFabricCore::join(const Membership& member) {
  std::shared_ptr<InprocRoom> room;
  {
    MutexLock lock(&mutex_);
    for (auto it = rooms_.begin(); it != rooms_.end();) {
      it = it->second.expired() ? rooms_.erase(it) : std::next(it);
    }
    std::weak_ptr<InprocRoom>& place = rooms_[{member.group, member.generation}];
    room = place.lock();
    if (room == nullptr) {
      room = std::make_shared<InprocRoom>(runtime_, member.size);
      place = room;
    }
  }
  return std::make_unique<InprocLink>(shared_from_this(), std::move(room), member);
}

std::vector<std::shared_ptr<InprocRoom>> InprocFabricCore::rooms() const {
  std::vector<std::shared_ptr<InprocRoom>> out;
  MutexLock lock(&mutex_);
  for (const auto& [key, weak] : rooms_) {
    if (auto room = weak.lock(); room != nullptr) out.push_back(std::move(room));
  }
  return out;
}

void InprocFabricCore::kill(int rank) {
  for (const auto& room : rooms()) {
    if (rank >= room->size()) continue;
    MutexLock lock(room->mutex());
    InprocRoom::Seat& seat = room->seat(rank);
    seat.killed = true;
    if (seat.fault.ok()) {
      seat.fault = make_error(ErrorKind::kCancelled, "this member of the fabric was killed");
    }
    room->wake_all_locked();
  }
}

void InprocFabricCore::set_held(int from, int to, bool held) {
  {
    MutexLock lock(&mutex_);
    if (held) {
      held_.emplace(from, to);
    } else {
      held_.erase({from, to});
    }
  }
  for (const auto& room : rooms()) {
    MutexLock lock(room->mutex());
    room->wake_all_locked();
  }
}

bool InprocFabricCore::held(int from, int to) const {
  MutexLock lock(&mutex_);
  return held_.count({from, to}) > 0;
}

absl::Time InprocFabricCore::arrival() {
  if (delay_max_ <= absl::ZeroDuration()) return absl::InfinitePast();
  return runtime_->now() + delay_max_ * runtime_->random().unit();
}

int InprocFabricCore::members() const {
  int out = 0;
  for (const auto& room : rooms()) {
    MutexLock lock(room->mutex());
    for (int i = 0; i < room->size(); ++i) out += room->seat(i).here ? 1 : 0;
  }
  return out;
}

}  // namespace weft::internal

namespace weft {

InprocFabric::InprocFabric(std::shared_ptr<Runtime> runtime, const InprocFabricOptions& options)
    : core_(std::make_shared<internal::InprocFabricCore>(std::move(runtime), options)) {}
InprocFabric::~InprocFabric() = default;
void InprocFabric::kill(int rank) { core_->kill(rank); }
void InprocFabric::hold(int from, int to) { core_->set_held(from, to, true); }
void InprocFabric::release(int from, int to) { core_->set_held(from, to, false); }
int InprocFabric::members() const { return core_->members(); }

}  // namespace weft
