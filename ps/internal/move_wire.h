#ifndef WEFT_PS_INTERNAL_MOVE_WIRE_H_
#define WEFT_PS_INTERNAL_MOVE_WIRE_H_

// What is said about parts that move to other servers, in memory, and the bytes of proto/ps.proto; and which
// of them a server takes over that joins. Decoding is strict, as in wire.h. Pure functions; any thread.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/ps/internal/replica_protocol.h"

namespace weft::ps::internal {

inline constexpr std::string_view kMoveMethod = "@ps.move";
inline constexpr std::string_view kListMethod = "@ps.list";
inline constexpr std::string_view kMoveSignature = "(bytes)->bytes";

// That may have joined a job.
inline constexpr size_t kMostServers = 4096;

struct MoveRequest {
  std::string name{};
  uint32_t index = 0;
  CopyPlace to{};
  uint64_t number = 0;
};
struct ListedPart {
  std::string name{};
  uint32_t index = 0;
  uint64_t bytes = 0;
  bool moves = false;  // to another server, if asked
};

WEFT_API std::string encode(const MoveRequest& request);
WEFT_API std::string encode(const std::vector<ListedPart>& parts);
WEFT_API StatusOr<MoveRequest> decode_move(std::string_view bytes);
WEFT_API StatusOr<std::vector<ListedPart>> decode_listed(std::string_view bytes);
// Names of servers, sorted.
WEFT_API std::string encode_servers(const std::vector<std::string>& names);
WEFT_API StatusOr<std::vector<std::string>> decode_servers(std::string_view bytes);

// At the end, unless it is there.
WEFT_API void add_name(const std::string& name, std::vector<std::string>* names);

// A part, by the server that owns it.
struct OwnedPart {
  std::string server{};
  ListedPart part{};
};
// Those that `to` takes over, so that no server has much more than another: again and again one of the server
// that has most, the largest with which `to` still has less than that server had. A part weighs its bytes, and
// one more. The same for whatever order of `parts`.
WEFT_API std::vector<OwnedPart> share_of(const std::string& to, std::vector<OwnedPart> parts);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_MOVE_WIRE_H_
