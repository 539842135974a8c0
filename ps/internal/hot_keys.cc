#include "weft/ps/internal/hot_keys.h"

#include <algorithm>

namespace weft::ps::internal {

// Evenly from 0 to twice the mean, by a linear congruential generator (Knuth's constants), whose upper bits are
// good enough for this.
uint64_t HotKeys::draw() {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return (state_ >> 33) % (2 * kOneOf - 1);
}

void HotKeys::note(const std::vector<uint64_t>& keys) {
  size_t at = 0;
  if (keys.size() > left_) {
    MutexLock lock(&mutex_);
    for (; keys.size() - at > left_; at += left_ + 1, left_ = draw()) count(keys[at + left_]);
  }
  left_ -= keys.size() - at;
}

void HotKeys::count(uint64_t key) {
  size_t at = size_;
  for (size_t i = 0; i < size_; ++i) at = keys_[i] == key ? i : at;  // no branch to guess
  if (at < size_) {
    ++counts_[at];
    return;
  }
  if (size_ < kKeys) {
    ++size_;
    keys_[at] = key;
    counts_[at] = 1;
    return;
  }
  at = static_cast<size_t>(std::min_element(counts_.begin(), counts_.end()) - counts_.begin());
  keys_[at] = key;
  excess_[at] = counts_[at]++;
}

std::vector<HotKeys::Key> HotKeys::top(size_t most) const {
  struct Counted {
    uint64_t key;
    int64_t count;
    int64_t excess;
  };
  std::vector<Counted> all;
  {
    MutexLock lock(&mutex_);
    for (size_t i = 0; i < size_; ++i) all.push_back({keys_[i], counts_[i], excess_[i]});
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
