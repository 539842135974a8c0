#include <algorithm>
#include <string>
#include <tuple>

#include "weft/collectives/internal/schedule_steps.h"

namespace weft::internal {
namespace {

constexpr int kSegments = 4;

// Everyone has everything of everyone, and reduces in the order of the ranks. Each begins with the
// next rank, so that no two of them send to one rank at a time.
Schedule naive(int rank, int size, uint64_t n) {
  Round round;
  for (int i = 1; i < size; ++i) round.steps.push_back(send(wrap(rank + i, size), 0, n));
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

Schedule ring(int rank, int size, uint64_t n, int segments) {
  const Ring all{numbers(size), rank, 0, Blocks::even(n, size), segments};
  Schedule out;
  all.reduce_scatter(&out);
  all.all_gather(&out);
  return out;
}

// The product of the dimensions is the number of ranks. Neighbours in the first dimension have
// neighbouring numbers.
using Dimensions = std::vector<int>;

int steps_of(const Dimensions& dimensions) {
  int steps = 0;
  for (const int one : dimensions) steps += one - 1;
  return steps;
}

// At most `count` dimensions above 1 whose product is `size`, the smallest first: those with the
// fewest steps. One dimension: a ring.
Dimensions dimensions_of(int size, int count, int smallest = 2) {
  Dimensions best = {size};
  if (count == 1) return best;
  for (int d = smallest; d * d <= size; ++d) {
    if (size % d != 0) continue;
    Dimensions next = dimensions_of(size / d, count - 1, d);
    next.insert(next.begin(), d);
    if (steps_of(next) < steps_of(best)) best = std::move(next);
  }
  return best;
}

// The ring of a rank along one dimension.
Ring ring_along(int rank, const Dimensions& dimensions, size_t dimension, uint64_t base,
                uint64_t elements) {
  int stride = 1;
  for (size_t d = 0; d < dimension; ++d) stride *= dimensions[d];
  const int length = dimensions[dimension];
  Ring out{{}, rank / stride % length, base, Blocks::even(elements, length), 1};
  for (int i = 0; i < length; ++i) out.members.push_back(rank + (i - out.place) * stride);
  return out;
}

// Reduces along one dimension after the other, each time within the block that the rank has from
// the one before, and collects the other way round. `order`: of the dimensions.
Schedule torus(int rank, const Dimensions& dimensions, const std::vector<size_t>& order,
               uint64_t base, uint64_t elements) {
  std::vector<Ring> rings;
  for (const size_t dimension : order) {
    rings.push_back(ring_along(rank, dimensions, dimension, base, elements));
    base += rings.back().blocks.begin(rings.back().place);
    elements = rings.back().blocks.length(rings.back().place);
  }
  Schedule out;
  for (const Ring& ring : rings) ring.reduce_scatter(&out);
  for (auto ring = rings.rbegin(); ring != rings.rend(); ++ring) ring->all_gather(&out);
  return out;
}

Schedule torus(int rank, int size, int count, uint64_t n) {
  const Dimensions dimensions = dimensions_of(size, count);
  std::vector<size_t> order;
  for (size_t d = 0; d < dimensions.size(); ++d) order.push_back(d);
  return torus(rank, dimensions, order, 0, n);
}

// Two tori at the same time, each on half of the elements: one begins with the rows and the other
// one with the columns, so that the links of both directions are used.
Schedule mesh(int rank, int size, uint64_t n) {
  const Dimensions dimensions = dimensions_of(size, 2);
  if (dimensions.size() == 1) return ring(rank, size, n, 1);
  const Blocks halves = Blocks::even(n, 2);
  Schedule out = torus(rank, dimensions, {0, 1}, 0, halves.length(0));
  Schedule other = torus(rank, dimensions, {1, 0}, halves.begin(1), halves.length(1));
  for (size_t i = 0; i < out.rounds.size(); ++i) {
    std::vector<Step>& to = out.rounds[i].steps;
    to.insert(to.end(), other.rounds[i].steps.begin(), other.rounds[i].steps.end());
  }
  return out;
}

// Ranks of one host reduce to the first of them, these leaders make a ring, and their hosts get
// the result from them.
Schedule hierarchical_ring(int rank, int size, uint64_t n, const Topology& topology) {
  std::vector<int> leaders;
  Tree inside;
  for (int r = 0; r < size; ++r) {
    const int host = topology.host_of(r);
    if (host == static_cast<int>(leaders.size())) leaders.push_back(r);
    if (host != topology.host_of(rank)) continue;
    if (r == rank) inside.place = static_cast<int>(inside.members.size());
    inside.members.push_back(r);
  }
  Schedule out;
  inside.reduce_to_root(&out, n);
  if (inside.place == 0) {
    const int count = static_cast<int>(leaders.size());
    const Ring between{leaders, topology.host_of(rank), 0, Blocks::even(n, count), 1};
    between.reduce_scatter(&out);
    between.all_gather(&out);
  }
  inside.broadcast(&out, n);
  return out;
}

// A binary tree over 0..size-1 in which the numbers stand in order: the parent of a number with the
// lowest bit b has 2b as its lowest bit where there is such a number. 0 is the root and has one
// child. Leaves are the odd numbers.
struct OrderedTree {
  explicit OrderedTree(int size)
      : parent(static_cast<size_t>(size), -1), height(parent.size()), depth(parent.size()) {
    int top = 1;
    while (top < size) top *= 2;
    for (int i = 1; i < size; ++i) {
      const int bit = i & -i;
      int up = (i ^ bit) | (bit << 1);
      if (up >= size) up = i ^ bit;
      parent[static_cast<size_t>(i)] = up;
    }
    // A parent has a larger lowest bit than its children, and 0 the largest.
    for (int bit = 1; bit < top; bit *= 2) {
      for (int i = bit; i < size; i += 2 * bit) {
        int& above = height[static_cast<size_t>(parent[static_cast<size_t>(i)])];
        above = std::max(above, height[static_cast<size_t>(i)] + 1);
      }
    }
    for (int bit = top / 2; bit >= 1; bit /= 2) {
      for (int i = bit; i < size; i += 2 * bit) {
        depth[static_cast<size_t>(i)] =
            depth[static_cast<size_t>(parent[static_cast<size_t>(i)])] + 1;
      }
    }
  }

  std::vector<int> parent;
  std::vector<int> height;  // 0: a leaf
  std::vector<int> depth;   // 0: the root
};

// Sanders, Speck and Traeff: two trees, each with half of the elements, in which a rank that has
// children in one is a leaf of the other. A half goes up and down in segments, one behind the other.
// A message has a time, at which both its ends have it in their round: segment s leaves a rank of
// height h for its parent at h + s, and a rank of depth d for its children at H + s + d, where H is
// the height of the tree. So it is complete before it goes on, and no segment is sent and received
// at the same time.
Schedule double_tree(int rank, int size, uint64_t n) {
  const OrderedTree tree(size);
  const Blocks halves = Blocks::even(n, 2);
  const int top = tree.height[0];
  std::vector<std::vector<Step>> at(static_cast<size_t>(3 * top + kSegments + 1));
  for (int half = 0; half < 2; ++half) {
    // The second tree: the first one's mirror image, or for odd numbers of ranks shifted by one.
    const auto rank_of = [&](int place) {
      if (half == 0) return place;
      return size % 2 == 0 ? size - 1 - place : wrap(place + 1, size);
    };
    const int place = half == 0 ? rank : size % 2 == 0 ? size - 1 - rank : wrap(rank - 1, size);
    const Blocks segments = Blocks::even(halves.length(half), kSegments);
    const auto add = [&](int child, bool up) {
      const int parent = tree.parent[static_cast<size_t>(child)];
      for (int s = 0; s < kSegments; ++s) {
        const int time = s + (up ? tree.height[static_cast<size_t>(child)]
                                 : top + tree.depth[static_cast<size_t>(parent)]);
        const uint64_t begin = halves.begin(half) + segments.begin(s);
        const bool sends = up == (place == child);
        const int peer = rank_of(place == child ? parent : child);
        Step step = send(peer, begin, segments.length(s));
        if (!sends) {
          step =
              up ? reduce(peer, begin, segments.length(s)) : store(peer, begin, segments.length(s));
        }
        at[static_cast<size_t>(time)].push_back(step);
      }
    };
    for (int child = 1; child < size; ++child) {
      if (child != place && tree.parent[static_cast<size_t>(child)] != place) continue;
      add(child, true);
      add(child, false);
    }
  }
  Schedule out;
  for (std::vector<Step>& steps : at) {
    if (steps.empty()) continue;
    // What two children send of one segment is reduced together. Both ends have the same order.
    std::stable_sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) {
      const bool sends_a = a.kind == Step::Kind::kSend;
      const bool sends_b = b.kind == Step::Kind::kSend;
      return std::tuple(!sends_a, a.begin, a.count) < std::tuple(!sends_b, b.begin, b.count);
    });
    out.rounds.push_back(Round{std::move(steps)});
  }
  return out;
}

}  // namespace

std::vector<int> torus_dimensions(int size, int count) {
  const Dimensions dimensions = dimensions_of(size, count);
  return {dimensions.begin(), dimensions.end()};
}

int Topology::hosts() const {
  int out = 1;
  for (const int one : host) out = std::max(out, one + 1);
  return out;
}

Topology Topology::of(const std::vector<std::string>& hosts) {
  Topology out;
  std::vector<std::string> seen;
  for (const std::string& one : hosts) {
    auto at = std::find(seen.begin(), seen.end(), one);
    // A rank that does not say where it is shares its host with no other one.
    if (at == seen.end() || one.empty()) at = seen.insert(seen.end(), one);
    out.host.push_back(static_cast<int>(at - seen.begin()));
  }
  return out;
}

Algorithm effective_all_reduce(Algorithm algorithm, int size, const Topology& topology) {
  switch (algorithm) {
    case Algorithm::kTorus:
    case Algorithm::kMesh: return dimensions_of(size, 2).size() == 1 ? Algorithm::kRing : algorithm;
    case Algorithm::kTorus3D: {
      const size_t count = dimensions_of(size, 3).size();
      if (count == 3) return algorithm;
      return count == 2 ? Algorithm::kTorus : Algorithm::kRing;
    }
    case Algorithm::kHierarchicalRing: {
      const int hosts = topology.hosts();
      if (hosts == size) return Algorithm::kRing;
      return hosts == 1 ? Algorithm::kReduceBroadcast : algorithm;
    }
    default: return algorithm;
  }
}

Schedule all_reduce_schedule(Algorithm algorithm, int rank, int size, uint64_t elements,
                             const Topology& topology) {
  if (size == 1) return {};
  switch (effective_all_reduce(algorithm, size, topology)) {
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
    case Algorithm::kTorus: return torus(rank, size, 2, elements);
    case Algorithm::kTorus3D: return torus(rank, size, 3, elements);
    case Algorithm::kMesh: return mesh(rank, size, elements);
    case Algorithm::kHierarchicalRing: return hierarchical_ring(rank, size, elements, topology);
    case Algorithm::kDoubleTree: return double_tree(rank, size, elements);
    default: break;
  }
  return ring(rank, size, elements, 1);
}

}  // namespace weft::internal
