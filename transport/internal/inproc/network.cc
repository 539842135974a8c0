#include <algorithm>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/internal/inproc/core.h"

namespace weft::internal {

bool means(std::string_view who, const InprocEndpoint& endpoint) {
  return who.empty() || who == endpoint.worker || (who == endpoint.address);
}

std::string endpoint_name(const InprocEndpoint& endpoint) {
  return endpoint.worker.empty() ? absl::StrCat("#", endpoint.number) : endpoint.worker;
}

InprocCore::InprocCore(const InprocOptions& options) : options_(options) {
  random_state_ = options.seed;
}

uint64_t InprocCore::draw_locked() {
  random_state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = random_state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

absl::Duration InprocCore::draw_delay_locked(const InprocEndpoint& to) {
  const bool simulated = to.runtime->simulated();
  const absl::Duration low =
      options_.delay_min.value_or(simulated ? absl::Microseconds(10) : absl::ZeroDuration());
  const absl::Duration high =
      std::max(low, options_.delay_max.value_or(simulated ? absl::Microseconds(500) : low));
  const int64_t range = absl::ToInt64Nanoseconds(high - low);
  if (range <= 0) return low;
  return low + absl::Nanoseconds(static_cast<int64_t>(draw_locked() % (range + 1)));
}

void InprocCore::note_locked(Note note) {
  if (options_.keep_frames == 0) return;
  notes_.push_back(std::move(note));
  if (notes_.size() > options_.keep_frames) notes_.pop_front();
}

void InprocCore::note_locked(std::string text) {
  Note note;
  note.text = std::move(text);
  note_locked(std::move(note));
}

void InprocCore::count_locked(const InprocLink& link, int to, const InprocPacket& packet,
                              Fate fate) {
  if (packet.type == InprocPacket::Type::kFrame) {
    FrameCount& count = (*link.counts[to])[static_cast<size_t>(packet.kind) & 15];
    ++(fate == Fate::kSent ? count.sent : fate == Fate::kDelivered ? count.delivered : count.lost);
  }
  if (options_.keep_frames == 0) return;
  const InprocEndpoint& target = *link.side[to].endpoint;
  Note note;
  note.at = target.runtime->now();
  note.link = link.id;
  note.from = endpoint_name(*link.side[1 - to].endpoint);
  note.to = endpoint_name(target);
  note.packet.type = packet.type;
  note.packet.kind = packet.kind;
  note.packet.lane = packet.lane;
  note.packet.sequence = packet.sequence;
  note.header_bytes = packet.header.size();
  note.payload_bytes = packet.payload.size();
  note.what = fate == Fate::kSent ? "sent" : fate == Fate::kDelivered ? "delivered" : "lost";
  note_locked(std::move(note));
}

std::string InprocCore::dump() const {
  MutexLock lock(&mutex_);
  std::string out;
  for (const Note& n : notes_) {
    if (!n.text.empty()) {
      absl::StrAppend(&out, n.text, "\n");
      continue;
    }
    const std::string_view name = n.packet.type == InprocPacket::Type::kFrame
                                      ? frame_kind_name(n.packet.kind)
                                      : std::string_view("end of the connection");
    absl::StrAppend(&out, absl::FormatTime("%H:%M:%E6S", n.at, absl::UTCTimeZone()), " link ",
                    n.link, " ", n.from, " -> ", n.to, " lane ", n.packet.lane, " #",
                    n.packet.sequence, " ", view(name), " header ", n.header_bytes);
    absl::StrAppend(&out, " payload ", n.payload_bytes, " ", n.what, "\n");
  }
  return out;
}

FrameCount InprocCore::count(FrameKind kind, std::string_view from, std::string_view to) const {
  MutexLock lock(&mutex_);
  FrameCount sum;
  for (const auto& [ends, counts] : counts_) {
    if ((!from.empty() && from != ends.first) || (!to.empty() && to != ends.second)) continue;
    const FrameCount& count = counts[static_cast<size_t>(kind) & 15];
    sum.sent += count.sent;
    sum.delivered += count.delivered;
    sum.lost += count.lost;
  }
  return sum;
}

int InprocCore::connections(std::string_view a, std::string_view b) const {
  MutexLock lock(&mutex_);
  int n = 0;
  for (const auto& [id, link] : links_) {
    const InprocSide* s = link->side;
    const bool between = (means(a, *s[0].endpoint) && means(b, *s[1].endpoint)) ||
                         (means(b, *s[0].endpoint) && means(a, *s[1].endpoint));
    if (between && ((s[0].open && !s[0].ended) || (s[1].open && !s[1].ended))) ++n;
  }
  return n;
}

void InprocCore::set_delay(absl::Duration min, absl::Duration max) {
  MutexLock lock(&mutex_);
  options_.delay_min = min;
  options_.delay_max = max;
}

const InprocCore::Rule* InprocCore::blocked_locked(const InprocEndpoint& from,
                                                   const InprocEndpoint& to) const {
  for (const Rule& rule : rules_) {
    if (means(rule.from, from) && means(rule.to, to)) return &rule;
    if (rule.partition && means(rule.to, from) && means(rule.from, to)) return &rule;
  }
  return nullptr;
}

void InprocCore::block(std::string_view from, std::string_view to, bool partition) {
  MutexLock lock(&mutex_);
  note_locked(absl::StrCat(partition ? "partition " : "hold ", view(from), " ", view(to)));
  rules_.push_back({std::string(from), std::string(to), partition});
}

void InprocCore::unblock(std::string_view from, std::string_view to, bool partition) {
  MutexLock lock(&mutex_);
  note_locked(absl::StrCat(partition ? "heal " : "release ", view(from), " ", view(to)));
  const Rule rule{std::string(from), std::string(to), partition};
  const Rule reverse{std::string(to), std::string(from), partition};
  rules_.erase(
      std::remove_if(rules_.begin(), rules_.end(),
                     [&](const Rule& r) { return r == rule || (partition && r == reverse); }),
      rules_.end());
  release_locked();
}

void InprocCore::release_locked() {
  for (const auto& [id, link] : links_) {
    for (int to = 0; to < 2; ++to) {
      InprocSide& side = link->side[to];
      if (blocked_locked(*link->side[1 - to].endpoint, *side.endpoint) != nullptr) continue;
      std::deque<InprocPacket> held;
      held.swap(side.held);
      for (InprocPacket& packet : held) depart_locked(link, to, std::move(packet));
    }
  }
}

int InprocCore::cut(std::string_view a, std::string_view b) {
  MutexLock lock(&mutex_);
  note_locked(absl::StrCat("cut ", view(a), " ", view(b)));
  int n = 0;
  const std::map<uint64_t, LinkRef> links = links_;
  for (const auto& [id, link] : links) {
    const InprocEndpoint& x = *link->side[0].endpoint;
    const InprocEndpoint& y = *link->side[1].endpoint;
    if (link->broken || !((means(a, x) && means(b, y)) || (means(b, x) && means(a, y)))) continue;
    ++n;
    break_locked(link,
                 make_error(ErrorKind::kUnavailable,
                            absl::StrCat("the connection to ", endpoint_name(y), " was cut")),
                 make_error(ErrorKind::kUnavailable,
                            absl::StrCat("the connection from ", endpoint_name(x), " was cut")));
  }
  return n;
}

void InprocCore::refuse_connects(std::string_view worker, bool refuse) {
  MutexLock lock(&mutex_);
  note_locked(absl::StrCat(refuse ? "refuse dials to " : "accept dials to ", view(worker)));
  if (refuse) {
    refusing_.insert(std::string(worker));
  } else {
    refusing_.erase(std::string(worker));
  }
}

void InprocCore::kill(std::string_view worker) {
  MutexLock lock(&mutex_);
  note_locked(absl::StrCat("kill ", view(worker)));
  for (const auto& [number, endpoint] : endpoints_) {
    if (endpoint->killed || !means(worker, *endpoint)) continue;
    endpoint->killed = true;
    const std::map<uint64_t, LinkRef> links = links_;
    for (const auto& [id, link] : links) {
      for (int dead = 0; dead < 2; ++dead) {
        InprocSide& other = link->side[1 - dead];
        if (link->side[dead].endpoint != endpoint || other.ended) continue;
        // What the dead had sent may still arrive, or not.
        if (draw_locked() % 2 == 0) link->broken = true;
        const Status why =
            make_error(ErrorKind::kUnavailable,
                       absl::StrCat("the connection to ", endpoint_name(*endpoint), " was lost"));
        finish_later_locked(link, 1 - dead, why);
      }
    }
  }
}

}  // namespace weft::internal

namespace weft {

InprocNetwork::InprocNetwork(const InprocOptions& options)
    : core_(std::make_shared<internal::InprocCore>(options)) {}
InprocNetwork::~InprocNetwork() = default;

FrameCount InprocNetwork::count(FrameKind kind, std::string_view from, std::string_view to) const {
  return core_->count(kind, from, to);
}
int InprocNetwork::connections(std::string_view a, std::string_view b) const {
  return core_->connections(a, b);
}
std::string InprocNetwork::dump() const { return core_->dump(); }
void InprocNetwork::set_delay(absl::Duration min, absl::Duration max) {
  core_->set_delay(min, max);
}
void InprocNetwork::hold(std::string_view from, std::string_view to) {
  core_->block(from, to, false);
}
void InprocNetwork::release(std::string_view from, std::string_view to) {
  core_->unblock(from, to, false);
}
void InprocNetwork::partition(std::string_view a, std::string_view b) { core_->block(a, b, true); }
void InprocNetwork::heal(std::string_view a, std::string_view b) { core_->unblock(a, b, true); }
int InprocNetwork::cut(std::string_view a, std::string_view b) { return core_->cut(a, b); }
void InprocNetwork::refuse_connects(std::string_view worker, bool refuse) {
  core_->refuse_connects(worker, refuse);
}
void InprocNetwork::kill(std::string_view worker) { core_->kill(worker); }

}  // namespace weft
