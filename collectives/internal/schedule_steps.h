#ifndef WEFT_COLLECTIVES_INTERNAL_SCHEDULE_STEPS_H_
#define WEFT_COLLECTIVES_INTERNAL_SCHEDULE_STEPS_H_

// Parts of which schedules are made: steps, rings and binomial trees over some of the ranks. Pure;
// any thread.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "weft/collectives/internal/schedule.h"

namespace weft::internal {

inline int wrap(int i, int size) { return ((i % size) + size) % size; }

inline Step send(int peer, uint64_t begin, uint64_t count) {
  return {Step::Kind::kSend, peer, Buffer::kWork, begin, count, 0};
}
inline Step store(int peer, uint64_t begin, uint64_t count) {
  return {Step::Kind::kStore, peer, Buffer::kWork, begin, count, 0};
}
inline Step reduce(int peer, uint64_t begin, uint64_t count) {
  return {Step::Kind::kReduce, peer, Buffer::kWork, begin, count, 0};
}

inline void append(Schedule* to, Schedule from) {
  std::move(from.rounds.begin(), from.rounds.end(), std::back_inserter(to->rounds));
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

inline std::vector<int> numbers(int size) {
  std::vector<int> out;
  for (int i = 0; i < size; ++i) out.push_back(i);
  return out;
}

// Binomial trees over `members`, whose first one is the root; this rank is at `place`.
struct Tree {
  std::vector<int> members;
  int place = 0;

  int at(int i) const { return members[static_cast<size_t>(i)]; }

  void broadcast(Schedule* out, uint64_t elements) const {
    const int size = static_cast<int>(members.size());
    int distance = 1;
    for (; distance < size; distance *= 2) {
      if ((place & distance) != 0) {
        out->rounds.push_back(Round{{store(at(place - distance), 0, elements)}});
        break;
      }
    }
    for (distance /= 2; distance >= 1; distance /= 2) {
      if (place + distance < size) {
        out->rounds.push_back(Round{{send(at(place + distance), 0, elements)}});
      }
    }
  }
  // Block i goes to place i. The memory of this rank begins with element `base` of all blocks.
  void scatter(Schedule* out, const Blocks& blocks, uint64_t base) const {
    const int size = static_cast<int>(members.size());
    const auto begin = [&](int i) { return blocks.begin(std::min(i, size)); };
    int distance = 1;
    for (; distance < size; distance *= 2) {
      if ((place & distance) != 0) {
        out->rounds.push_back(Round{{store(at(place - distance), begin(place) - base,
                                           begin(place + distance) - begin(place))}});
        break;
      }
    }
    for (distance /= 2; distance >= 1; distance /= 2) {
      const int child = place + distance;
      if (child >= size) continue;
      out->rounds.push_back(
          Round{{send(at(child), begin(child) - base, begin(child + distance) - begin(child))}});
    }
  }
  // Blocks of equal length, in the order of the places from this one on. The own one is there.
  void gather(Schedule* out, uint64_t block) const {
    const int size = static_cast<int>(members.size());
    const auto blocks = [&](int first, int distance) {
      return static_cast<uint64_t>(std::min(distance, size - first)) * block;
    };
    for (int distance = 1; distance < size; distance *= 2) {
      if ((place & distance) != 0) {
        out->rounds.push_back(Round{{send(at(place - distance), 0, blocks(place, distance))}});
        break;
      }
      const int child = place + distance;
      if (child >= size) continue;
      out->rounds.push_back(Round{
          {store(at(child), static_cast<uint64_t>(distance) * block, blocks(child, distance))}});
    }
  }
  void reduce_to_root(Schedule* out, uint64_t elements) const {
    const int size = static_cast<int>(members.size());
    for (int distance = 1; distance < size; distance *= 2) {
      if ((place & distance) != 0) {
        out->rounds.push_back(Round{{send(at(place - distance), 0, elements)}});
        break;
      }
      if (place + distance < size) {
        out->rounds.push_back(Round{{reduce(at(place + distance), 0, elements)}});
      }
    }
  }
};

// All ranks from `root` on.
inline Tree tree_of_all(int rank, int size, int root) {
  Tree out;
  out.place = wrap(rank - root, size);
  for (int i = 0; i < size; ++i) out.members.push_back(wrap(root + i, size));
  return out;
}

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SCHEDULE_STEPS_H_
