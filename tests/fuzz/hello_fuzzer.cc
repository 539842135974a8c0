// Any bytes as a hello or as its answer: an error, or a hello within its bounds that survives
// another round.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "weft/rpc/internal/wire/handshake.h"

namespace {

using weft::Hello;
using weft::StatusOr;

void check(bool holds) {
  if (!holds) std::abort();
}

void check_bounds(const Hello& hello) {
  check(hello.version_min >= 1 && hello.version_min <= hello.version_max);
  check(!hello.name.empty() && hello.name.size() <= weft::internal::kMaxNameBytes);
  check(hello.job_id.size() <= weft::internal::kMaxJobIdBytes);
  check(hello.lanes >= 1 && hello.lanes <= weft::internal::kMaxLanes);
  check(hello.max_frame_bytes >= weft::internal::kMinMaxFrameBytes);
}

}  // namespace

// The first byte is the lane.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const int lane = data[0] % 9;
  const std::string_view header(reinterpret_cast<const char*>(data + 1), size - 1);

  std::string token;
  const StatusOr<Hello> hello = weft::internal::decode_hello(header, lane, &token);
  if (hello.ok()) {
    check_bounds(*hello);
    check(token.size() <= weft::internal::kMaxHelloTokenBytes);
    const std::string encoded = weft::internal::encode_hello(*hello, lane, token);
    std::string same;
    const StatusOr<Hello> again = weft::internal::decode_hello(encoded, lane, &same);
    check(again.ok() && weft::internal::encode_hello(*again, lane, same) == encoded);
  } else {
    check(weft::error_kind(hello.status()) == weft::ErrorKind::kProtocol);
  }

  // As the answer to a hello of ours, and to one that it fits.
  Hello sent;
  sent.job_id = "job";
  sent.name = "fuzzer";
  sent.incarnation = 1;
  sent.max_frame_bytes = 1 << 20;
  sent.connection_id = 7;
  const StatusOr<Hello> answer = weft::internal::decode_ack(header, sent, lane);
  if (answer.ok()) {
    check_bounds(*answer);
    check(answer->connection_id == 7 && answer->job_id == "job");
    check(weft::internal::common_version(*answer, sent).ok());
  }
  return 0;
}
