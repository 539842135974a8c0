#include "weft/transport/arena_heap.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace weft::internal {

ArenaHeap::ArenaHeap(uint64_t capacity) : capacity_(capacity) {
  if (capacity > 0) insert(0, capacity);
}

uint64_t ArenaHeap::block_size(uint64_t bytes) {
  if (bytes > std::numeric_limits<uint64_t>::max() - kGranule) return 0;
  return (std::max<uint64_t>(bytes, 1) + kGranule - 1) / kGranule * kGranule;
}

void ArenaHeap::insert(uint64_t offset, uint64_t size) {
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
}

void ArenaHeap::erase(std::map<uint64_t, uint64_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  by_offset_.erase(range);
}

std::optional<uint64_t> ArenaHeap::allocate(uint64_t bytes) {
  const uint64_t size = block_size(bytes);
  if (size == 0) return std::nullopt;
  const auto best = by_size_.lower_bound({size, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [length, offset] = *best;
  erase(by_offset_.find(offset));
  if (length > size) insert(offset + size, length - size);
  used_ += size;
  return offset;
}

void ArenaHeap::free(uint64_t offset, uint64_t size) {
  used_ -= size;
  const auto after = by_offset_.lower_bound(offset);
  if (after != by_offset_.end() && after->first == offset + size) {
    size += after->second;
    erase(after);
  }
  const auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      erase(before);
    }
  }
  insert(offset, size);
}

}  // namespace weft::internal
