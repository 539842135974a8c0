// Schedules of the operations beside all_reduce.
#include <algorithm>

#include "weft/collectives/internal/schedule_steps.h"

namespace weft::internal {
namespace {

bool is_power_of_two(int size) { return (size & (size - 1)) == 0; }

// Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997. Each round doubles what a rank has.
Schedule bruck_all_gather(int rank, int size, const Blocks& blocks) {
  const Blocks mine = blocks.rotated(rank);
  Schedule out;
  for (int distance = 1; distance < size; distance *= 2) {
    const int count = std::min(distance, size - distance);
    out.rounds.push_back(Round{{send(wrap(rank - distance, size), 0, mine.begin(count)),
                                store(wrap(rank + distance, size), mine.begin(distance),
                                      mine.begin(distance + count) - mine.begin(distance))}});
  }
  return out;
}

// Partners exchange all that they have. REQUIRES: a power of two.
Schedule doubling_all_gather(int rank, int size, const Blocks& blocks) {
  Schedule out;
  for (int distance = 1; distance < size; distance *= 2) {
    const int peer = rank ^ distance;
    const int mine = rank - rank % distance;
    const int theirs = peer - peer % distance;
    out.rounds.push_back(
        Round{{send(peer, blocks.begin(mine), blocks.begin(mine + distance) - blocks.begin(mine)),
               store(peer, blocks.begin(theirs),
                     blocks.begin(theirs + distance) - blocks.begin(theirs))}});
  }
  return out;
}

// Partners exchange halves of what they still reduce. REQUIRES: a power of two.
Schedule halving_reduce_scatter(int rank, int size, const Blocks& blocks) {
  Schedule out;
  for (int distance = size / 2; distance >= 1; distance /= 2) {
    const int peer = rank ^ distance;
    const int keep = rank - rank % distance;
    const int give = peer - peer % distance;
    out.rounds.push_back(Round{
        {send(peer, blocks.begin(give), blocks.begin(give + distance) - blocks.begin(give)),
         reduce(peer, blocks.begin(keep), blocks.begin(keep + distance) - blocks.begin(keep))}});
  }
  return out;
}

Step copy(Buffer from, uint64_t to, uint64_t count, uint64_t from_begin) {
  return {Step::Kind::kCopy, -1, from, to, count, from_begin};
}

// A block for the rank at distance d travels by the bits of d, one round for each of them. In kWork
// lie, one behind the other: the result; the blocks by the distance that they have to go; what a
// round sends; what it receives.
Schedule bruck_all_to_all(int rank, int size, uint64_t block) {
  const auto blocks = [block](int count) { return static_cast<uint64_t>(count) * block; };
  const uint64_t by_distance = blocks(size);
  const uint64_t outgoing = 2 * blocks(size);
  const uint64_t incoming = outgoing + blocks(size / 2);
  Schedule out;
  std::vector<Step> before = {
      copy(Buffer::kInput, by_distance, blocks(size - rank), blocks(rank)),
      copy(Buffer::kInput, by_distance + blocks(size - rank), blocks(rank), 0)};
  for (int bit = 1; bit < size; bit *= 2) {
    Round round{std::move(before)};
    before.clear();
    int count = 0;
    for (int first = bit; first < size; first += 2 * bit) {
      const int run = std::min(bit, size - first);
      round.steps.push_back(
          copy(Buffer::kWork, outgoing + blocks(count), blocks(run), by_distance + blocks(first)));
      before.push_back(
          copy(Buffer::kWork, by_distance + blocks(first), blocks(run), incoming + blocks(count)));
      count += run;
    }
    round.steps.push_back(send(wrap(rank + bit, size), outgoing, blocks(count)));
    round.steps.push_back(store(wrap(rank - bit, size), incoming, blocks(count)));
    out.rounds.push_back(std::move(round));
  }
  for (int distance = 0; distance < size; ++distance) {
    before.push_back(copy(Buffer::kWork, blocks(wrap(rank - distance, size)), block,
                          by_distance + blocks(distance)));
  }
  out.rounds.push_back(Round{std::move(before)});
  return out;
}

}  // namespace

uint64_t bruck_all_to_all_elements(int size, uint64_t block) {
  return (2 * static_cast<uint64_t>(size) + 2 * static_cast<uint64_t>(size / 2)) * block;
}

int gathered_blocks(int rank, int size, int root) {
  const int place = wrap(rank - root, size);
  return place == 0 ? size : std::min(place & -place, size - place);
}

Algorithm effective_all_gather(Algorithm algorithm, int size) {
  if (algorithm == Algorithm::kRecursiveDoubling && !is_power_of_two(size)) {
    return Algorithm::kBruck;
  }
  const bool known = algorithm == Algorithm::kRecursiveDoubling || algorithm == Algorithm::kBruck;
  return known ? algorithm : Algorithm::kRing;
}

Algorithm effective_reduce_scatter(Algorithm algorithm, int size) {
  const bool halves = algorithm == Algorithm::kRecursiveHalving && is_power_of_two(size);
  return halves ? algorithm : Algorithm::kRing;
}

Schedule broadcast_schedule(int rank, int size, uint64_t elements, int root, Algorithm algorithm) {
  Schedule out;
  const Tree tree = tree_of_all(rank, size, root);
  if (algorithm != Algorithm::kScatterAllGather) {
    tree.broadcast(&out, elements);
    return out;
  }
  const Blocks blocks = Blocks::even(elements, size);
  tree.scatter(&out, blocks, 0);
  Ring{tree.members, tree.place, 0, blocks, 1}.all_gather(&out);
  return out;
}

Schedule reduce_schedule(int rank, int size, uint64_t elements, int root) {
  Schedule out;
  tree_of_all(rank, size, root).reduce_to_root(&out, elements);
  return out;
}

Schedule all_gather_schedule(int rank, int size, const Blocks& blocks, Algorithm algorithm) {
  switch (effective_all_gather(algorithm, size)) {
    case Algorithm::kBruck: return bruck_all_gather(rank, size, blocks);
    case Algorithm::kRecursiveDoubling: return doubling_all_gather(rank, size, blocks);
    default: break;
  }
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
  round.steps.push_back(copy(Buffer::kInput, at_root.begin(rank), at_root.length(rank), 0));
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) round.steps.push_back(store(peer, at_root.begin(peer), at_root.length(peer)));
  }
  return {{std::move(round)}};
}

Schedule scatter_schedule(int rank, int size, const Blocks& at_root, uint64_t own, int root) {
  if (rank != root) return {{Round{{store(root, 0, own)}}}};
  Round round;
  round.steps.push_back(copy(Buffer::kInput, 0, at_root.length(rank), at_root.begin(rank)));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    Step step = send(peer, at_root.begin(peer), at_root.length(peer));
    step.from = Buffer::kInput;
    round.steps.push_back(step);
  }
  return {{std::move(round)}};
}

Schedule tree_gather_schedule(int rank, int size, uint64_t own, int root) {
  const Tree tree = tree_of_all(rank, size, root);
  Schedule out;
  out.rounds.push_back(Round{{copy(Buffer::kInput, 0, own, 0)}});
  tree.gather(&out, own);
  return out;
}

Schedule tree_scatter_schedule(int rank, int size, uint64_t own, int root) {
  const Tree tree = tree_of_all(rank, size, root);
  const auto count = static_cast<uint64_t>(size);
  Schedule out;
  tree.scatter(&out, Blocks::even(own * count, size), static_cast<uint64_t>(tree.place) * own);
  return out;
}

Schedule reduce_scatter_schedule(int rank, int size, const Blocks& blocks, Algorithm algorithm) {
  if (effective_reduce_scatter(algorithm, size) == Algorithm::kRecursiveHalving) {
    return halving_reduce_scatter(rank, size, blocks);
  }
  Schedule out;
  Ring{numbers(size), rank, 0, blocks, 1}.reduce_scatter(&out);
  return out;
}

Schedule all_to_all_schedule(int rank, int size, const Blocks& input, const Blocks& output) {
  Schedule out;
  out.rounds.push_back(
      Round{{copy(Buffer::kInput, output.begin(rank),
                  std::min(input.length(rank), output.length(rank)), input.begin(rank))}});
  for (int s = 1; s < size; ++s) {
    const int to = wrap(rank + s, size);
    const int from = wrap(rank - s, size);
    Step give = send(to, input.begin(to), input.length(to));
    give.from = Buffer::kInput;
    out.rounds.push_back(Round{{give, store(from, output.begin(from), output.length(from))}});
  }
  return out;
}

Schedule bruck_all_to_all_schedule(int rank, int size, uint64_t block) {
  return bruck_all_to_all(rank, size, block);
}

Schedule barrier_schedule(int rank, int size) {
  Schedule out;
  for (int distance = 1; distance < size; distance *= 2) {
    out.rounds.push_back(
        Round{{send(wrap(rank + distance, size), 0, 0), store(wrap(rank - distance, size), 0, 0)}});
  }
  return out;
}

}  // namespace weft::internal
