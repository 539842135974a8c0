#ifndef WEFT_COLLECTIVES_INTERNAL_SCHEDULE_H_
#define WEFT_COLLECTIVES_INTERNAL_SCHEDULE_H_

// Schedules: what one rank does in an operation, as data. Each algorithm is a pure function of the
// rank, the number of ranks and the blocks of the buffer; it knows neither memory nor network. A
// schedule is a list of rounds; the steps of a round happen together, the next round begins when
// all of them are done.
//
// SCHED-1: the sends of all ranks and their receives match one to one: the k-th send from a to b
//          is what the k-th receive of b from a takes, with equal length.
// SCHED-2: in one round nothing is received into a place that is sent from.
// SCHED-3: elements are reduced in the same order for all ranks, so results are bit-identical.
// A step of no elements is a message with an empty body: the number of messages does not depend
// on the size. Any thread.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/collectives/algorithm.h"
#include "weft/common/api.h"

namespace weft::internal {

// A buffer cut into blocks: block i is the elements from begin(i) to begin(i + 1).
class WEFT_API Blocks {
 public:
  Blocks() = default;
  // As equal as they can be.
  static Blocks even(uint64_t elements, int blocks);
  // The same lengths from block `first` on, and then those before it.
  Blocks rotated(int first) const;
  // Of the given lengths.
  static Blocks of(const std::vector<uint64_t>& lengths);

  int count() const { return static_cast<int>(begin_.size()) - 1; }
  uint64_t begin(int i) const { return begin_[static_cast<size_t>(i)]; }
  uint64_t length(int i) const {
    return begin_[static_cast<size_t>(i) + 1] - begin_[static_cast<size_t>(i)];
  }
  uint64_t total() const { return begin_.back(); }

 private:
  std::vector<uint64_t> begin_{0};
};

// Which memory of the operation a step is about.
enum class Buffer : uint8_t {
  kWork,   // read and written
  kInput,  // only read
};

struct Step {
  enum class Kind : uint8_t { kSend, kStore, kReduce, kCopy };
  Kind kind = Kind::kSend;
  // kCopy: to kWork at this rank, in the order of the steps and before the sends of the round; no
  // peer.
  int peer = -1;
  Buffer from = Buffer::kWork;  // kSend, kCopy
  uint64_t begin = 0;           // kCopy: in kWork
  uint64_t count = 0;
  uint64_t input_begin = 0;  // kCopy: in `from`
};

struct Round {
  std::vector<Step> steps;
};

struct Schedule {
  std::vector<Round> rounds;
};

// Which ranks share a host, as all members of a group have agreed.
struct WEFT_API Topology {
  // By rank, numbered from 0 in the order of the ranks. Empty: all are on one host.
  std::vector<int> host;

  // Made from what each rank says of its host: ranks with equal texts share one. An empty text is of
  // a rank that shares its host with no other one.
  static Topology of(const std::vector<std::string>& hosts);
  int host_of(int rank) const { return host.empty() ? 0 : host[static_cast<size_t>(rank)]; }
  int hosts() const;
};

// The algorithm by which an all_reduce runs where `algorithm` is asked for: a torus or mesh of a
// prime number of ranks is a ring, a hierarchical ring on one host reduction and broadcast.
WEFT_API Algorithm effective_all_reduce(Algorithm algorithm, int size, const Topology& topology);
// The sizes of a torus of so many dimensions, or fewer where the ranks do not have the factors.
WEFT_API std::vector<int> torus_dimensions(int size, int count);
// all_reduce in kWork.
WEFT_API Schedule all_reduce_schedule(Algorithm algorithm, int rank, int size, uint64_t elements,
                                      const Topology& topology = {});
// The same of the other operations that have several. kAuto: the ring.
WEFT_API Algorithm effective_all_gather(Algorithm algorithm, int size);
WEFT_API Algorithm effective_reduce_scatter(Algorithm algorithm, int size);

WEFT_API Schedule broadcast_schedule(int rank, int size, uint64_t elements, int root,
                                     Algorithm algorithm = Algorithm::kBinomialTree);
// The result in kWork of the root; kWork of the others is used up.
WEFT_API Schedule reduce_schedule(int rank, int size, uint64_t elements, int root);
// Own block is in place in kWork. Of Bruck's, kWork has the blocks rotated by the rank: its block i
// is that of rank (rank + i) % size.
WEFT_API Schedule all_gather_schedule(int rank, int size, const Blocks& blocks,
                                      Algorithm algorithm = Algorithm::kRing);
// The root's own block is copied from kInput. `own`: elements of this rank's block.
WEFT_API Schedule gather_schedule(int rank, int size, const Blocks& at_root, uint64_t own,
                                  int root);
WEFT_API Schedule scatter_schedule(int rank, int size, const Blocks& at_root, uint64_t own,
                                   int root);
// By binomial trees, of equal blocks. kWork has gathered_blocks() of them: at the root block i is
// that of rank (root + i) % size, elsewhere the first one is the own. Gathering takes it from kInput.
WEFT_API Schedule tree_gather_schedule(int rank, int size, uint64_t own, int root);
WEFT_API Schedule tree_scatter_schedule(int rank, int size, uint64_t own, int root);
WEFT_API int gathered_blocks(int rank, int size, int root);
// Block `rank` of kWork is the result; the others are used up.
WEFT_API Schedule reduce_scatter_schedule(int rank, int size, const Blocks& blocks,
                                          Algorithm algorithm = Algorithm::kRing);
WEFT_API Schedule all_to_all_schedule(int rank, int size, const Blocks& input,
                                      const Blocks& output);
// For equal blocks, from kInput. kWork has that many elements, of which the first `size` blocks are
// the result.
WEFT_API Schedule bruck_all_to_all_schedule(int rank, int size, uint64_t block);
WEFT_API uint64_t bruck_all_to_all_elements(int size, uint64_t block);
WEFT_API Schedule barrier_schedule(int rank, int size);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SCHEDULE_H_
