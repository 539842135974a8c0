#ifndef WEFT_COLLECTIVES_ALGORITHM_H_
#define WEFT_COLLECTIVES_ALGORITHM_H_

// Algorithm: how the ranks of an operation go about it. docs/collectives.md has messages and bytes
// of each. Every one of them answers for every number of ranks. Any thread.

#include <cstdint>
#include <string_view>

#include "weft/common/api.h"

namespace weft {

// Sent as numbers: values are never reused. Which are of which operation: kNaive to kDoubleTree of
// all_reduce, the others as the comments say.
enum class Algorithm : uint8_t {
  kAuto = 0,               // by size and number of ranks
  kNaive = 1,              // every rank sends all data to every rank
  kStar = 2,               // one rank reduces and sends back
  kReduceBroadcast = 3,    // binomial trees
  kRecursiveDoubling = 4,  // butterfly; all_gather, Bruck's where the ranks are no power of two
  kHalvingDoubling = 5,    // Rabenseifner's
  kRing = 6,               // all_gather, reduce_scatter
  kSegmentedRing = 7,      // a ring whose blocks go in four segments
  kTorus = 8,              // 2D torus, as square as the number of ranks allows; a ring for primes
  kDirect = 9,             // through shared memory: no messages; gather, scatter: one message each
  kHierarchicalRing = 10,  // binomial trees inside each host, a ring of one rank per host
  kTorus3D = 11,           // 3D torus, as equal as can be; with fewer than three factors a 2D one
  kMesh = 12,        // 2D torus on each half of the buffer, rows first on one, columns on the other
  kDoubleTree = 13,  // two binary trees with half of the buffer each, in four segments
  // all_gather; all_to_all of equal blocks on all ranks. Few messages
  kBruck = 14,
  // reduce_scatter; a ring where the ranks are no power of two
  kRecursiveHalving = 15,
  // broadcast, reduce; gather and scatter of equal blocks on all ranks
  kBinomialTree = 16,
  kScatterAllGather = 17,  // broadcast: blocks by a tree, which a ring then collects
  kPairwise = 18,          // all_to_all
};
inline constexpr uint8_t kAlgorithms = 19;

WEFT_API std::string_view algorithm_name(uint8_t algorithm);  // as in options and timelines

}  // namespace weft

#endif  // WEFT_COLLECTIVES_ALGORITHM_H_
