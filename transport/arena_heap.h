#ifndef WEFT_TRANSPORT_ARENA_HEAP_H_
#define WEFT_TRANSPORT_ARENA_HEAP_H_

// ArenaHeap: which bytes of a range [0, capacity) are taken. Knows offsets and touches no memory.
// Best fit, and of equal fits the lowest address: memory that was used before is used again first,
// because what lies below has been touched already. Neighbours join at once when they are freed.
//
// Threads: belongs to its owner. Time: logarithmic in the number of free ranges.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "weft/common/api.h"

namespace weft::internal {

class WEFT_API ArenaHeap {
 public:
  // Blocks begin and end at multiples of it: a page, so that no two blocks share one.
  static constexpr uint64_t kGranule = 4096;

  // REQUIRES: capacity is a multiple of kGranule.
  explicit ArenaHeap(uint64_t capacity);

  // What is taken for so many bytes; 0 bytes take a granule. 0: more than any heap has.
  static uint64_t block_size(uint64_t bytes);

  // Offset of a block of block_size(bytes); none when no free range is as long.
  std::optional<uint64_t> allocate(uint64_t bytes);
  // REQUIRES: [offset, offset + size) was allocated, as one block or several.
  void free(uint64_t offset, uint64_t size);

  uint64_t used() const { return used_; }
  uint64_t capacity() const { return capacity_; }
  // By offset: begin -> length.
  const std::map<uint64_t, uint64_t>& free_ranges() const { return by_offset_; }

 private:
  void insert(uint64_t offset, uint64_t size);
  void erase(std::map<uint64_t, uint64_t>::iterator range);

  const uint64_t capacity_;
  uint64_t used_ = 0;
  std::map<uint64_t, uint64_t> by_offset_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (length, begin)
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_ARENA_HEAP_H_
