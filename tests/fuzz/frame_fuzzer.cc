// Any bytes as a message of a lane: an error, or frames that encode to the very same bytes.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "weft/rpc/internal/wire/frame.h"

namespace {

using weft::Frame;
using weft::FrameView;
using weft::internal::FrameLimits;
using weft::internal::FrameReader;
using weft::internal::WireState;

void check(bool holds) {
  if (!holds) std::abort();
}

std::string encode_again(const FrameView& view) {
  Frame frame;
  frame.kind = view.kind;
  frame.header = std::string(view.header);
  std::string payload;
  for (std::string_view piece : view.payload) payload.append(piece);
  check(payload.size() == view.payload_bytes);
  if (!payload.empty()) frame.payload.push_back({payload.data(), payload.size(), nullptr});
  std::string out(weft::internal::frame_bytes(frame), '\0');
  weft::internal::encode_frame(frame, out.data());
  return out;
}

}  // namespace

// The first byte says the state of the lane, the second how the message is cut into pieces.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  FrameLimits limits;
  limits.state = static_cast<WireState>(data[0] % 3);
  limits.max_frame_bytes = size_t{1024} << (data[0] / 3 % 12);
  const size_t step = data[1] == 0 ? size : data[1];
  const std::string_view message(reinterpret_cast<const char*>(data + 2), size - 2);
  std::vector<std::string_view> pieces;
  for (size_t at = 0; at < message.size(); at += step) pieces.push_back(message.substr(at, step));

  std::string again;
  FrameReader reader;
  const weft::Status status = reader.read(pieces, limits, [&](const FrameView& view) {
    again += encode_again(view);
    return true;
  });
  if (status.ok()) {
    check(again == message);
  } else {
    check(again.empty());  // nothing of a bad message is delivered
    check(weft::error_kind(status) == weft::ErrorKind::kProtocol);
  }
  return 0;
}
