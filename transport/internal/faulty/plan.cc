#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/common/internal/text.h"
#include "weft/transport/faulty_transport.h"

namespace weft {
namespace {

using internal::view;

constexpr size_t kKeptLines = 1000;

uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15u + (h << 6) + (h >> 2);
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

// The same in every process and with every standard library.
uint64_t mix(uint64_t h, std::string_view text) {
  for (const char c : text) h = mix(h, static_cast<unsigned char>(c));
  return mix(h, text.size());
}

bool handshake(FrameKind kind) { return kind == FrameKind::kHello || kind == FrameKind::kHelloAck; }

}  // namespace

std::string_view fault_name(Fault fault) {
  switch (fault) {
    case Fault::kNone: return "none";
    case Fault::kFailBefore: return "fail_before";
    case Fault::kLoseUnsent: return "lose_unsent";
    case Fault::kFailAfter: return "fail_after";
    case Fault::kCut: return "cut";
    case Fault::kDrop: return "drop";
    case Fault::kDelay: return "delay";
    case Fault::kReorder: return "reorder";
    case Fault::kDuplicate: return "duplicate";
    case Fault::kTruncate: return "truncate";
    case Fault::kFlipByte: return "flip_byte";
  }
  return "unknown";
}

int FaultPlan::add(FaultRule rule) {
  MutexLock lock(&mutex_);
  rules_.emplace(++next_id_, std::move(rule));
  return next_id_;
}

void FaultPlan::remove(int id) {
  MutexLock lock(&mutex_);
  rules_.erase(id);
}

void FaultPlan::clear() {
  MutexLock lock(&mutex_);
  rules_.clear();
}

int64_t FaultPlan::hits(int id) const {
  MutexLock lock(&mutex_);
  auto it = hits_.find(id);
  return it == hits_.end() ? 0 : it->second;
}

int64_t FaultPlan::hits() const {
  MutexLock lock(&mutex_);
  int64_t sum = 0;
  for (const auto& [id, n] : hits_) sum += n;
  return sum;
}

std::string FaultPlan::log() const {
  MutexLock lock(&mutex_);
  return absl::StrJoin(log_, "\n");
}

FaultPlan::Decision FaultPlan::decide(std::string_view from, std::string_view to, FrameKind kind,
                                      size_t bytes, bool at_receiver) {
  MutexLock lock(&mutex_);
  const Link link{std::string(from), std::string(to)};
  const uint64_t index = index_[{link, kind, at_receiver}]++;
  uint64_t& passed = bytes_[{link, at_receiver}];
  passed += bytes;
  for (const auto& [id, rule] : rules_) {
    if (rule.at_receiver != at_receiver) continue;
    if (rule.kind.has_value() ? *rule.kind != kind : handshake(kind)) continue;
    if ((!rule.from.empty() && rule.from != from) || (!rule.to.empty() && rule.to != to)) continue;
    if (passed < rule.after_bytes) continue;
    if (matched_[{id, link}]++ < rule.skip) continue;
    if (hit_on_link_[{id, link}] >= rule.times) continue;
    uint64_t random =
        mix(mix(mix(mix(seed_, static_cast<uint64_t>(id)), from), to), static_cast<uint64_t>(kind));
    random = mix(random, index);
    if (static_cast<double>(random >> 11) * 0x1.0p-53 >= rule.probability) continue;
    ++hit_on_link_[{id, link}];
    ++hits_[id];
    if (log_.size() < kKeptLines) {
      log_.push_back(absl::StrCat("rule ", id, " ", view(fault_name(rule.fault)), ": ", link.first,
                                  " -> ", link.second, " ", view(frame_kind_name(kind)), " #",
                                  index, at_receiver ? " at its receiver" : ""));
    }
    return {rule.fault, rule.delay, mix(random, 1)};
  }
  return {};
}

}  // namespace weft
