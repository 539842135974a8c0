#ifndef WEFT_COLLECTIVES_INTERNAL_AWAITED_H_
#define WEFT_COLLECTIVES_INTERNAL_AWAITED_H_

// AwaitedRanks: the ranks that the operation under way waits for, for observers. An operation that
// never sleeps leaves it alone, so it costs such an operation nothing.
//
// Threads: set() and clear() by the thread of the operation; get() by any. get() may see a state
// between two sets.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace weft::internal {

class AwaitedRanks {
 public:
  explicit AwaitedRanks(int size) : bits_((static_cast<size_t>(size) + 63) / 64) {}

  void set(int rank) {
    word(rank).fetch_or(bit(rank), std::memory_order_relaxed);
    any_ = true;
  }
  void clear() {
    if (!any_) return;
    for (std::atomic<uint64_t>& word : bits_) word.store(0, std::memory_order_relaxed);
    any_ = false;
  }
  std::vector<int> get() const {
    std::vector<int> out;
    for (size_t i = 0; i < bits_.size() * 64; ++i) {
      const int rank = static_cast<int>(i);
      if ((bits_[i / 64].load(std::memory_order_relaxed) & bit(rank)) != 0) out.push_back(rank);
    }
    return out;
  }

 private:
  static uint64_t bit(int rank) { return uint64_t{1} << (static_cast<unsigned>(rank) % 64); }
  std::atomic<uint64_t>& word(int rank) { return bits_[static_cast<size_t>(rank) / 64]; }

  std::vector<std::atomic<uint64_t>> bits_;
  bool any_ = false;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_AWAITED_H_
