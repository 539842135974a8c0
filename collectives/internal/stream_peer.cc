#include "weft/collectives/internal/stream_peer.h"

#include <sys/uio.h>

#include <algorithm>
#include <utility>

namespace weft::internal {
namespace {

// After so many bytes out, what has come is read: two ranks that write to each other then keep few
// bytes under way, which stay in the caches.
constexpr uint64_t kTurnBytes = 1 << 20;

}  // namespace

bool StreamPeer::write(Streams& streams, int lane, Outbox* box, size_t* left, bool* moved) {
  uint64_t room = kTurnBytes;
  while (!box->messages.empty() && room > 0) {
    const Outgoing& out = *box->messages.front();
    iovec parts[2];
    size_t count = 0;
    if (box->sent < sizeof(Header)) {
      parts[count++] = {const_cast<char*>(reinterpret_cast<const char*>(&out.header)) + box->sent,
                        sizeof(Header) - box->sent};
    }
    const uint64_t body = box->sent > sizeof(Header) ? box->sent - sizeof(Header) : 0;
    if (body < out.header.bytes) {
      parts[count++] = {const_cast<char*>(out.data) + body,
                        std::min(room, out.header.bytes - body)};
    }
    size_t n = 0;
    const Moved what = streams.write(rank, lane, parts, count, &n);
    if (what == Moved::kNothing && !over(streams)) return true;
    if (what != Moved::kBytes) return false;
    *moved = true;
    box->sent += n;
    room -= std::min<uint64_t>(room, n);
    if (box->sent < sizeof(Header) + out.header.bytes) continue;
    box->messages.pop_front();
    box->sent = 0;
    --*left;
  }
  return true;
}

Status StreamPeer::read_data(Streams& streams, const Membership& member, const Header& mine,
                             size_t* left, bool* moved) {
  while (!data_ended) {
    if (header_got < sizeof(Header)) {
      size_t got = 0;
      char* const place = reinterpret_cast<char*>(&header) + header_got;
      const Moved what = streams.read(rank, kDataLane, place, sizeof(Header) - header_got, &got);
      if (what == Moved::kNothing && !over(streams)) break;
      if (what != Moved::kBytes) {
        data_ended = true;
        break;
      }
      *moved = true;
      header_got += got;
      if (header_got < sizeof(Header)) continue;
      WEFT_RETURN_IF_ERROR(check_origin(header, member.group, member.generation, rank));
    }
    if (receives.empty()) return check_ahead(header, mine, rank);
    const Incoming& in = *receives.front();
    if (!header_checked_) {
      WEFT_RETURN_IF_ERROR(check_expected(header, in.expected, rank));
      header_checked_ = true;
    }
    if (body_got_ < in.expected.bytes) {
      if (!read_body(streams, in)) break;
      *moved = true;
      if (body_got_ < in.expected.bytes) continue;
    }
    last = header;
    header_got = 0;
    header_checked_ = false;
    body_got_ = 0;
    receives.pop_front();
    --*left;
    *moved = true;
  }
  return absl::OkStatus();
}

size_t StreamPeer::awaited_bytes() const {
  if (header_got < sizeof(Header)) return sizeof(Header) - header_got;
  if (receives.empty()) return 0;
  const Incoming& in = *receives.front();
  const uint64_t rest = in.expected.bytes - body_got_;
  if (in.taker == nullptr) return rest;
  return std::min(rest, kPieceBytes - body_got_ % kPieceBytes);
}

bool StreamPeer::read_body(Streams& streams, const Incoming& in) {
  const bool pieces = in.taker != nullptr;
  const uint64_t begun = pieces ? body_got_ % kPieceBytes : 0;  // of the piece
  const uint64_t rest = in.expected.bytes - body_got_;
  char* const to = in.data + (pieces ? begun : body_got_);
  size_t got = 0;
  const Moved what =
      streams.read(rank, kDataLane, to, pieces ? std::min(rest, kPieceBytes - begun) : rest, &got);
  if (what == Moved::kNothing && !over(streams)) return false;
  if (what != Moved::kBytes) {
    data_ended = true;
    return false;
  }
  body_got_ += got;
  const uint64_t piece = begun + got;
  if (pieces && (piece == kPieceBytes || body_got_ == in.expected.bytes)) {
    in.taker->take(body_got_ - piece, in.data, piece);
  }
  return true;
}

Status StreamPeer::read_points(Streams& streams, uint64_t room, std::deque<PointMessage>* parked,
                               uint64_t* parked_bytes, bool* moved) {
  while (!points_ended && *parked_bytes < room) {
    size_t space = 0;
    char* const place = reader.place(&space);
    size_t got = 0;
    const Moved what = streams.read(rank, kPointLane, place, space, &got);
    if (what == Moved::kNothing && !over(streams)) break;
    if (what != Moved::kBytes) {
      points_ended = true;
      break;
    }
    *moved = true;
    WEFT_RETURN_IF_ERROR(reader.took(got));
    if (!reader.whole()) continue;
    PointMessage message;
    message.peer = rank;
    message.header = reader.take(&message.body);
    *parked_bytes += message.header.bytes;
    parked->push_back(std::move(message));
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
