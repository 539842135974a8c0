// Any bytes as a message of distributed autograd: an error of kind protocol, or something that
// encodes to bytes that mean the same.
//
// Input: a byte that says which of the eight, then the message.

#include <string>
#include <string_view>

#include "weft/dist_autograd/internal/wire.h"
#include "weft/tests/fuzz/target.h"

namespace {

using namespace weft::internal;  // NOLINT: the target's whole subject
using weft::Status;

template <class Decode>
Status twice(std::string_view bytes, const Decode& decode) {
  const auto value = decoded(bytes.size(), [&] { return decode(bytes); });
  if (!value.ok()) {
    require(weft::error_kind(value.status()) == weft::ErrorKind::kProtocol);
    return value.status();
  }
  const std::string again = encode(*value);
  const auto same = decode(again);
  require(same.ok() && encode(*same) == again);
  return absl::OkStatus();
}

}  // namespace

// A participant of two bytes becomes two records of protobuf; a live message of seven, three and an
// entry of a map with a vector.
const size_t kMostBytesPerByte = 144;

Status fuzz_one(std::string_view input) {
  if (input.empty()) return absl::OkStatus();
  const std::string_view bytes = input.substr(1);
  switch (static_cast<uint8_t>(input[0]) % 8) {
    case 0: return twice(bytes, [](std::string_view b) { return decode_autograd(b); });
    case 1: return twice(bytes, [](std::string_view b) { return decode_advance(b); });
    case 2: return twice(bytes, [](std::string_view b) { return decode_advanced(b); });
    case 3: return twice(bytes, [](std::string_view b) { return decode_notice(b); });
    case 4: return twice(bytes, [](std::string_view b) { return decode_release(b); });
    case 5: return twice(bytes, [](std::string_view b) { return decode_norm_request(b); });
    case 6: return twice(bytes, [](std::string_view b) { return decode_norm(b); });
    default: return twice(bytes, [](std::string_view b) { return decode_scale(b); });
  }
}
