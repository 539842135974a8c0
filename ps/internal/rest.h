#ifndef WEFT_PS_INTERNAL_REST_H_
#define WEFT_PS_INTERNAL_REST_H_

// How long to leave the core to others between two pieces of an image, so that pushes go on while parts move.

#include <algorithm>

#include "absl/time/time.h"

namespace weft::ps::internal {

// `worked`: how long the piece took. `rested`: of this image up to now; in all it is at most a second, so that a
// large part's log does not outgrow its budget meanwhile.
inline absl::Duration rest_after(absl::Duration worked, absl::Duration* rested) {
  constexpr int kRestsFor = 4;
  constexpr absl::Duration kMostAtOnce = absl::Milliseconds(50);
  constexpr absl::Duration kMost = absl::Seconds(1);
  const absl::Duration rest = std::min({worked * kRestsFor, kMostAtOnce, kMost - *rested});
  *rested += rest;
  return rest;
}

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_REST_H_
