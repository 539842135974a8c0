#include "weft/ps/internal/hot_keys.h"

#include <algorithm>

namespace weft::ps::internal {

// Evenly from 0 to twice the mean, by a linear congruential generator (Knuth's constants), whose upper bits are
// good enough for this.
uint64_t HotKeys::draw() {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return (state_ >> 33) % (2 * kOneOf - 1);
}

void HotKeys::count(uint64_t key) {
  MutexLock lock(&mutex_);
  Counted* least = nullptr;
  for (Counted& one : counted_) {
    if (one.key == key) {
      ++one.count;
      return;
    }
    if (least == nullptr || one.count < least->count) least = &one;
  }
  if (counted_.size() < kKeys) {
    counted_.push_back({key, 1, 0});
    return;
  }
  *least = {key, least->count + 1, least->count};
}

std::vector<HotKeys::Key> HotKeys::top(size_t most) const {
  std::vector<Counted> all;
  {
    MutexLock lock(&mutex_);
    all = counted_;
  }
  std::sort(all.begin(), all.end(), [](const Counted& a, const Counted& b) {
    return a.count != b.count ? a.count > b.count : a.key < b.key;
  });
  all.resize(std::min(most, all.size()));
  std::vector<Key> out;
  constexpr auto kTimes = static_cast<int64_t>(kOneOf);
  for (const Counted& one : all) {
    out.push_back({one.key, one.count * kTimes, one.excess * kTimes});
  }
  return out;
}

}  // namespace weft::ps::internal
