// The sending half of wide messages (proto/rpc.proto, CALL-6).

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/message.h"

namespace weft::internal {
namespace {

// Segments below this are gathered: as pieces of their own they cost more than a copy.
constexpr size_t kGathered = 1 << 10;
// A piece of this size begins a chunk and ends one, so that its receiver can read it into place.
constexpr size_t kApart = 64 << 10;
constexpr size_t kMostPieces = 256;  // of a chunk

struct Gathered {
  std::string bytes;
  OutMessageRef message;  // what counts as under way while its bytes are
};

}  // namespace

bool fits_frame(const Connection& connection, size_t header_bytes, const OutMessage& message) {
  return header_bytes <= kMaxHeaderBytes && (message.riding <= kMaxMetadataBytesOfVersion1 ||
                                             connection.peer().version_max >= kWideVersion);
}

Status check_takes_wide(const Connection& connection, const OutMessage& message) {
  if (connection.peer().version_max >= kWideVersion) return absl::OkStatus();
  return make_error(
      ErrorKind::kUnimplemented,
      absl::StrCat(message.buffers.size(), " tensor buffers and ", message.riding,
                   " bytes of metadata are too many for one message to '", connection.peer().name,
                   "', which speaks protocol version ", connection.peer().version_max, "; version ",
                   kWideVersion, " has no bound on them"));
}

Status check_wide_size(size_t header_bytes, const OutMessage& message,
                       const MessageLimits& limits) {
  if (header_bytes > kMaxWideHeaderBytes) {
    return make_error(
        ErrorKind::kResource,
        absl::StrCat("the header of a message with ", message.buffers.size(),
                     " tensor buffers and ", message.riding, " bytes of metadata needs ",
                     header_bytes, " bytes; it may have ", kMaxWideHeaderBytes));
  }
  if (header_bytes <= limits.max_message_bytes - message.bytes) return absl::OkStatus();
  return make_error(ErrorKind::kResource,
                    absl::StrCat("a message of ", message.bytes, " bytes with a header of ",
                                 header_bytes, " exceeds the bound of ", limits.max_message_bytes,
                                 " (WEFT_MAX_MESSAGE_BYTES)"));
}

void put_brief(const v1::CallHeader& header, v1::CallHeader* out) {
  out->set_call_id(header.call_id());
  out->set_attempt(header.attempt());
  if (header.has_remaining_us()) out->set_remaining_us(header.remaining_us());
}
void put_brief(const v1::ResponseHeader& header, v1::ResponseHeader* out) {
  out->set_call_id(header.call_id());
}
// An error has one segment, so it is never wide.
void put_brief(const v1::ErrorHeader& header, v1::ErrorHeader* out) {
  out->set_call_id(header.call_id());
  out->set_code(header.code());
  out->set_kind(header.kind());
  out->set_reach(header.reach());
}

WideStream make_stream(std::string header, const v1::Layout& layout, const OutMessageRef& message) {
  WideStream out;
  auto gathered = std::make_shared<Gathered>(Gathered{std::move(header), message});
  const auto flush = [&] {
    if (gathered->bytes.empty()) return;
    out.length += gathered->bytes.size();
    const std::string& bytes = gathered->bytes;
    out.pieces.push_back(Slice{bytes.data(), bytes.size(), gathered});
    gathered = std::make_shared<Gathered>(Gathered{{}, message});
  };
  for (int i = 0; i < layout.segments_size(); ++i) {
    if (layout.segments(i).has_arena_offset()) continue;
    const std::string_view segment = message->segment(static_cast<size_t>(i));
    if (segment.size() < kGathered) {
      gathered->bytes.append(segment);
      continue;
    }
    flush();
    out.length += segment.size();
    out.pieces.push_back(Slice{segment.data(), segment.size(), message});
  }
  flush();
  return out;
}

Status send_stream(Connection* connection, FrameKind kind, std::string brief, uint64_t transfer,
                   WideStream stream, const MessageLimits& limits, uint64_t cookie, int bulk_lane,
                   bool* begun) {
  // A connection without a lane for bulk has the other one.
  const int lane = connection->bulk_lanes().count < 1 ? kControlLane : bulk_lane;
  weft::Frame first;
  first.kind = kind;
  first.header = std::move(brief);
  WEFT_RETURN_IF_ERROR(connection->send(std::move(first), lane));
  *begun = true;
  const size_t chunk_bytes = fitting_chunk(limits, connection->peer());
  weft::Frame chunk;
  size_t filled = 0;
  uint64_t offset = 0;
  const auto flush = [&]() -> Status {
    if (filled == 0) return absl::OkStatus();
    chunk.kind = FrameKind::kChunk;
    chunk.header = encode_chunk_header(transfer, offset);
    offset += std::exchange(filled, 0);
    // The callee runs nothing before the last one.
    if (offset == stream.length) chunk.cookie = cookie;
    return connection->send(std::exchange(chunk, weft::Frame()), lane);
  };
  for (Slice& piece : stream.pieces) {
    const bool apart = piece.size >= kApart;
    if (apart) WEFT_RETURN_IF_ERROR(flush());
    for (size_t at = 0; at < piece.size;) {
      const size_t n = std::min(chunk_bytes - filled, piece.size - at);
      chunk.payload.push_back(Slice{piece.data + at, n, piece.owner});
      filled += n;
      at += n;
      if (filled == chunk_bytes || chunk.payload.size() == kMostPieces) {
        WEFT_RETURN_IF_ERROR(flush());
      }
    }
    if (apart) WEFT_RETURN_IF_ERROR(flush());
    piece.owner = nullptr;
  }
  return flush();
}

}  // namespace weft::internal
