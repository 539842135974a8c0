#ifndef WEFT_COMMON_INTERNAL_UTF8_H_
#define WEFT_COMMON_INTERNAL_UTF8_H_

// Whether bytes are text. Pure functions; any thread.

#include <cstddef>
#include <string_view>

namespace weft::internal {

// The length of the UTF-8 sequence at the front of `s`, 0 when there is none.
inline size_t utf8_length(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const auto follows = [&](size_t i) { return i < s.size() && (byte(i) & 0xc0) == 0x80; };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    if (!follows(1) || !follows(2)) return 0;
    if (first == 0xe0 && byte(1) < 0xa0) return 0;  // overlong
    if (first == 0xed && byte(1) > 0x9f) return 0;  // surrogate
    return 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (!follows(1) || !follows(2) || !follows(3)) return 0;
    if (first == 0xf0 && byte(1) < 0x90) return 0;
    if (first == 0xf4 && byte(1) > 0x8f) return 0;
    return 4;
  }
  return 0;
}

// UTF-8 without control characters: what may stand in a line of a log as it is.
inline bool is_line_of_text(std::string_view s) {
  while (!s.empty()) {
    const auto first = static_cast<unsigned char>(s[0]);
    const size_t length = utf8_length(s);
    if (length == 0 || first < 0x20 || first == 0x7f) return false;
    s.remove_prefix(length);
  }
  return true;
}

}  // namespace weft::internal

#endif  // WEFT_COMMON_INTERNAL_UTF8_H_
