#ifndef WEFT_PS_INTERNAL_HOT_KEYS_H_
#define WEFT_PS_INTERNAL_HOT_KEYS_H_

// HotKeys: which keys of a part are pushed to most, in bounded memory: a sample of the pushed keys, counted by a
// space-saving sketch (Metwally, Agrawal, El Abbadi). A key that is not in the sketch takes the place, and the count,
// of the least one there, so that of N keys in the sample
//
//   - each key that came more than N / kKeys times is in the sketch,
//   - no count is too small, and none too large by more than its `excess`.
//
// About one key of kOneOf is in the sample, after gaps whose lengths are drawn: keys of a push are sorted, and equal
// gaps would meet the same ones of equal pushes. The draws are a pure function of the keys' number, so that a
// simulation repeats them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/mutex.h"

namespace weft::ps::internal {

class WEFT_API HotKeys {
 public:
  static constexpr size_t kKeys = 128;
  static constexpr uint64_t kOneOf = 64;

  struct Key {
    uint64_t key = 0;
    int64_t pushes = 0;  // as many as the sample says, in pushes
    int64_t excess = 0;  // by which that may be too large for what the sample has
  };

  // One thread at a time.
  void note(const std::vector<uint64_t>& keys);
  // At most `most` of them, those with the greatest counts first. Any thread.
  std::vector<Key> top(size_t most) const;

 private:
  void count(uint64_t key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t draw();

  // The thread that calls note() alone uses these two.
  uint64_t state_ = 1;
  uint64_t left_ = kOneOf - 1;  // keys until the next of the sample

  mutable Mutex mutex_;
  // By column: each key of the sample is looked for among all.
  size_t size_ ABSL_GUARDED_BY(mutex_) = 0;
  std::array<uint64_t, kKeys> keys_ ABSL_GUARDED_BY(mutex_){};
  std::array<int64_t, kKeys> counts_ ABSL_GUARDED_BY(mutex_){};
  std::array<int64_t, kKeys> excess_ ABSL_GUARDED_BY(mutex_){};
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_HOT_KEYS_H_
