#include "weft/transport/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace weft::internal {

void copy_streamed(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine);
  std::memcpy(out, in, head);
  out += head;
  in += head;
  bytes -= head;
  // Whole lines, so that each leaves in one piece.
  for (; bytes >= kLine; bytes -= kLine, out += kLine, in += kLine) {
    for (size_t i = 0; i < kLine; i += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i)));
    }
  }
  std::memcpy(out, in, bytes);
  _mm_sfence();  // streaming stores may otherwise be seen after the message about them
#else
  std::memcpy(to, from, bytes);
#endif
}

void copy_part(void* to, const void* from, size_t bytes, size_t whole) {
  if (whole >= kStreamAbove) return copy_streamed(to, from, bytes);
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace weft::internal
