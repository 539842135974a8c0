#ifndef WEFT_COLLECTIVES_INTERNAL_TEXT_H_
#define WEFT_COLLECTIVES_INTERNAL_TEXT_H_

// cat(): absl::StrCat that also takes std::string_view, which a packaged Abseil does not. Any
// thread.

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {

template <class T>
const T& text_part(const T& value) {
  return value;
}
inline absl::string_view text_part(std::string_view text) { return view(text); }
inline absl::string_view text_part(const char* text) { return text; }

template <class... Parts>
std::string cat(const Parts&... parts) {
  return absl::StrCat(text_part(parts)...);
}
template <class... Parts>
void cat_to(std::string* out, const Parts&... parts) {
  absl::StrAppend(out, text_part(parts)...);
}

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_TEXT_H_
