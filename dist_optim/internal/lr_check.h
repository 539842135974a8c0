#ifndef WEFT_DIST_OPTIM_INTERNAL_LR_CHECK_H_
#define WEFT_DIST_OPTIM_INTERNAL_LR_CHECK_H_

// The check of a schedule's options. Any thread.

#include <string_view>

#include "weft/common/error.h"

namespace weft::internal {

// Throws, kind invalid_argument, `what`, when it is not good.
inline void require(bool good, std::string_view what) {
  if (!good) throw_error(make_error(ErrorKind::kInvalidArgument, what));
}

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_LR_CHECK_H_
