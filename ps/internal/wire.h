#ifndef WEFT_PS_INTERNAL_WIRE_H_
#define WEFT_PS_INTERNAL_WIRE_H_

// What clients and servers say to each other, in memory, and the bytes of proto/ps.proto. Decoding
// is strict: a part, client or push without a number, an unknown kind, a definition that
// check_definition() refuses are errors of kind protocol. Pure functions; any thread.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/error.h"
#include "weft/ps/internal/replica_protocol.h"
#include "weft/ps/table.h"
#include "weft/rpc/payload.h"

namespace weft::ps::internal {

inline constexpr std::string_view kOpenMethod = "@ps.open";
inline constexpr std::string_view kOpenSignature = "(bytes)->bytes";
inline constexpr std::string_view kCallMethod = "@ps.call";
inline constexpr std::string_view kCallSignature =
    "(tuple<bytes,list<tensor>>)->tuple<bytes,list<tensor>>";

struct OpenRequest {
  std::string name{};
  std::optional<TableDefinition> definition{};
  std::vector<std::string> servers{};
  uint32_t index = 0;  // of the part
};
struct OpenAnswer {
  uint64_t part = 0;
  TableDefinition definition{};
  std::vector<std::string> servers{};
  RangeMap map{};  // two copies; `part` is 0 when another server has it
};

enum class PushKind : uint8_t { kGradient = 1, kAssign = 2 };

struct PushHeader {
  uint64_t number = 0;
  uint64_t floor = 0;
  uint64_t clock = 0;
  uint64_t version = 0;
  PushKind kind = PushKind::kGradient;
  std::optional<double> rate{};
};
struct PullHeader {
  std::optional<uint64_t> clock{};
  uint64_t at_least = 0;
};
struct Request {
  uint64_t part = 0;
  uint64_t client = 0;
  std::optional<uint64_t> enter{};
  std::optional<PushHeader> push{};
  std::optional<uint64_t> advance{};
  std::optional<PullHeader> pull{};
  bool leave = false;
  uint64_t epoch = 0;  // two copies
};
struct Answer {
  uint64_t version = 0;
  uint64_t clock = 0;
  bool dropped = false;
  uint64_t behind = 0;
  uint64_t lag = 0;
  RangeMap map{};
  bool moved = false;
};

// What a part says to one request.
struct Reply {
  Answer answer{};
  std::vector<at::Tensor> tensors{};
};

WEFT_API std::string encode(const OpenRequest& request);
WEFT_API std::string encode(const OpenAnswer& answer);
WEFT_API std::string encode(const Request& request);
WEFT_API std::string encode(const Answer& answer);
WEFT_API StatusOr<OpenRequest> decode_open(std::string_view bytes);
WEFT_API StatusOr<OpenAnswer> decode_opened(std::string_view bytes);
WEFT_API StatusOr<Request> decode_request(std::string_view bytes);
WEFT_API StatusOr<Answer> decode_answer(std::string_view bytes);

// Bytes and tensors, as the arguments or the result of kCallMethod; bytes alone, of kOpenMethod.
struct Parcel {
  std::string bytes{};
  std::vector<at::Tensor> tensors{};
};
WEFT_API StatusOr<Payload> pack(Parcel parcel);
WEFT_API StatusOr<Parcel> unpack(Payload payload);
WEFT_API Payload pack_bytes(const std::string& bytes);
WEFT_API StatusOr<std::string> unpack_bytes(Payload payload);

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_WIRE_H_
