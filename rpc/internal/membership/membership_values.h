#ifndef WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERSHIP_VALUES_H_
#define WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERSHIP_VALUES_H_

// What the two halves of Membership (membership.cc joins and leaves, membership_watch.cc is the
// thread) write into the store and read there. Pure functions; any thread.

#include <string_view>

#include "absl/time/time.h"
#include "weft/common/error.h"

namespace weft::internal {

// Values of name/NAME and rank/R.
inline constexpr char kFreeClaim[] = "free";
inline constexpr char kSweptClaim[] = "swept ";  // then the incarnation about to delete the name

// Prefix of a value of `abort`.
inline constexpr char kInvalidAbort[] = "invalid ";
Status abort_error(std::string_view reason);

// Timeout of an operation that nothing can interrupt (MEM-7).
inline constexpr absl::Duration kUninterrupted = absl::Seconds(1);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_MEMBERSHIP_MEMBERSHIP_VALUES_H_
