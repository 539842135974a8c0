#ifndef WEFT_COLLECTIVES_ALGORITHM_H_
#define WEFT_COLLECTIVES_ALGORITHM_H_

// Algorithm: how the ranks of an all_reduce go about it. docs/collectives.md has messages and bytes
// of each. Every one of them answers for every number of ranks. Any thread.

#include <cstdint>
#include <string_view>

#include "weft/common/api.h"

namespace weft {

// Sent as numbers: values are never reused.
enum class Algorithm : uint8_t {
  kAuto = 0,               // by size and number of ranks
  kNaive = 1,              // everyone sends everything to everyone
  kStar = 2,               // one rank reduces and sends back
  kReduceBroadcast = 3,    // binomial trees
  kRecursiveDoubling = 4,  // butterfly
  kHalvingDoubling = 5,    // Rabenseifner's
  kRing = 6,
  kSegmentedRing = 7,      // a ring whose blocks go in four segments
  kTorus = 8,              // 2D torus, as square as the number of ranks allows; a ring for primes
  kDirect = 9,             // through shared memory: no messages
  kHierarchicalRing = 10,  // binomial trees inside each host, a ring of one rank per host
  kTorus3D = 11,           // 3D torus, as equal as can be; with fewer than three factors a 2D one
  kMesh = 12,        // 2D torus on each half of the buffer, rows first on one, columns on the other
  kDoubleTree = 13,  // two binary trees with half of the buffer each, in four segments
};
inline constexpr uint8_t kAlgorithms = 14;

WEFT_API std::string_view algorithm_name(uint8_t algorithm);  // as in options and timelines

}  // namespace weft

#endif  // WEFT_COLLECTIVES_ALGORITHM_H_
