#ifndef WEFT_TRANSPORT_INTERNAL_DATA_TURN_H_
#define WEFT_TRANSPORT_INTERNAL_DATA_TURN_H_

// DataTurn: how many bytes a data connection moves at a time before others have the core. Nothing
// interrupts the kernel's copy, so a small call waits for the turn under way; and a flow in short
// turns is half as fast as one in long ones (row T12.4 against T11 of docs/benchmarks.md). So they
// are short while calls that are one frame come and go, and long when there were none for a while.

#include <atomic>
#include <cstddef>

#include "absl/time/time.h"

namespace weft::internal {

class DataTurn {
 public:
  static constexpr size_t kShort = 64u << 10;
  static constexpr size_t kLong = 1u << 20;
  // So long after a small call others are expected.
  static constexpr absl::Duration kSmallLasts = absl::Milliseconds(100);

  // A call or an answer that is one frame. Any thread; it costs no more than a look, mostly.
  void note_small() {
    if (!small_.load(std::memory_order_relaxed)) small_.store(true, std::memory_order_relaxed);
  }
  // One thread.
  void look(absl::Time now) {
    if (small_.load(std::memory_order_relaxed)) {
      small_.store(false, std::memory_order_relaxed);
      last_small_ = now;
    }
    bytes_.store(now - last_small_ < kSmallLasts ? kShort : kLong, std::memory_order_relaxed);
  }
  // As of the last look. Any thread.
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> small_{false};
  std::atomic<size_t> bytes_{kLong};
  absl::Time last_small_ = absl::InfinitePast();
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_DATA_TURN_H_
