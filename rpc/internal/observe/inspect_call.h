#ifndef WEFT_RPC_INTERNAL_OBSERVE_INSPECT_CALL_H_
#define WEFT_RPC_INTERNAL_OBSERVE_INSPECT_CALL_H_

// The one call that an observer may make, as both sides see it. Values.

#include <cstdint>
#include <string>

#include "weft/common/error.h"
#include "weft/rpc/payload.h"

namespace weft::internal {

inline constexpr char kInspectMethod[] = "@weft.inspect";
// Format, most rows of a table, whether with the counters; the answer is to be printed.
inline constexpr char kInspectSignature[] = "(string,int,bool)->string";
inline constexpr int64_t kMostInspectRows = 100'000;

struct InspectRequest {
  bool json = false;
  int64_t most_rows = 1000;
  bool counters = false;
};
Payload encode(const InspectRequest& request);
StatusOr<InspectRequest> decode_inspect_request(Payload payload);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_OBSERVE_INSPECT_CALL_H_
