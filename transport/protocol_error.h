#ifndef WEFT_TRANSPORT_PROTOCOL_ERROR_H_
#define WEFT_TRANSPORT_PROTOCOL_ERROR_H_

// What a peer does against the protocol; its connection ends with it. Any thread.

#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

WEFT_COLD inline Status protocol_error(std::string_view what) {
  return make_error(ErrorKind::kProtocol, what);
}

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_PROTOCOL_ERROR_H_
