#ifndef WEFT_RPC_INTERNAL_CODEC_VARINT_H_
#define WEFT_RPC_INTERNAL_CODEC_VARINT_H_

// Unsigned integers in 7-bit groups, lowest first. Strict when read: at most ten bytes, no bits
// above the 64th, no padding, so that every number has one spelling. Free functions; any thread.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::internal {

inline void append_varint(uint64_t value, std::string* out) {
  char bytes[10];
  size_t n = 0;
  while (value >= 0x80) {
    bytes[n++] = static_cast<char>(value | 0x80);
    value >>= 7;
  }
  bytes[n++] = static_cast<char>(value);
  out->append(bytes, n);
}

// Bytes used; 0 when `in` does not start with a number.
inline size_t take_varint(std::string_view in, uint64_t* value) {
  uint64_t result = 0;
  for (size_t i = 0; i < in.size() && i < 10; ++i) {
    const uint64_t byte = static_cast<unsigned char>(in[i]);
    if (i == 9 && byte > 1) return 0;
    result |= (byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      if (byte == 0 && i > 0) return 0;
      *value = result;
      return i + 1;
    }
  }
  return 0;
}

constexpr uint64_t zigzag(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}
constexpr int64_t unzigzag(uint64_t value) {
  return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
}

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_CODEC_VARINT_H_
