#include "weft/collectives/internal/schedule.h"

#include <algorithm>
#include <iterator>

namespace weft {

std::string_view algorithm_name(uint8_t algorithm) {
  constexpr std::string_view kNames[kAlgorithms] = {"auto",
                                                    "naive",
                                                    "star",
                                                    "reduce+broadcast",
                                                    "recursive doubling",
                                                    "halving-doubling",
                                                    "ring",
                                                    "segmented ring",
                                                    "torus",
                                                    "direct"};
  return algorithm < kAlgorithms ? kNames[algorithm] : "unknown algorithm";
}

namespace internal {
namespace {

constexpr int kSegments = 4;

int wrap(int i, int size) { return ((i % size) + size) % size; }

Step send(int peer, uint64_t begin, uint64_t count) {
  return {Step::Kind::kSend, peer, Buffer::kWork, begin, count, 0};
}
Step store(int peer, uint64_t begin, uint64_t count) {
  return {Step::Kind::kStore, peer, Buffer::kWork, begin, count, 0};
}
Step reduce(int peer, uint64_t begin, uint64_t count) {
  return {Step::Kind::kReduce, peer, Buffer::kWork, begin, count, 0};
}

void append(Schedule* to, Schedule from) {
  std::move(from.rounds.begin(), from.rounds.end(), std::back_inserter(to->rounds));
}

// Everyone has everything of everyone, and reduces in the order of the ranks.
Schedule naive(int rank, int size, uint64_t n) {
  Round round;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) round.steps.push_back(send(peer, 0, n));
  }
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) round.steps.push_back(reduce(peer, 0, n));
  }
  return {{std::move(round)}};
}

Schedule star(int rank, int size, uint64_t n) {
  if (rank != 0) return {{Round{{send(0, 0, n)}}, Round{{store(0, 0, n)}}}};
  Round in;
  Round out;
  for (int peer = 1; peer < size; ++peer) {
    in.steps.push_back(reduce(peer, 0, n));
    out.steps.push_back(send(peer, 0, n));
  }
  return {{std::move(in), std::move(out)}};
}

// The largest power of two that is not above `size`.
int power_below(int size) {
  int q = 1;
  while (q * 2 <= size) q *= 2;
  return q;
}

// Ranks above a power of two hand their elements to a neighbour first and get the result last: of
// the first 2r ranks the odd ones go on, with the rest, as 0..q-1.
struct Fold {
  Fold(int rank, int size) : q(power_below(size)), r(size - q) {
    if (rank < 2 * r) {
      place = rank % 2 == 0 ? -1 : rank / 2;
    } else {
      place = rank - r;
    }
  }
  int rank_of(int at) const { return at < r ? 2 * at + 1 : at + r; }

  int q;
  int r;
  int place;  // -1: folded away
};

template <class Inner>
Schedule folded(int rank, int size, uint64_t n, Inner inner) {
  const Fold fold(rank, size);
  if (fold.place < 0) return {{Round{{send(rank + 1, 0, n)}}, Round{{store(rank + 1, 0, n)}}}};
  const bool carries = rank < 2 * fold.r;
  Schedule out;
  if (carries) out.rounds.push_back(Round{{reduce(rank - 1, 0, n)}});
  append(&out, inner(fold));
  if (carries) out.rounds.push_back(Round{{send(rank - 1, 0, n)}});
  return out;
}

Schedule recursive_doubling(int rank, int size, uint64_t n) {
  return folded(rank, size, n, [n](const Fold& fold) {
    Schedule out;
    for (int distance = 1; distance < fold.q; distance *= 2) {
      const int peer = fold.rank_of(fold.place ^ distance);
      out.rounds.push_back(Round{{send(peer, 0, n), reduce(peer, 0, n)}});
    }
    return out;
  });
}

Schedule halving_doubling(int rank, int size, uint64_t n) {
  return folded(rank, size, n, [n](const Fold& fold) {
    const Blocks blocks = Blocks::even(n, fold.q);
    Schedule out;
    int low = 0;
    int high = fold.q;
    std::vector<Round> back;
    for (int distance = fold.q / 2; distance >= 1; distance /= 2) {
      const int peer = fold.rank_of(fold.place ^ distance);
      const int middle = low + distance;
      const bool lower = (fold.place & distance) == 0;
      const int keep_low = lower ? low : middle;
      const int keep_high = lower ? middle : high;
      const int give_low = lower ? middle : low;
      const int give_high = lower ? high : middle;
      const uint64_t keep = blocks.begin(keep_low);
      const uint64_t kept = blocks.begin(keep_high) - keep;
      const uint64_t give = blocks.begin(give_low);
      const uint64_t given = blocks.begin(give_high) - give;
      out.rounds.push_back(Round{{send(peer, give, given), reduce(peer, keep, kept)}});
      back.push_back(Round{{send(peer, keep, kept), store(peer, give, given)}});
      low = keep_low;
      high = keep_high;
    }
    std::move(back.rbegin(), back.rend(), std::back_inserter(out.rounds));
    return out;
  });
}

// A ring over `members`, this rank being at `place`, on blocks that lie in [base, ...). `shift`:
// block (place + shift) is whole at this place after the first half.
struct Ring {
  std::vector<int> members;
  int place = 0;
  uint64_t base = 0;
  Blocks blocks;
  int segments = 1;

  int size() const { return static_cast<int>(members.size()); }
  int next() const { return members[static_cast<size_t>(wrap(place + 1, size()))]; }
  int previous() const { return members[static_cast<size_t>(wrap(place - 1, size()))]; }

  void exchange(Schedule* out, int give, int take, bool reducing) const {
    const Blocks given = Blocks::even(blocks.length(give), segments);
    const Blocks taken = Blocks::even(blocks.length(take), segments);
    for (int s = 0; s < segments; ++s) {
      const uint64_t to = base + blocks.begin(take) + taken.begin(s);
      out->rounds.push_back(
          Round{{send(next(), base + blocks.begin(give) + given.begin(s), given.length(s)),
                 reducing ? reduce(previous(), to, taken.length(s))
                          : store(previous(), to, taken.length(s))}});
    }
  }
  // Afterwards block `place` is reduced here.
  void reduce_scatter(Schedule* out) const {
    for (int s = 0; s + 1 < size(); ++s) {
      exchange(out, wrap(place - s - 1, size()), wrap(place - s - 2, size()), true);
    }
  }
  // Begins with block `place` whole.
  void all_gather(Schedule* out) const {
    for (int s = 0; s + 1 < size(); ++s) {
      exchange(out, wrap(place - s, size()), wrap(place - s - 1, size()), false);
    }
  }
};

std::vector<int> numbers(int size) {
  std::vector<int> out;
  for (int i = 0; i < size; ++i) out.push_back(i);
  return out;
}

Schedule ring(int rank, int size, uint64_t n, int segments) {
  const Ring all{numbers(size), rank, 0, Blocks::even(n, size), segments};
  Schedule out;
  all.reduce_scatter(&out);
  all.all_gather(&out);
  return out;
}

// Rows of x ranks reduce among themselves, columns add the rows' parts up, rows collect.
Schedule torus(int rank, int size, uint64_t n) {
  int x = 1;
  for (int d = 2; d * d <= size; ++d) {
    if (size % d == 0) x = d;
  }
  if (x == 1) return ring(rank, size, n, 1);
  const int y = size / x;
  const int column = rank % x;
  const int row = rank / x;
  Ring in_row{{}, column, 0, Blocks::even(n, x), 1};
  for (int i = 0; i < x; ++i) in_row.members.push_back(row * x + i);
  Ring in_column{
      {}, row, in_row.blocks.begin(column), Blocks::even(in_row.blocks.length(column), y), 1};
  for (int i = 0; i < y; ++i) in_column.members.push_back(i * x + column);
  Schedule out;
  in_row.reduce_scatter(&out);
  in_column.reduce_scatter(&out);
  in_column.all_gather(&out);
  in_row.all_gather(&out);
  return out;
}

}  // namespace

Blocks Blocks::even(uint64_t elements, int blocks) {
  Blocks out;
  const auto parts = static_cast<uint64_t>(blocks);
  const uint64_t length = elements / parts;
  const uint64_t longer = elements % parts;
  for (uint64_t i = 0; i < parts; ++i) {
    out.begin_.push_back(out.begin_.back() + length + (i < longer ? 1 : 0));
  }
  return out;
}

Blocks Blocks::of(const std::vector<uint64_t>& lengths) {
  Blocks out;
  for (const uint64_t length : lengths) out.begin_.push_back(out.begin_.back() + length);
  return out;
}

Schedule all_reduce_schedule(Algorithm algorithm, int rank, int size, uint64_t elements) {
  if (size == 1) return {};
  switch (algorithm) {
    case Algorithm::kNaive: return naive(rank, size, elements);
    case Algorithm::kStar: return star(rank, size, elements);
    case Algorithm::kReduceBroadcast: {
      Schedule out = reduce_schedule(rank, size, elements, 0);
      append(&out, broadcast_schedule(rank, size, elements, 0));
      return out;
    }
    case Algorithm::kRecursiveDoubling: return recursive_doubling(rank, size, elements);
    case Algorithm::kHalvingDoubling: return halving_doubling(rank, size, elements);
    case Algorithm::kSegmentedRing: return ring(rank, size, elements, kSegments);
    case Algorithm::kTorus: return torus(rank, size, elements);
    case Algorithm::kAuto:
    case Algorithm::kDirect:
    case Algorithm::kRing: break;
  }
  return ring(rank, size, elements, 1);
}

Schedule broadcast_schedule(int rank, int size, uint64_t elements, int root) {
  Schedule out;
  const int place = wrap(rank - root, size);
  int distance = 1;
  for (; distance < size; distance *= 2) {
    if ((place & distance) != 0) {
      out.rounds.push_back(Round{{store(wrap(rank - distance, size), 0, elements)}});
      break;
    }
  }
  for (distance /= 2; distance >= 1; distance /= 2) {
    if (place + distance < size) {
      out.rounds.push_back(Round{{send(wrap(rank + distance, size), 0, elements)}});
    }
  }
  return out;
}

Schedule reduce_schedule(int rank, int size, uint64_t elements, int root) {
  Schedule out;
  const int place = wrap(rank - root, size);
  for (int distance = 1; distance < size; distance *= 2) {
    if ((place & distance) != 0) {
      out.rounds.push_back(Round{{send(wrap(rank - distance, size), 0, elements)}});
      break;
    }
    if (place + distance < size) {
      out.rounds.push_back(Round{{reduce(wrap(rank + distance, size), 0, elements)}});
    }
  }
  return out;
}

Schedule all_gather_schedule(int rank, int size, const Blocks& blocks) {
  Schedule out;
  Ring{numbers(size), rank, 0, blocks, 1}.all_gather(&out);
  return out;
}

Schedule gather_schedule(int rank, int size, const Blocks& at_root, uint64_t own, int root) {
  if (rank != root) {
    Step step = send(root, 0, own);
    step.from = Buffer::kInput;
    return {{Round{{step}}}};
  }
  Round round;
  round.steps.push_back(
      {Step::Kind::kCopy, -1, Buffer::kInput, at_root.begin(rank), at_root.length(rank), 0});
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) round.steps.push_back(store(peer, at_root.begin(peer), at_root.length(peer)));
  }
  return {{std::move(round)}};
}

Schedule scatter_schedule(int rank, int size, const Blocks& at_root, uint64_t own, int root) {
  if (rank != root) return {{Round{{store(root, 0, own)}}}};
  Round round;
  round.steps.push_back(
      {Step::Kind::kCopy, -1, Buffer::kInput, 0, at_root.length(rank), at_root.begin(rank)});
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    Step step = send(peer, at_root.begin(peer), at_root.length(peer));
    step.from = Buffer::kInput;
    round.steps.push_back(step);
  }
  return {{std::move(round)}};
}

Schedule reduce_scatter_schedule(int rank, int size, const Blocks& blocks) {
  Schedule out;
  Ring{numbers(size), rank, 0, blocks, 1}.reduce_scatter(&out);
  return out;
}

Schedule all_to_all_schedule(int rank, int size, const Blocks& input, const Blocks& output) {
  Schedule out;
  out.rounds.push_back(
      Round{{{Step::Kind::kCopy, -1, Buffer::kInput, output.begin(rank),
              std::min(input.length(rank), output.length(rank)), input.begin(rank)}}});
  for (int s = 1; s < size; ++s) {
    const int to = wrap(rank + s, size);
    const int from = wrap(rank - s, size);
    Step give = send(to, input.begin(to), input.length(to));
    give.from = Buffer::kInput;
    out.rounds.push_back(Round{{give, store(from, output.begin(from), output.length(from))}});
  }
  return out;
}

Schedule barrier_schedule(int rank, int size) {
  Schedule out;
  for (int distance = 1; distance < size; distance *= 2) {
    out.rounds.push_back(
        Round{{send(wrap(rank + distance, size), 0, 0), store(wrap(rank - distance, size), 0, 0)}});
  }
  return out;
}

}  // namespace internal
}  // namespace weft
