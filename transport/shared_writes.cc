#include "weft/transport/shared_writes.h"

#include <cstring>

#include "weft/transport/stream_copy.h"

namespace weft::internal {

void SharedWrites::copy(const Clock& clock, void* to, const void* from, size_t bytes) {
  write(clock, bytes, [&](bool around) {
    if (around) return copy_streamed(to, from, bytes);
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}

void SharedWrites::wrote(size_t bytes, absl::Duration took) {
  if (bytes < kSmallest) return;
  if (streamed_left_ > 0) {
    --streamed_left_;
    return;
  }
  if (took * (size_t{1} << 20) <= kSlowMiB * bytes) {
    slow_in_a_row_ = 0;
    return;
  }
  if (++slow_in_a_row_ < kPatience) return;
  // The one that comes after them is the last one that this takes.
  slow_in_a_row_ = kPatience - 1;
  streamed_left_ = kStreamed;
}

}  // namespace weft::internal
