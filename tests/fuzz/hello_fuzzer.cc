// Any bytes as a hello or as its answer: an error, or a hello within its bounds that survives
// another round.
#include <cstdint>
#include <string>
#include <string_view>

#include "weft/common/internal/utf8.h"
#include "weft/tests/fuzz/target.h"
#include "weft/transport/internal/wire/handshake.h"

namespace {

namespace in = weft::internal;
using weft::Hello;
using weft::StatusOr;

void check_bounds(const Hello& hello) {
  require(hello.version_min >= 1 && hello.version_min <= hello.version_max);
  require(!hello.name.empty() && hello.name.size() <= in::kMaxNameBytes);
  require(in::is_line_of_text(hello.name));
  require(hello.job_id.size() <= in::kMaxJobIdBytes);
  require(hello.lanes >= 1 && hello.lanes <= in::kMaxLanes);
  require(hello.max_frame_bytes >= in::kMinMaxFrameBytes);
  require(hello.ticket.size() <= in::kMaxTicketBytes);
}

weft::Status as_hello(std::string_view header, int lane) {
  std::string token;
  const StatusOr<Hello> hello =
      decoded(header.size(), [&] { return in::decode_hello(header, lane, &token); });
  if (!hello.ok()) {
    require(weft::error_kind(hello.status()) == weft::ErrorKind::kProtocol);
    return hello.status();
  }
  check_bounds(*hello);
  require(token.size() <= in::kMaxHelloTokenBytes);
  const std::string encoded = in::encode_hello(*hello, lane, token);
  std::string same;
  const StatusOr<Hello> again = in::decode_hello(encoded, lane, &same);
  require(again.ok() && in::encode_hello(*again, lane, same) == encoded);
  return absl::OkStatus();
}

// To a hello of ours, and to one that it fits.
weft::Status as_answer(std::string_view header, int lane) {
  static const Hello* const sent = [] {
    auto* out = new Hello();
    out->job_id = "job";
    out->name = "fuzzer";
    out->incarnation = 1;
    out->max_frame_bytes = 1 << 20;
    out->connection_id = 7;
    return out;
  }();
  const StatusOr<Hello> answer =
      decoded(header.size(), [&] { return in::decode_ack(header, *sent, lane); });
  if (!answer.ok()) return answer.status();
  check_bounds(*answer);
  require(answer->connection_id == 7 && answer->job_id == "job");
  require(in::common_version(*answer, *sent).ok());
  return absl::OkStatus();
}

}  // namespace

// Protobuf keeps fields that it does not know: an empty group of two bytes becomes some 60.
const size_t kMostBytesPerByte = 64;

// The first byte: the lane, and 128 for an answer.
weft::Status fuzz_one(std::string_view input) {
  if (input.empty()) return absl::OkStatus();
  const auto first = static_cast<uint8_t>(input[0]);
  const int lane = (first & 0x7f) % 9;
  input.remove_prefix(1);
  return first < 0x80 ? as_hello(input, lane) : as_answer(input, lane);
}
