#ifndef WEFT_COMMON_TIME_H_
#define WEFT_COMMON_TIME_H_

// Time inside weft: absl::Duration for lengths, absl::Time for points on the worker's own *steady*
// clock (Clock::now(); never comparable between processes and unrelated to the calendar).
//
// Timeout is what public options take. It converts from std::chrono durations and absl::Duration,
// is trivially destructible (so that options may be written inside a co_await expression), and has
// no magic numbers: unset means "the default of the function that takes it", zero or negative
// "already expired", and only kInfinite is infinite. Resolution is nanoseconds.

#include <chrono>
#include <cstdint>
#include <limits>
#include <ratio>

#include "absl/time/time.h"

namespace weft {

class Timeout {
 public:
  constexpr Timeout() = default;

  template <class Rep, class Period>
  constexpr Timeout(std::chrono::duration<Rep, Period> d)  // NOLINT: implicit by design
      : nanos_(to_nanos(d)), set_(true) {}

  Timeout(absl::Duration d)  // NOLINT: implicit by design
      : nanos_(absl::ToInt64Nanoseconds(d)), set_(true) {
    if (d == absl::InfiniteDuration()) nanos_ = kInfiniteNanos;
  }

  static constexpr Timeout infinite() {
    Timeout t;
    t.nanos_ = kInfiniteNanos;
    t.set_ = true;
    return t;
  }

  constexpr bool is_set() const { return set_; }  // given, also as infinite
  constexpr bool is_infinite() const { return set_ && nanos_ == kInfiniteNanos; }  // explicitly

  // The length; `fallback` when unset.
  absl::Duration value_or(absl::Duration fallback) const {
    if (!set_) return fallback;
    return nanos_ == kInfiniteNanos ? absl::InfiniteDuration() : absl::Nanoseconds(nanos_);
  }

 private:
  static constexpr int64_t kInfiniteNanos = std::numeric_limits<int64_t>::max();

  template <class Rep, class Period>
  static constexpr int64_t to_nanos(std::chrono::duration<Rep, Period> d) {
    // Computed in long double so that hours in any representation neither overflow nor truncate a
    // sub-nanosecond remainder to "infinite".
    const long double n = std::chrono::duration<long double, std::nano>(d).count();
    if (n >= 9.2e18L) return kInfiniteNanos - 1;
    if (n <= -9.2e18L) return std::numeric_limits<int64_t>::min();
    return static_cast<int64_t>(n);
  }

  int64_t nanos_ = 0;
  bool set_ = false;
};

// The only spelling of "wait for ever".
inline constexpr Timeout kInfinite = Timeout::infinite();

// `now + timeout`, saturating; infinite stays infinite.
inline absl::Time deadline_after(absl::Time now, absl::Duration timeout) {
  return timeout == absl::InfiniteDuration() ? absl::InfiniteFuture() : now + timeout;
}

}  // namespace weft

#endif  // WEFT_COMMON_TIME_H_
