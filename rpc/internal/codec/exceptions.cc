// What handlers throw and what their futures hold, as errors of callers. The table of types, those
// of LibTorch included, is common's: an error reads the same from a function and from a coroutine.

#include <utility>

#include "weft/common/error.h"
#include "weft/rpc/spi/handler.h"

namespace weft::internal {

Status status_from_handler_exception() { return status_from_current_exception(); }

Status as_handler_error(Status status) {
  ErrorDetails details = error_details(status);
  if (details.kind != ErrorKind::kNone) return status;
  details.kind = ErrorKind::kUser;
  return with_details(std::move(status), details);
}

}  // namespace weft::internal
