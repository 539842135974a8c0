#ifndef WEFT_RPC_INTERNAL_CODEC_TEXT_H_
#define WEFT_RPC_INTERNAL_CODEC_TEXT_H_

// cat("entry ", 3, " of ", name): puts a message together. Packaged Abseil has a string_view of its
// own, which absl::StrCat insists on. Any thread.

#include <string>
#include <string_view>
#include <type_traits>

#include "weft/common/api.h"

namespace weft::internal {

inline void append_piece(std::string* out, std::string_view piece) { out->append(piece); }
template <class I, std::enable_if_t<std::is_integral_v<I>, int> = 0>
void append_piece(std::string* out, I piece) {
  out->append(std::to_string(piece));
}

// Errors are put together with it.
template <class... Pieces>
WEFT_COLD std::string cat(const Pieces&... pieces) {
  std::string out;
  (append_piece(&out, pieces), ...);
  return out;
}

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_CODEC_TEXT_H_
