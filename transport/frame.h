#ifndef WEFT_TRANSPORT_FRAME_H_
#define WEFT_TRANSPORT_FRAME_H_

// Frames as bytes: the fixed prefix, and the strict split of a message into frames. The layout is
// specified in proto/transport.proto. Value types and pure functions, except FrameReader, which
// belongs to one thread.
//
//   std::string bytes(frame_bytes(frame), '\0');
//   encode_frame(frame, bytes.data());
//   FrameReader reader;
//   Status s = reader.read({bytes}, limits, [](const FrameView& view) { ...; return true; });

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/transport/transport.h"

namespace weft::internal {

inline constexpr uint16_t kFrameMagic = 0x7701;
inline constexpr size_t kPrefixBytes = 16;
inline constexpr size_t kMaxHeaderBytes = 64u << 10;
// Several frames in one message are at most this long together.
inline constexpr size_t kMaxBatchBytes = 64u << 10;

// Which kinds may arrive now.
enum class WireState : uint8_t {
  kAwaitHello,  // an acceptor before the hello
  kAwaitAck,    // a dialler before the answer
  kOpen,
};

struct FrameLimits {
  WireState state = WireState::kOpen;
  size_t max_frame_bytes = 0;  // prefix and header included
};

struct FramePrefix {
  FrameKind kind = FrameKind::kHeartbeat;
  uint32_t header_len = 0;
  uint64_t payload_len = 0;
};

inline size_t frame_bytes(const Frame& frame) {
  return kPrefixBytes + frame.header.size() + frame.payload_bytes();
}

// Writes kPrefixBytes at `out`.
WEFT_API void encode_prefix(FrameKind kind, size_t header_len, size_t payload_len, char* out);
// Writes frame_bytes(frame) at `out`; returns the end.
WEFT_API char* encode_frame(const Frame& frame, char* out);
// REQUIRES: bytes.size() == kPrefixBytes. Checks everything but whether the frame's bytes are
// there.
WEFT_API StatusOr<FramePrefix> decode_prefix(std::string_view bytes, const FrameLimits& limits);
// OK when a sender may send it: kinds of user frames, header and frame within the limits.
WEFT_API Status check_sendable(const Frame& frame, size_t max_frame_bytes);

// Splits messages into frames. Keeps its buffers from one message to the next.
class WEFT_API FrameReader {
 public:
  using Sink = absl::FunctionRef<bool(const FrameView&)>;

  // `pieces` in order are one message. The whole message is checked first; an error means that no
  // frame of it was delivered. Stops without an error when the sink returns false.
  Status read(absl::Span<const std::string_view> pieces, const FrameLimits& limits, Sink sink);

 private:
  struct Cursor;
  Status deliver(Cursor* at, const FramePrefix& prefix, Sink sink, bool* go_on);

  std::string header_;
  std::vector<std::string_view> payload_;
};

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_FRAME_H_
