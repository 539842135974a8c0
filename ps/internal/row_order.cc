#include "weft/ps/internal/row_order.h"

#include <algorithm>
#include <utility>

namespace weft::ps::internal {

void RowOrder::unlink(uint32_t row) {
  const Place& place = places_[row];
  next_of(place.older) = place.newer;
  before(place.newer) = place.older;
}

void RowOrder::link_newest(uint32_t row) {
  places_[row].older = newest_;
  places_[row].newer = kNone;
  next_of(newest_) = row;
  newest_ = row;
}

void RowOrder::add(int64_t now) {
  const auto row = static_cast<uint32_t>(places_.size());
  places_.push_back({kNone, kNone, now});
  link_newest(row);
}

void RowOrder::touch(uint32_t row, int64_t now) {
  places_[row].used_at = now;
  if (row == newest_) return;
  unlink(row);
  link_newest(row);
}

void RowOrder::remove(uint32_t row) {
  unlink(row);
  const auto last = static_cast<uint32_t>(places_.size() - 1);
  if (row != last) {
    places_[row] = places_[last];
    next_of(places_[row].older) = row;
    before(places_[row].newer) = row;
  }
  places_.pop_back();
}

void RowOrder::clear() {
  places_.clear();
  oldest_ = newest_ = kNone;
}

Sightings::Sightings(uint32_t needed, size_t most)
    : needed_(needed), half_(std::max<size_t>(1, most / 2)) {}

bool Sightings::see(uint64_t key) {
  if (needed_ <= 1) return true;
  uint32_t before = 0;
  if (const auto at = recent_.find(key); at != recent_.end()) {
    before = at->second;
  } else if (auto from = earlier_.extract(key); !from.empty()) {
    before = from.mapped();
  }
  if (before + 1 >= needed_) {
    recent_.erase(key);
    return true;
  }
  if (recent_.size() >= half_ && !recent_.contains(key)) {
    earlier_ = std::exchange(recent_, {});
  }
  recent_[key] = before + 1;
  return false;
}

void Sightings::clear() {
  recent_.clear();
  earlier_.clear();
}

}  // namespace weft::ps::internal
