#include "weft/collectives/internal/engine.h"

#include <algorithm>
#include <cstring>

#include "weft/collectives/internal/reduce.h"

namespace weft::internal {
namespace {

// Below it the number of messages decides, above it their bytes.
constexpr uint64_t kSmall = 64 << 10;
constexpr uint64_t kMiddle = 512 << 10;
// So many hosts at most have a ring of fewer steps than the doubling of all ranks, or hardly more.
constexpr int kFewHosts = 8;

}  // namespace

Algorithm choose_all_reduce(uint64_t bytes, int size, const Topology& topology) {
  const int hosts = topology.hosts();
  // Inside a host a message costs little.
  if (hosts > 1 && hosts < size && (bytes > kSmall || hosts <= kFewHosts)) {
    return Algorithm::kHierarchicalRing;
  }
  if (bytes <= kSmall) return Algorithm::kRecursiveDoubling;
  if (bytes <= kMiddle || size == 2) return Algorithm::kHalvingDoubling;
  return Algorithm::kRing;
}

Algorithm choose_algorithm(OpKind op, uint64_t bytes, int size, const Topology& topology) {
  // Where some ranks share hosts, rings and trees in the order of the ranks cross the fewest borders.
  const int hosts = topology.hosts();
  const bool alike = size > 2 && (hosts == 1 || hosts == size);
  const bool small = alike && bytes <= kSmall;
  switch (op) {
    case OpKind::kBroadcast:
      return alike && bytes > kMiddle ? Algorithm::kScatterAllGather : Algorithm::kBinomialTree;
    case OpKind::kAllGather: return small ? Algorithm::kRecursiveDoubling : Algorithm::kRing;
    case OpKind::kReduceScatter: return small ? Algorithm::kRecursiveHalving : Algorithm::kRing;
    default: return Algorithm::kAuto;
  }
}

uint64_t hash_of(const Blocks& blocks) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int i = 0; i < blocks.count(); ++i) {
    hash = (hash ^ blocks.length(i)) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash | 1;
}

Header Engine::header(const Turn& turn, OpKind op, ElementType type, uint64_t count) const {
  Header out;
  out.op = static_cast<uint8_t>(op);
  out.type = static_cast<uint8_t>(type);
  out.group = member_.group;
  out.generation = member_.generation;
  out.sequence = turn.sequence;
  out.count = count;
  return out;
}

Header Engine::reducing(const Turn& turn, OpKind op, ElementType type, uint64_t count,
                        ReduceOp reduction) const {
  Header out = header(turn, op, type, count);
  out.reduction = reduction.kind();
  return out;
}

char* Engine::scratch(uint64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_.reset();
    scratch_.reset(new char[bytes]);  // not cleared
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

void Engine::before_reduce(ElementType type, ReduceOp op, char* data, uint64_t elements) const {
  if (op.kind() == ReduceOp::kPremulSum) multiply(type, data, data, elements, op.factor());
  if (op.kind() == ReduceOp::kAvg && divides_first(type)) {
    divide(type, data, elements, static_cast<uint64_t>(member_.size));
  }
}

void Engine::after_reduce(ElementType type, ReduceOp op, char* data, uint64_t elements) const {
  if (op.kind() == ReduceOp::kAvg && !divides_first(type)) {
    divide(type, data, elements, static_cast<uint64_t>(member_.size));
  }
}

Status Engine::run(const Turn& turn, const Header& mine, const Schedule& schedule, char* work,
                   const char* input) {
  note_.set_algorithm(mine.algorithm != 0 ? algorithm_name(mine.algorithm)
                                          : schedule_name(mine.op));
  for (const Round& round : schedule.rounds) {
    WEFT_RETURN_IF_ERROR(run_round(turn, mine, round, work, input));
  }
  return absl::OkStatus();
}

namespace {

// Whether step `i` alone is reduced into its place, so that its pieces need not wait for others'.
bool alone(const Round& round, size_t i) {
  const Step& step = round.steps[i];
  const auto same = [&step](const Step& other) {
    return other.kind == Step::Kind::kReduce && other.begin == step.begin &&
           other.count == step.count;
  };
  return (i == 0 || !same(round.steps[i - 1])) &&
         (i + 1 == round.steps.size() || !same(round.steps[i + 1]));
}

// Whether the round sends from where `step` reduces into: the elements must stay until they are sent.
bool is_sent(const Round& round, const Step& step) {
  return std::any_of(round.steps.begin(), round.steps.end(), [&step](const Step& other) {
    return other.kind == Step::Kind::kSend && other.from == Buffer::kWork &&
           other.begin < step.begin + step.count && step.begin < other.begin + other.count;
  });
}

}  // namespace

bool Engine::in_pieces(const Round& round, size_t i, uint64_t size) {
  const Step& step = round.steps[i];
  return step.kind == Step::Kind::kReduce && step.count * size > kPieceBytes && alone(round, i) &&
         !is_sent(round, step);
}

Status Engine::run_round(const Turn& turn, const Header& mine, const Round& round, char* work,
                         const char* input) {
  const uint64_t size = element_size(static_cast<ElementType>(mine.type));
  uint64_t landed = 0;
  uint64_t reduced = 0;  // not in pieces
  for (size_t i = 0; i < round.steps.size(); ++i) {
    if (round.steps[i].kind != Step::Kind::kReduce) continue;
    const bool pieces = in_pieces(round, i, size);
    landed += pieces ? kPieceBytes : round.steps[i].count * size;
    if (!pieces) reduced += round.steps[i].count * size;
  }
  char* landing = landed > 0 ? scratch(landed) : nullptr;
  sends_.clear();
  receives_.clear();
  reducers_.clear();
  reducers_.reserve(round.steps.size());
  for (size_t i = 0; i < round.steps.size(); ++i) {
    const Step& step = round.steps[i];
    Header header = mine;
    header.bytes = step.count * size;
    char* const at = header.bytes > 0 && work != nullptr ? work + step.begin * size : nullptr;
    switch (step.kind) {
      case Step::Kind::kCopy:
        if (header.bytes > 0) {
          const char* const from = step.from == Buffer::kWork ? work : input;
          std::memmove(at, from + step.input_begin * size, header.bytes);
        }
        break;
      case Step::Kind::kSend: {
        const char* const from = step.from == Buffer::kWork ? work : input;
        sends_.push_back(
            {step.peer, header, header.bytes > 0 ? from + step.begin * size : nullptr});
        count(sends_.back());
        break;
      }
      case Step::Kind::kStore: receives_.push_back({step.peer, header, at}); break;
      case Step::Kind::kReduce:
        receives_.push_back({step.peer, header, landing});
        if (in_pieces(round, i, size)) {
          receives_.back().taker = &reducers_.emplace_back(this, mine, step.peer, at);
          landing += kPieceBytes;
        } else {
          landing += header.bytes;
        }
        break;
    }
  }
  if (!sends_.empty() || !receives_.empty()) {
    WEFT_RETURN_IF_ERROR(link_->exchange(mine, sends_, receives_, turn.deadline));
  }
  if (reduced > 0) apply(mine, round, work);
  return absl::OkStatus();
}

void Engine::count(const Outgoing& sent) {
  const Topology& topology = choice_.topology;
  if (topology.host_of(sent.peer) == topology.host_of(member_.rank)) return;
  ++between_hosts_.messages;
  between_hosts_.bytes += sent.header.bytes;
}

void PieceReducer::take(uint64_t begin, const char* piece, uint64_t bytes) {
  const uint64_t size = element_size(static_cast<ElementType>(mine_->type));
  engine_->reduce_one(*mine_, peer_, at_ + begin, piece, bytes / size);
}

void Engine::reduce_one(const Header& mine, int peer, char* at, const char* theirs,
                        uint64_t elements) {
  const void* inputs[] = {at, theirs};
  if (peer < member_.rank) std::swap(inputs[0], inputs[1]);
  reduce_many(static_cast<ElementType>(mine.type), static_cast<ReduceOp::Kind>(mine.reduction), at,
              inputs, 2, elements, 0);
}

// What came for one place is reduced at once, in the order of the ranks (SCHED-3).
void Engine::apply(const Header& mine, const Round& round, char* work) {
  const auto type = static_cast<ElementType>(mine.type);
  const auto kind = static_cast<ReduceOp::Kind>(mine.reduction);
  const uint64_t size = element_size(type);
  const char* landed = scratch_.get();
  for (size_t i = 0; i < round.steps.size();) {
    const Step& first = round.steps[i];
    if (first.kind != Step::Kind::kReduce) {
      ++i;
      continue;
    }
    if (in_pieces(round, i, size)) {
      landed += kPieceBytes;
      ++i;
      continue;
    }
    char* const at = work + first.begin * size;
    inputs_.clear();
    bool own = false;
    for (; i < round.steps.size(); ++i) {
      const Step& step = round.steps[i];
      if (step.kind != Step::Kind::kReduce || step.begin != first.begin ||
          step.count != first.count) {
        break;
      }
      if (!own && step.peer > member_.rank) {
        inputs_.push_back(at);
        own = true;
      }
      inputs_.push_back(landed);
      landed += step.count * size;
    }
    if (!own) inputs_.push_back(at);
    if (first.count > 0) {
      reduce_many(type, kind, at, inputs_.data(), inputs_.size(), first.count, 0);
    }
  }
}

Status Engine::agree(const Turn& turn, Header mine) {
  return run(turn, mine, barrier_schedule(member_.rank, member_.size), nullptr, nullptr);
}

Status Engine::compare(const Turn& turn, const Fingerprint& mine) {
  Header all = header(turn, mine.op, mine.type, mine.count);
  all.reduction = mine.reduction;
  all.root = mine.root;
  return agree(turn, all);
}

Status Engine::monitored_barrier(const Turn& turn) {
  // Rank 0 alone watches the time, so that it can say who is missing.
  constexpr absl::Duration kLonger = absl::Minutes(1);
  Turn own = turn;
  if (member_.rank != 0) own.deadline += kLonger;
  const Header mine = header(turn, OpKind::kMonitoredBarrier, ElementType::kNone, 0);
  return run(own, mine, all_reduce_schedule(Algorithm::kStar, member_.rank, member_.size, 0),
             nullptr, nullptr);
}

Status Engine::barrier(const Turn& turn) {
  return agree(turn, header(turn, OpKind::kBarrier, ElementType::kNone, 0));
}

Algorithm Engine::asked_or_table(OpKind op, Algorithm algorithm, uint64_t bytes) const {
  if (algorithm != Algorithm::kAuto) return algorithm;
  return choice_.table.find(op, bytes, member_.size, choice_.topology);
}

Status Engine::all_reduce(const Turn& turn, ElementType type, ReduceOp op, Algorithm algorithm,
                          char* data, uint64_t elements) {
  const Topology& topology = choice_.topology;
  const uint64_t bytes = elements * element_size(type);
  algorithm = asked_or_table(OpKind::kAllReduce, algorithm, bytes);
  if (algorithm == Algorithm::kAuto) algorithm = choose_all_reduce(bytes, member_.size, topology);
  algorithm = effective_all_reduce(algorithm, member_.size, topology);
  Header mine = reducing(turn, OpKind::kAllReduce, type, elements, op);
  mine.algorithm = static_cast<uint8_t>(algorithm);
  if (algorithm != last_algorithm_ || elements != last_elements_) {
    last_ = all_reduce_schedule(algorithm, member_.rank, member_.size, elements, topology);
    last_algorithm_ = algorithm;
    last_elements_ = elements;
  }
  before_reduce(type, op, data, elements);
  WEFT_RETURN_IF_ERROR(run(turn, mine, last_, data, nullptr));
  after_reduce(type, op, data, elements);
  return absl::OkStatus();
}

}  // namespace weft::internal
