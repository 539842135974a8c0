#ifndef WEFT_COLLECTIVES_INTERNAL_HEADER_H_
#define WEFT_COLLECTIVES_INTERNAL_HEADER_H_

// Header: what stands before every message of a group, in the order of bytes of the host (all
// supported ones are little endian), and the check of it.
//
// COLL-2: an operation meets only itself. What differs in group, generation, sequence number or
// fingerprint is refused before data moves; the error names both fingerprints.
//
// A value type; any thread.

#include <cstdint>
#include <string>
#include <type_traits>

#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft::internal {

inline constexpr uint32_t kHeaderMagic = 0x43544657;  // "WFTC"
inline constexpr uint8_t kGroupVersion = 2;

// Sent as numbers: values are never reused.
enum class OpKind : uint8_t {
  kNone = 0,
  kBarrier = 1,
  kAllReduce = 2,
  kBroadcast = 3,
  kReduce = 4,
  kAllGather = 5,
  kGather = 6,
  kScatter = 7,
  kReduceScatter = 8,
  kAllToAll = 9,
  kSend = 10,
  kMonitoredBarrier = 11,
};
inline constexpr uint8_t kOpKinds = 12;
WEFT_API std::string_view op_name(uint8_t op);
// The schedule of an operation that has only one; a literal.
std::string_view schedule_name(uint8_t op);

struct Header {
  uint32_t magic = kHeaderMagic;
  uint8_t version = kGroupVersion;
  uint8_t op = 0;         // OpKind
  uint8_t type = 0;       // ElementType
  uint8_t reduction = 0;  // ReduceOp::Kind
  uint8_t algorithm = 0;  // Algorithm
  uint8_t reserved[3] = {};
  int32_t root = -1;
  uint64_t group = 0;
  uint32_t generation = 0;
  int32_t tag = 0;        // send: the tag
  uint64_t sequence = 0;  // of the operation; 0: a send
  uint64_t count = 0;     // elements
  uint64_t detail = 0;    // a hash of the sizes where they differ; send: dimensions
  uint64_t bytes = 0;     // of this message, after the header

  // "all_reduce #12 (float32 x 1024, sum, ring)".
  WEFT_API std::string describe() const;
  bool same_operation(const Header& other) const {
    return op == other.op && type == other.type && reduction == other.reduction &&
           algorithm == other.algorithm && root == other.root && sequence == other.sequence &&
           count == other.count && detail == other.detail;
  }
};
static_assert(sizeof(Header) == 64 && std::is_trivially_copyable_v<Header>);

// What a header must be whatever the operation: magic, version, group, generation. Error, kind
// protocol.
WEFT_API Status check_origin(const Header& got, uint64_t group, uint32_t generation, int peer);

// A header that `peer` sent where this rank expects `expected`. Errors, kind invalid_argument: the
// operations differ; kind protocol: they agree, and the lengths of their messages do not.
WEFT_API Status check_expected(const Header& got, const Header& expected, int peer);

// A header that waits at this rank, which expects nothing from `peer` now: whether it can ever be
// taken. Error as above.
WEFT_API Status check_ahead(const Header& got, const Header& mine, int peer);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_HEADER_H_
