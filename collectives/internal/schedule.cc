#include <algorithm>

#include "weft/collectives/internal/schedule_steps.h"

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
                                                    "direct",
                                                    "hierarchical ring",
                                                    "3D torus",
                                                    "2D mesh",
                                                    "double binary tree"};
  return algorithm < kAlgorithms ? kNames[algorithm] : "unknown algorithm";
}

namespace internal {

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

Schedule broadcast_schedule(int rank, int size, uint64_t elements, int root) {
  Schedule out;
  tree_of_all(rank, size, root).broadcast(&out, elements);
  return out;
}

Schedule reduce_schedule(int rank, int size, uint64_t elements, int root) {
  Schedule out;
  tree_of_all(rank, size, root).reduce_to_root(&out, elements);
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
