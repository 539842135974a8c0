#include "weft/collectives/internal/schedule.h"

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
                                                    "double binary tree",
                                                    "Bruck",
                                                    "recursive halving",
                                                    "binomial tree",
                                                    "scatter+all_gather",
                                                    "pairwise"};
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

Blocks Blocks::rotated(int first) const {
  Blocks out;
  for (int i = 0; i < count(); ++i) {
    out.begin_.push_back(out.begin_.back() + length((first + i) % count()));
  }
  return out;
}

Blocks Blocks::of(const std::vector<uint64_t>& lengths) {
  Blocks out;
  for (const uint64_t length : lengths) out.begin_.push_back(out.begin_.back() + length);
  return out;
}

}  // namespace internal
}  // namespace weft
