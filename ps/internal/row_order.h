#ifndef WEFT_PS_INTERNAL_ROW_ORDER_H_
#define WEFT_PS_INTERNAL_ROW_ORDER_H_

// RowOrder: the rows of a sparse part, in the order in which they were last used. Rows are numbered from 0 without gaps.
// Sightings: how often keys without a row were pushed to. Both pure, and used by one thread at a time.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "weft/common/api.h"
#include "weft/ps/internal/page_allocator.h"

namespace weft::ps::internal {

class WEFT_API RowOrder {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  // What a row takes here.
  static constexpr int64_t kRowBytes = 16;

  // add() then needs no memory for so many rows in all.
  void reserve(size_t rows) {
    // A reserve() of the exact number would copy all places at every push that has new rows.
    const size_t has = places_.capacity();
    if (rows > has) places_.reserve(std::max(rows, has + has / 2));
  }
  // The row with the next number, used at `now`.
  void add(int64_t now);
  void touch(uint32_t row, int64_t now);
  // The last row takes the number of this one.
  void remove(uint32_t row);
  void clear();

  size_t size() const { return places_.size(); }
  uint32_t oldest() const { return oldest_; }  // kNone: there is no row
  uint32_t newer_than(uint32_t row) const { return places_[row].newer; }
  int64_t used_at(uint32_t row) const { return places_[row].used_at; }

 private:
  struct Place {
    uint32_t older = kNone;
    uint32_t newer = kNone;
    int64_t used_at = 0;
  };
  uint32_t& next_of(uint32_t row) { return row == kNone ? oldest_ : places_[row].newer; }
  uint32_t& before(uint32_t row) { return row == kNone ? newest_ : places_[row].older; }
  void unlink(uint32_t row);
  void link_newest(uint32_t row);

  std::vector<Place, PageAllocator<Place>> places_;
  uint32_t oldest_ = kNone;
  uint32_t newest_ = kNone;
};

class WEFT_API Sightings {
 public:
  // What a key takes here, with its place in the index.
  static constexpr int64_t kKeyBytes = 32;

  // A key is admitted when it is seen for the `needed`th time. At most about `most` keys are counted; of more, those
  // that were not seen for longest are forgotten, and their counts begin anew: none is admitted too early.
  Sightings(uint32_t needed, size_t most);
  // Counts. True: it is admitted, and not counted any more.
  bool see(uint64_t key);
  void clear();
  int64_t bytes() const {
    return kKeyBytes * static_cast<int64_t>(recent_.size() + earlier_.size());
  }

 private:
  const uint32_t needed_;
  const size_t half_;
  // Two generations: where the recent one is full, it becomes the earlier one, which is forgotten.
  KeyMap recent_;
  KeyMap earlier_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_ROW_ORDER_H_
