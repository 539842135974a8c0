#include "weft/collectives/internal/schedule_sim.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace weft::internal {

ScheduleSim::ScheduleSim(int ranks, uint64_t element_bytes, const SimCost& cost)
    : element_bytes_(element_bytes), cost_(cost), ranks_(static_cast<size_t>(ranks)) {}

uint32_t ScheduleSim::pair_of(int from, int to) {
  const uint64_t key = static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to);
  const auto [it, is_new] = pair_numbers_.emplace(key, static_cast<uint32_t>(pairs_.size()));
  if (is_new) pairs_.push_back({from, to, 0, 0});
  return it->second;
}

uint16_t ScheduleSim::shape_of(Rank& rank, const std::vector<Move>& moves, uint64_t reduced,
                               std::unordered_multimap<uint64_t, uint16_t>& known) {
  const auto same = [&](uint16_t number) {
    const Shape& shape = rank.shapes[number];
    return shape.count == moves.size() && shape.reduced == reduced &&
           std::equal(moves.begin(), moves.end(), rank.moves.begin() + shape.begin,
                      [](const Move& a, const Move& b) {
                        return a.pair == b.pair && a.sends == b.sends && a.bytes == b.bytes;
                      });
  };
  // Most rounds are as the one before.
  if (!rank.rounds.empty() && same(rank.rounds.back())) return rank.rounds.back();
  uint64_t hash = reduced;
  for (const Move& move : moves) {
    hash =
        (hash ^ move.pair ^ (uint64_t{move.sends} << 40) ^ (move.bytes << 1)) * 0x9e3779b97f4a7c15u;
  }
  const auto [first, last] = known.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    if (same(it->second)) return it->second;
  }
  const auto number = static_cast<uint16_t>(rank.shapes.size());
  rank.shapes.push_back(
      {static_cast<uint32_t>(rank.moves.size()), static_cast<uint32_t>(moves.size()), reduced});
  rank.moves.insert(rank.moves.end(), moves.begin(), moves.end());
  known.emplace(hash, number);
  return number;
}

Status ScheduleSim::add(const Schedule& schedule) {
  const auto me = static_cast<int>(added_);
  Rank& rank = ranks_[added_++];
  rank.rounds.reserve(schedule.rounds.size());
  std::unordered_multimap<uint64_t, uint16_t> known;
  std::vector<Move> moves;
  for (const Round& round : schedule.rounds) {
    moves.clear();
    uint64_t reduced = 0;
    for (const Step& step : round.steps) {
      if (step.kind == Step::Kind::kCopy) continue;
      const uint64_t bytes = step.count * element_bytes_;
      const bool sends = step.kind == Step::Kind::kSend;
      moves.push_back({sends ? pair_of(me, step.peer) : pair_of(step.peer, me), sends, bytes});
      if (step.kind == Step::Kind::kReduce) reduced += bytes;
    }
    if (moves.empty()) continue;
    if (rank.shapes.size() > 0xfff0) {
      return make_error(ErrorKind::kResource,
                        absl::StrCat("the schedule of rank ", me,
                                     " has more than 65,520 different rounds; fewer ranks"));
    }
    rank.rounds.push_back(shape_of(rank, moves, reduced, known));
  }
  rank.moves.shrink_to_fit();
  rank.shapes.shrink_to_fit();
  return absl::OkStatus();
}

void ScheduleSim::enter_at(EventSim::Ticks when, int rank) {
  std::vector<int>& all = entering_[when];
  all.push_back(rank);
  if (all.size() > 1) return;
  sim_.at(when, [this, when] {
    const std::vector<int> now = std::move(entering_.extract(when).mapped());
    for (const int one : now) enter(one);
    begin_ready();
  });
}

void ScheduleSim::enter(int number) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  if (rank.next == rank.rounds.size()) {
    ++ended_;
    result_.ticks = std::max(result_.ticks, sim_.now());
    return;
  }
  const Shape& shape = rank.shapes[rank.rounds[rank.next]];
  rank.pending = shape.count;
  rank.ends = sim_.now();
  uint32_t sends = 0;
  for (uint32_t i = 0; i < shape.count; ++i) {
    const Move& move = rank.moves[shape.begin + i];
    Pair& pair = pairs_[move.pair];
    if (move.sends) pair.number = sends++;
    const bool meets = move.sends ? pair.balance < 0 : pair.balance > 0;
    pair.balance += move.sends ? 1 : -1;
    if (meets) ready_.push_back({pair.number, pair.from, pair.to, move.bytes});
  }
}

void ScheduleSim::begin_ready() {
  std::vector<Ready> now;
  now.swap(ready_);
  // A pair has one message at most that is ready at a tick, so no two are equal.
  const auto before = [](const Ready& a, const Ready& b) {
    return std::tie(a.number, a.from, a.to) < std::tie(b.number, b.from, b.to);
  };
  if (!std::is_sorted(now.begin(), now.end(), before)) std::sort(now.begin(), now.end(), before);
  for (const Ready& one : now) {
    Rank& from = ranks_[static_cast<size_t>(one.from)];
    Rank& to = ranks_[static_cast<size_t>(one.to)];
    const EventSim::Ticks begin = std::max({sim_.now(), from.send_free, to.receive_free});
    const bool local = one.from / cost_.ranks_per_host == one.to / cost_.ranks_per_host;
    const EventSim::Ticks end =
        begin + (local ? cost_.local_alpha : cost_.alpha) +
        static_cast<EventSim::Ticks>(one.bytes) * (local ? cost_.local_beta : cost_.beta);
    from.send_free = end;
    to.receive_free = end;
    ++result_.messages;
    result_.bytes += one.bytes;
    begun(one.from, end);
    begun(one.to, end);
  }
  now.clear();
  ready_.swap(now);  // its memory is of use in the next tick
}

void ScheduleSim::begun(int number, EventSim::Ticks end) {
  Rank& rank = ranks_[static_cast<size_t>(number)];
  rank.ends = std::max(rank.ends, end);
  if (--rank.pending > 0) return;
  const Shape& shape = rank.shapes[rank.rounds[rank.next]];
  ++rank.next;
  enter_at(rank.ends + static_cast<EventSim::Ticks>(shape.reduced) * cost_.gamma, number);
}

StatusOr<SimResult> ScheduleSim::run() {
  pair_numbers_ = {};
  for (size_t i = 0; i < ranks_.size(); ++i) enter_at(0, static_cast<int>(i));
  sim_.run();
  if (ended_ == ranks_.size()) return result_;
  std::string who;
  for (size_t i = 0; i < ranks_.size() && who.size() < 200; ++i) {
    const Rank& rank = ranks_[i];
    if (rank.next < rank.rounds.size()) absl::StrAppend(&who, " ", i, " in round ", rank.next);
  }
  return make_error(ErrorKind::kInternal, absl::StrCat("ranks wait for each other:", who));
}

}  // namespace weft::internal
