#ifndef WEFT_PS_PLACEMENT_H_
#define WEFT_PS_PLACEMENT_H_

// Where what lies: pure functions of the servers' names and the table's size, the same at every
// worker. Any thread.
//
//   PLACE-1  the ranges of a dense table cover it, in order, and no two of them overlap; their lengths
//            differ by at most one.
//   PLACE-2  a key has one owner; adding a server moves keys to it alone, and none between others.
//   PLACE-3  slicing keys loses none and repeats none, and keeps their order within each slice.
//   PLACE-4  a dense table of more than a part's bytes for each server has several parts at each, equally
//            many, and neighbours lie together.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "weft/common/api.h"

namespace weft::ps {

struct ElementRange {  // neighbouring elements of a flat table
  int64_t begin = 0;   // the first
  int64_t end = 0;     // one behind the last
  int64_t size() const { return end - begin; }
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};
// Part `index` of `count`. No divisibility is required; some parts may be empty.
// REQUIRES: elements >= 0, index < count.
WEFT_API ElementRange element_range(int64_t elements, size_t count, size_t index);

// Parts are pushed to and pulled from independently, so the push of one overlaps the pull of another.
inline constexpr size_t kMostParts = 4096;
// The number of parts of a dense table: the smallest multiple of `servers` with which none has more than
// `most` elements, or the largest up to kMostParts. REQUIRES: servers > 0, most > 0.
WEFT_API size_t dense_parts(int64_t elements, size_t servers, uint64_t most);
// The index of the server that has the part at first. REQUIRES: part < parts, a multiple of `servers`.
WEFT_API size_t home_of(size_t part, size_t parts, size_t servers);

// 64 well-mixed bits.
WEFT_API uint64_t mix_bits(uint64_t bits);
WEFT_API uint64_t hash_text(const std::string& text);

// Consistent hashing. 1,024 virtual nodes for each server keep the fullest within 10 % of the mean
// for whatever names.
class WEFT_API HashRing {
 public:
  static constexpr size_t kVirtualNodes = 1024;  // for each server
  explicit HashRing(const std::vector<std::string>& servers, size_t virtual_nodes = kVirtualNodes);

  size_t servers() const { return servers_; }
  // REQUIRES: servers() > 0.
  size_t owner(uint64_t key) const;

 private:
  static constexpr int kBucketBits = 12;
  static constexpr size_t kBuckets = size_t{1} << kBucketBits;
  static size_t bucket_of(uint64_t hash) { return hash >> (64 - kBucketBits); }

  size_t servers_;
  std::vector<std::pair<uint64_t, uint32_t>> points_;  // sorted
  std::vector<uint32_t> first_of_;                     // of each bucket of hashes, in points_
};

// For each server the places of its keys in `keys`.
WEFT_API std::vector<std::vector<int64_t>> slice_keys(const HashRing& ring, const uint64_t* keys,
                                                      size_t count);

}  // namespace weft::ps

#endif  // WEFT_PS_PLACEMENT_H_
