// Any bytes as a message of a lane: an error, or frames that encode to the very same bytes. The
// headers of calls in these frames are then read as on an open connection.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/rpc/internal/agent/arena_message.h"
#include "weft/rpc/internal/agent/header.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/tests/fuzz/target.h"
#include "weft/transport/frame.h"

namespace {

namespace in = weft::internal;
using weft::Frame;
using weft::FrameKind;
using weft::FrameView;
using weft::Status;

std::string payload_of(const FrameView& view) {
  std::string payload;
  payload.reserve(view.payload_bytes);
  for (std::string_view piece : view.payload) payload.append(piece);
  require(payload.size() == view.payload_bytes);
  return payload;
}

void encode_again(const FrameView& view, std::string* out) {
  const std::string payload = payload_of(view);
  Frame frame;
  frame.kind = view.kind;
  frame.header = std::string(view.header);
  if (!payload.empty()) frame.payload.push_back({payload.data(), payload.size(), nullptr});
  const size_t at = out->size();
  out->resize(at + in::frame_bytes(frame));
  in::encode_frame(frame, out->data() + at);
}

template <class Header>
Status read_header(const FrameView& view) {
  in::ArenaMessage<Header> header;
  const Status status =
      decoded(view.header.size(), [&] { return in::parse_header(view, header.get()); });
  require(status.ok() || weft::error_kind(status) == weft::ErrorKind::kProtocol);
  return status;
}

Status read_header_of(const FrameView& view) {
  switch (view.kind) {
    case FrameKind::kRequest: return read_header<weft::v1::CallHeader>(view);
    case FrameKind::kResponse: return read_header<weft::v1::ResponseHeader>(view);
    case FrameKind::kCancel: return read_header<weft::v1::CancelHeader>(view);
    case FrameKind::kGoodbye: return read_header<weft::v1::GoodbyeHeader>(view);
    case FrameKind::kHeartbeat: return read_header<weft::v1::HeartbeatHeader>(view);
    case FrameKind::kChunk: {
      uint64_t id = 0;
      uint64_t offset = 0;
      return in::decode_chunk_header(view.header, &id, &offset);
    }
    case FrameKind::kError: {
      weft::v1::ErrorHeader header;
      WEFT_RETURN_IF_ERROR(
          decoded(view.header.size(), [&] { return in::parse_header(view, &header); }));
      // What the caller would be told.
      const std::string payload = payload_of(view);
      const Status told = decoded(payload.size(), [&] {
        return in::unpack_error(header.code(), header.kind(), payload, "somebody");
      });
      require(!told.ok() && weft::error_kind(told) != weft::ErrorKind::kNone);
      return told;
    }
    default: return absl::OkStatus();
  }
}

}  // namespace

// An empty segment of two bytes in a header becomes some 70, an unknown empty group some 60.
const size_t kMostBytesPerByte = 64;

// The first byte says the state of the lane, the second how the message is cut into pieces.
Status fuzz_one(std::string_view input) {
  if (input.size() < 2) return absl::OkStatus();
  const auto first = static_cast<uint8_t>(input[0]);
  const auto second = static_cast<uint8_t>(input[1]);
  const std::string_view message = input.substr(2);
  in::FrameLimits limits;
  limits.state = static_cast<in::WireState>(first % 3);
  limits.max_frame_bytes = size_t{1024} << (first / 3 % 12);
  const size_t step = second == 0 ? message.size() : second;
  static auto& pieces = *new std::vector<std::string_view>();
  static auto& reader = *new in::FrameReader();
  pieces.clear();
  for (size_t at = 0; at < message.size(); at += step) pieces.push_back(message.substr(at, step));

  std::string again;
  again.reserve(message.size());
  Status headers;
  const Status status = decoded(message.size(), [&] {
    return reader.read(pieces, limits, [&](const FrameView& view) {
      Decoding::end();
      encode_again(view, &again);
      if (limits.state == in::WireState::kOpen) note(read_header_of(view), &headers);
      Decoding::begin(0);
      return true;
    });
  });
  if (!status.ok()) {
    require(again.empty());  // nothing of a bad message is delivered
    require(weft::error_kind(status) == weft::ErrorKind::kProtocol);
    return status;
  }
  require(again == message);
  return headers;
}
