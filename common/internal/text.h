#ifndef WEFT_COMMON_INTERNAL_TEXT_H_
#define WEFT_COMMON_INTERNAL_TEXT_H_

// Bridges between std::string_view and absl::string_view, which are two types in a packaged Abseil
// that was built for C++14. Pure functions.

#include <string_view>

#include "absl/strings/string_view.h"

namespace weft::internal {

inline absl::string_view view(std::string_view s) { return absl::string_view(s.data(), s.size()); }
inline std::string_view std_view(absl::string_view s) {
  return std::string_view(s.data(), s.size());
}

}  // namespace weft::internal

#endif  // WEFT_COMMON_INTERNAL_TEXT_H_
