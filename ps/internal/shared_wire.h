#ifndef WEFT_PS_INTERNAL_SHARED_WIRE_H_
#define WEFT_PS_INTERNAL_SHARED_WIRE_H_

// Where parameters lie in shared memory, and what is said about it, in memory and as the bytes of
// proto/ps.proto. Decoding is strict, as in wire.h. Pure functions; any thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "c10/core/ScalarType.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::ps::internal {

inline constexpr std::string_view kShareMethod = "@ps.share";
inline constexpr std::string_view kShareSignature = "(bytes)->bytes";

// Number of random bytes in a request.
inline constexpr size_t kShareToken = 16;

struct SharedParameter {
  std::string name{};
  c10::ScalarType dtype = c10::ScalarType::Float;  // or Double
  std::vector<int64_t> shape{};

  // At most 2^50, as decoding and layout_of() want it.
  WEFT_API uint64_t bytes() const;
  friend bool operator==(const SharedParameter&, const SharedParameter&) = default;
};

// A count of updates comes first; then the parameters, each in lines of the cache of its own.
struct SharedLayout {
  std::vector<uint64_t> offsets{};  // of the parameters
  uint64_t total = 0;               // whole pages
};
// Kind invalid_argument: it would be too large.
WEFT_API StatusOr<SharedLayout> layout_of(const std::vector<SharedParameter>& parameters);

struct ShareRequest {
  std::string name{};
  std::string socket{};  // of kShareToken bytes, as the next
  std::string secret{};
};
WEFT_API std::string encode(const ShareRequest& request);
WEFT_API StatusOr<ShareRequest> decode_share(std::string_view bytes);
WEFT_API std::string encode(const std::vector<SharedParameter>& parameters);
WEFT_API StatusOr<std::vector<SharedParameter>> decode_shared(std::string_view bytes);

// Name of the asker's local socket: random, so that the owner connects to nothing else.
WEFT_API std::string share_socket_name(std::string_view socket);
// "" when they are the same, else what differs first, with both.
WEFT_API std::string difference(const std::vector<SharedParameter>& there,
                                const std::vector<SharedParameter>& here);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SHARED_WIRE_H_
