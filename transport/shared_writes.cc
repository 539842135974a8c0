#include "weft/transport/shared_writes.h"

#include <algorithm>
#include <cstring>

#include "weft/transport/stream_copy.h"

namespace weft::internal {

void SharedWrites::copy(const Clock& clock, void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const size_t n = std::min(kPiece, bytes - done);
    char* const out = static_cast<char*>(to) + done;
    const char* const in = static_cast<const char*>(from) + done;
    write(clock, n, [&](bool around) {
      if (around) return copy_streamed(out, in, n);
      std::memcpy(out, in, n);
    });
    done += n;
  }
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
