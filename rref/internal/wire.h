#ifndef WEFT_RREF_INTERNAL_WIRE_H_
#define WEFT_RREF_INTERNAL_WIRE_H_

// Between message.h and the bytes of proto/rref.proto. Decoding is strict: an id without a creator
// or counter, a place that is not there, a kind that is unknown are errors of kind protocol. Pure
// functions; any thread.

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/rref/internal/message.h"

namespace weft::internal {

// What rides on a request.
struct RequestData {
  std::optional<Creation> creation{};
  std::optional<Use> use{};
  std::optional<Carrier> carrier{};
};

// `sender`: whose forks they are.
WEFT_API std::string encode(const WorkerKey& sender, const RequestData& request);
WEFT_API StatusOr<RequestData> decode_request(const WorkerKey& sender, std::string_view bytes);
WEFT_API std::string encode(const Carrier& carrier);
WEFT_API StatusOr<Carrier> decode_carrier(const WorkerKey& sender, std::string_view bytes);

// Items for one peer, with the newest floors of all.
WEFT_API std::string encode(const std::vector<Message>& items);
// An item that cannot be read comes with why, in the place of its message.
struct ReceivedItem {
  uint64_t seq = 0;
  StatusOr<Message> message;
};
WEFT_API StatusOr<std::vector<ReceivedItem>> decode_items(std::string_view bytes);

using NumberedReply = std::pair<uint64_t, Reply>;  // by seq
WEFT_API std::string encode(const std::vector<NumberedReply>& replies);
WEFT_API StatusOr<std::vector<NumberedReply>> decode_replies(std::string_view bytes);

}  // namespace weft::internal

#endif  // WEFT_RREF_INTERNAL_WIRE_H_
