#include "weft/transport/frame.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/protocol_error.h"

namespace weft::internal {
namespace {

void store16(char* p, uint16_t v) {
  p[0] = static_cast<char>(v & 0xff);
  p[1] = static_cast<char>(v >> 8);
}
void store32(char* p, uint32_t v) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<char>((v >> (8 * i)) & 0xff);
}
void store64(char* p, uint64_t v) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<char>((v >> (8 * i)) & 0xff);
}
uint64_t load(const char* p, int bytes) {
  uint64_t v = 0;
  for (int i = 0; i < bytes; ++i) v |= uint64_t{static_cast<unsigned char>(p[i])} << (8 * i);
  return v;
}

bool known_kind(uint8_t kind) {
  return kind >= static_cast<uint8_t>(FrameKind::kHello) &&
         kind <= static_cast<uint8_t>(FrameKind::kLanesWanted);
}

bool handshake_kind(FrameKind kind) {
  return kind == FrameKind::kHello || kind == FrameKind::kHelloAck;
}

bool allowed(FrameKind kind, WireState state) {
  switch (state) {
    case WireState::kAwaitHello: return kind == FrameKind::kHello;
    case WireState::kAwaitAck: return kind == FrameKind::kHelloAck;
    case WireState::kOpen: return !handshake_kind(kind);
  }
  return false;
}

std::string_view state_name(WireState state) {
  switch (state) {
    case WireState::kAwaitHello: return "before the hello";
    case WireState::kAwaitAck: return "before the answer to the hello";
    case WireState::kOpen: return "on an open connection";
  }
  return "?";
}

}  // namespace

void encode_prefix(FrameKind kind, size_t header_len, size_t payload_len, char* out) {
  store16(out, kFrameMagic);
  out[2] = static_cast<char>(kind);
  out[3] = 0;
  store32(out + 4, static_cast<uint32_t>(header_len));
  store64(out + 8, payload_len);
}

char* encode_frame(const Frame& frame, char* out) {
  encode_prefix(frame.kind, frame.header.size(), frame.payload_bytes(), out);
  out += kPrefixBytes;
  std::memcpy(out, frame.header.data(), frame.header.size());
  out += frame.header.size();
  for (const Slice& slice : frame.payload) {
    if (slice.size > 0) std::memcpy(out, slice.data, slice.size);
    out += slice.size;
  }
  return out;
}

StatusOr<FramePrefix> decode_prefix(std::string_view bytes, const FrameLimits& limits) {
  const char* p = bytes.data();
  const auto magic = static_cast<uint16_t>(load(p, 2));
  if (magic != kFrameMagic) {
    return protocol_error(absl::StrCat("a frame begins with 0x", absl::Hex(magic, absl::kZeroPad4),
                                       ", not with 0x", absl::Hex(kFrameMagic)));
  }
  const auto kind = static_cast<uint8_t>(p[2]);
  if (!known_kind(kind)) return protocol_error(absl::StrCat("unknown frame kind ", kind));
  if (p[3] != 0) {
    return protocol_error(
        absl::StrCat("unknown frame flags 0x", absl::Hex(static_cast<unsigned char>(p[3]))));
  }
  FramePrefix prefix;
  prefix.kind = static_cast<FrameKind>(kind);
  prefix.header_len = static_cast<uint32_t>(load(p + 4, 4));
  prefix.payload_len = load(p + 8, 8);
  if (!allowed(prefix.kind, limits.state)) {
    return protocol_error(absl::StrCat("a frame of kind ", view(frame_kind_name(prefix.kind)), " ",
                                       view(state_name(limits.state))));
  }
  if (prefix.header_len > kMaxHeaderBytes) {
    return protocol_error(absl::StrCat("a frame header of ", prefix.header_len,
                                       " bytes, the limit is ", kMaxHeaderBytes));
  }
  // By subtraction: payload_len may be anything up to 2^64-1.
  const size_t fixed = kPrefixBytes + prefix.header_len;
  if (fixed > limits.max_frame_bytes || prefix.payload_len > limits.max_frame_bytes - fixed) {
    return protocol_error(absl::StrCat("a frame with a header of ", prefix.header_len,
                                       " and a payload of ", prefix.payload_len,
                                       " bytes, the limit is ", limits.max_frame_bytes));
  }
  if (handshake_kind(prefix.kind) && prefix.payload_len != 0) {
    return protocol_error(
        absl::StrCat("a ", view(frame_kind_name(prefix.kind)), " with a payload"));
  }
  return prefix;
}

Status check_sendable(const Frame& frame, size_t max_frame_bytes) {
  if (!known_kind(static_cast<uint8_t>(frame.kind)) || handshake_kind(frame.kind)) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("frames of kind ", static_cast<int>(frame.kind), " are the transport's own"));
  }
  if (frame.header.size() > kMaxHeaderBytes) {
    return make_error(
        ErrorKind::kResource,
        absl::StrCat("a ", view(frame_kind_name(frame.kind)), " frame has a header of ",
                     frame.header.size(), " bytes, the limit is ", kMaxHeaderBytes));
  }
  const size_t bytes = frame_bytes(frame);
  if (bytes > max_frame_bytes) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat("a ", view(frame_kind_name(frame.kind)), " frame of ", bytes,
                                   " bytes, the peer accepts ", max_frame_bytes));
  }
  return absl::OkStatus();
}

// A place in a message that lies in pieces.
struct FrameReader::Cursor {
  absl::Span<const std::string_view> pieces;
  size_t piece = 0;
  size_t offset = 0;
  size_t left = 0;  // bytes from here to the end

  explicit Cursor(absl::Span<const std::string_view> p) : pieces(p) {
    for (std::string_view s : pieces) left += s.size();
  }
  // Up to `n` bytes that lie together; empty only at the end.
  std::string_view next(size_t n) {
    while (piece < pieces.size() && offset == pieces[piece].size()) {
      ++piece;
      offset = 0;
    }
    if (piece == pieces.size()) return {};
    std::string_view part = pieces[piece].substr(offset, n);
    offset += part.size();
    left -= part.size();
    return part;
  }
  // REQUIRES: n <= left.
  void skip(size_t n) {
    while (n > 0) n -= next(n).size();
  }
  // REQUIRES: n <= left. In place when the bytes lie together, else copied to `scratch`.
  std::string_view take(size_t n, std::string* scratch) {
    std::string_view part = next(n);
    if (part.size() == n) return part;
    scratch->assign(part);
    while (scratch->size() < n) scratch->append(next(n - scratch->size()));
    return *scratch;
  }
};

Status FrameReader::deliver(Cursor* at, const FramePrefix& prefix, Sink sink, bool* go_on) {
  FrameView view;
  view.kind = prefix.kind;
  view.header = at->take(prefix.header_len, &header_);
  view.payload_bytes = prefix.payload_len;
  payload_.clear();
  for (size_t left = prefix.payload_len; left > 0;) {
    payload_.push_back(at->next(left));
    left -= payload_.back().size();
  }
  view.payload = payload_;
  *go_on = sink(view);
  return absl::OkStatus();
}

Status FrameReader::read(absl::Span<const std::string_view> pieces, const FrameLimits& limits,
                         Sink sink) {
  std::string scratch;
  Cursor check(pieces);
  const size_t message_bytes = check.left;
  FramePrefix first;
  size_t frames = 0;
  if (message_bytes == 0) return protocol_error("an empty message");
  while (check.left > 0) {
    if (check.left < kPrefixBytes) {
      return protocol_error(absl::StrCat("a message of ", message_bytes, " bytes ends inside of a ",
                                         "frame's prefix: ", check.left, " bytes are left"));
    }
    WEFT_ASSIGN_OR_RETURN(const FramePrefix prefix,
                          decode_prefix(check.take(kPrefixBytes, &scratch), limits));
    const size_t body = prefix.header_len + prefix.payload_len;
    if (body > check.left) {
      return protocol_error(absl::StrCat("a frame announces ", body, " bytes after its prefix, ",
                                         check.left, " are left of a message of ", message_bytes));
    }
    check.skip(body);
    if (frames == 0) first = prefix;
    ++frames;
  }
  if (frames > 1 && message_bytes > kMaxBatchBytes) {
    return protocol_error(absl::StrCat(frames, " frames in one message of ", message_bytes,
                                       " bytes, the limit is ", kMaxBatchBytes));
  }
  if (frames > 1 && limits.state != WireState::kOpen) {
    return protocol_error(
        absl::StrCat(frames, " frames in the message of a ", view(frame_kind_name(first.kind))));
  }
  Cursor at(pieces);
  bool go_on = true;
  for (size_t i = 0; i < frames && go_on; ++i) {
    FramePrefix prefix = first;
    if (i == 0) {
      at.skip(kPrefixBytes);
    } else {
      WEFT_ASSIGN_OR_RETURN(prefix, decode_prefix(at.take(kPrefixBytes, &scratch), limits));
    }
    WEFT_RETURN_IF_ERROR(deliver(&at, prefix, sink, &go_on));
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
