#ifndef WEFT_PS_INTERNAL_KEY_PLACES_H_
#define WEFT_PS_INTERNAL_KEY_PLACES_H_

// KeyPlaces: the distinct keys of a list, in the order in which they first come. A map of keys costs a push of a thousand
// rows as much as its update; here a key's slot has only its number, and those of a push stay in the first cache.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "weft/ps/internal/part_data.h"

namespace weft::ps::internal {

template <class Key>  // an integer
class KeyPlaces {
 public:
  // Takes at most `most` keys, fewer than 2^32 - 1.
  explicit KeyPlaces(size_t most) : slots_(std::bit_ceil(std::max<size_t>(2 * most, 2)), kNone) {
    keys_.reserve(most);
  }

  // Returns the key's number among the distinct ones. A new key gets the next number.
  uint32_t place_of(Key key) {
    const size_t mask = slots_.size() - 1;
    // The seed of absl's hash differs between processes: a peer cannot choose keys that collide.
    for (size_t at = absl::HashOf(key) & mask;; at = (at + 1) & mask) {
      uint32_t& place = slots_[at];
      if (place == kNone) {
        place = static_cast<uint32_t>(keys_.size());
        keys_.push_back(key);
        return place;
      }
      if (keys_[place] == key) return place;
    }
  }

  const std::vector<Key>& keys() const { return keys_; }
  std::vector<Key> take() { return std::move(keys_); }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  std::vector<uint32_t> slots_;  // at most half of them are used
  std::vector<Key> keys_;
};

// The rows of a push: one for each key, contiguous, float or double.
struct KeyedRows {
  const std::vector<uint64_t>* keys;
  const at::Tensor* values;
};

// Sets *out to the distinct keys, in the order in which they first come, each with the sum of its rows in their order, or
// with its last row if `last`. Does not copy the values if no key is repeated. REQUIRES: one part at least; equally long rows.
void add_by_key(const std::vector<KeyedRows>& parts, bool last, Push* out);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_KEY_PLACES_H_
