// Any bytes as what clients and servers of tables say to each other: an error of kind protocol, or
// something that encodes to bytes that mean the same.
//
// Input: a byte that says which of the four, then the message.

#include <string>
#include <string_view>

#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/wire.h"
#include "weft/tests/fuzz/target.h"

namespace {

using namespace weft::ps::internal;  // NOLINT: the target's whole subject
using weft::Status;

template <class Decode, class Check>
Status twice(std::string_view bytes, const Decode& decode, const Check& check) {
  const auto value = decoded(bytes.size(), [&] { return decode(bytes); });
  if (!value.ok()) {
    require(weft::error_kind(value.status()) == weft::ErrorKind::kProtocol);
    return value.status();
  }
  check(*value);
  const std::string again = encode(*value);
  const auto same = decode(again);
  require(same.ok() && encode(*same) == again);
  return absl::OkStatus();
}

}  // namespace

// A dimension or option of one byte or eight becomes eight bytes in a vector that doubles, beside
// protobuf's own; a server's name of no bytes takes two on the wire, and two strings of 32 in memory.
const size_t kMostBytesPerByte = 160;

Status fuzz_one(std::string_view input) {
  if (input.empty()) return absl::OkStatus();
  const std::string_view bytes = input.substr(1);
  const auto nothing = [](const auto&) {};
  switch (static_cast<uint8_t>(input[0]) % 4) {
    case 0:
      return twice(bytes, decode_open, [](const OpenRequest& open) {
        require(check_name(open.name).ok());
        if (!open.definition.has_value()) return;
        require(check_definition(*open.definition).ok());
        require(open.index < part_count(*open.definition, open.servers.size()));
      });
    case 1:
      return twice(bytes, decode_opened, [](const OpenAnswer& opened) {
        // With two copies 0: another server has the part.
        require((opened.part != 0 || opened.definition.copies > 1) && !opened.servers.empty());
        require(opened.map.epoch == 0 || !opened.map.owner.empty());
        require(check_definition(opened.definition).ok());
      });
    case 2:
      return twice(bytes, decode_request, [](const Request& request) {
        require(request.part != 0 && request.client != 0);
        if (request.push.has_value()) require(request.push->floor <= request.push->number);
      });
    default: return twice(bytes, decode_answer, nothing);
  }
}
