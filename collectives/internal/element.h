#ifndef WEFT_COLLECTIVES_INTERNAL_ELEMENT_H_
#define WEFT_COLLECTIVES_INTERNAL_ELEMENT_H_

// ElementType: what a buffer of an operation consists of, without LibTorch. Any thread.

#include <cstdint>
#include <string_view>

#include "weft/common/api.h"

namespace weft::internal {

// Sent as numbers: values are never reused.
enum class ElementType : uint8_t {
  kNone = 0,  // no elements: a barrier
  kBool = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kInt16 = 4,
  kUInt16 = 5,
  kInt32 = 6,
  kUInt32 = 7,
  kInt64 = 8,
  kUInt64 = 9,
  kHalf = 10,
  kBFloat16 = 11,
  kFloat = 12,
  kDouble = 13,
  kComplexHalf = 14,
  kComplexFloat = 15,
  kComplexDouble = 16,
  kFloat8E4M3Fn = 17,
  kFloat8E5M2 = 18,
  kFloat8E4M3Fnuz = 19,
  kFloat8E5M2Fnuz = 20,
};
inline constexpr uint8_t kElementTypes = 21;

// Bytes of one element; 0 for kNone.
WEFT_API uint64_t element_size(ElementType type);
// "float32"; "element type 77" is what an unknown number is called.
WEFT_API std::string_view element_name(uint8_t type);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_ELEMENT_H_
