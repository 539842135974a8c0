// The receiving half of wide messages (proto/rpc.proto, CALL-6): one transfer, of which the first
// bytes are the header and say where the others belong.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/agent/incoming.h"
#include "weft/transport/protocol_error.h"

namespace weft::internal {
namespace {

// What a header becomes when it is read: an empty segment of two bytes some 90.
constexpr uint64_t kReadFactor = 48;
// What is known of a tensor besides its bytes.
constexpr uint64_t kSegmentBytes = 512;

// The pieces of a frame, or one piece.
FrameView chunk_of(absl::Span<const std::string_view> pieces, size_t bytes) {
  return FrameView{FrameKind::kChunk, {}, pieces, bytes};
}

}  // namespace

Status Assembler::begin_wide(const v1::Layout& layout, const FrameView& frame,
                             Connection* connection, Open open, Delivered delivered,
                             const Purpose& purpose) {
  const uint64_t id = layout.wide_transfer();
  const uint64_t header_length = layout.wide_header_length();
  const uint64_t length = layout.wide_length();
  if (layout.segments_size() > 0 || !layout.tensor_metas().empty() || frame.payload_bytes > 0) {
    return protocol_error(absl::StrCat("a wide message with ", layout.segments_size(),
                                       " segments and ", frame.payload_bytes,
                                       " bytes of payload in its frame"));
  }
  if (id == 0 || header_length == 0 || header_length > length ||
      header_length > kMaxWideHeaderBytes) {
    return protocol_error(absl::StrCat("a wide message whose transfer ", id, " has ", length,
                                       " bytes with a header of ", header_length));
  }
  Status taken;
  const uint64_t charge = length + kReadFactor * header_length;
  if (length > limits_.max_message_bytes) {
    taken = make_error(ErrorKind::kResource,
                       absl::StrCat("a message of ", length, " bytes, more than ",
                                    limits_.max_message_bytes, " (WEFT_MAX_MESSAGE_BYTES)"));
  } else {
    taken = budget_->charge(charge);
    if (!taken.ok() && budget_->may_fit(charge)) taken = no_room_now(taken);
  }
  std::shared_ptr<Incoming> message;  // null: refused
  if (taken.ok()) {
    message = std::make_shared<Incoming>();
    message->charged = charge;
    message->open_transfers = 1;
    message->delivered = delivered;
    message->purpose = purpose;
    message->wide = std::make_unique<WideParts>();
    message->wide->header.resize(header_length);
    message->wide->header_length = header_length;
    message->wide->length = length;
    message->wide->connection = connection;
    message->wide->open = std::move(open);
  }
  std::vector<Parked> parked;
  Status violation;
  {
    MutexLock lock(&mutex_);
    max_announced_ = std::max(max_announced_, id);
    if (transfers_.size() >= kMaxOpenTransfers) {
      violation =
          protocol_error(absl::StrCat("more than ", kMaxOpenTransfers, " transfers at once"));
    } else {
      Transfer transfer{message, nullptr, length};
      transfer.wide = true;
      if (!transfers_.emplace(id, std::move(transfer)).second) {
        violation = protocol_error(absl::StrCat("transfer ", id, " announced twice"));
      }
    }
    const auto at = parked_.find(id);
    if (violation.ok() && at != parked_.end()) {
      parked = std::move(at->second);
      for (const Parked& chunk : parked) parked_bytes_ -= chunk.bytes.size() + kParkedBytes;
      parked_.erase(at);
    }
  }
  if (!violation.ok()) {
    if (message != nullptr) budget_->release(charge);
    return violation;
  }
  if (!taken.ok()) delivered(taken);
  for (const Parked& chunk : parked) {
    const std::string_view piece = chunk.bytes;
    const FrameView in = chunk_of(absl::MakeConstSpan(&piece, 1), piece.size());
    WEFT_RETURN_IF_ERROR(take_wide(id, chunk.offset, piece.size(), &in));
  }
  return absl::OkStatus();
}

Status Assembler::take_wide(uint64_t id, uint64_t offset, uint64_t bytes, const FrameView* in) {
  std::shared_ptr<Incoming> message;
  {
    MutexLock lock(&mutex_);
    const auto it = transfers_.find(id);
    if (it == transfers_.end()) {
      // abandon() was here, or what a chunk on another lane has ended.
      if (in == nullptr) return absl::OkStatus();
      return protocol_error(absl::StrCat("chunk of transfer ", id, ", which is over"));
    }
    Transfer& t = it->second;
    if (offset != t.received || bytes == 0 || bytes > t.length - t.received || t.filling > 0 ||
        t.busy) {
      return protocol_error(absl::StrCat("chunk of transfer ", id, " at ", offset, "+", bytes,
                                         ", expected ", t.received + t.filling, " of ", t.length));
    }
    if (t.message == nullptr) {
      took_locked(id, bytes, nullptr);
      return absl::OkStatus();
    }
    t.busy = true;
    message = t.message;
  }
  Status refused;
  const Status placed = place_wide(message.get(), offset, bytes, in, &refused);
  std::shared_ptr<Incoming> complete;
  Delivered told;
  {
    MutexLock lock(&mutex_);
    const auto it = transfers_.find(id);
    if (it == transfers_.end()) {
      budget_->release(message->charged);  // abandon() leaves it to the thread that set `busy`
      return placed;
    }
    Transfer& t = it->second;
    t.busy = false;
    if (!placed.ok()) return placed;
    if (!refused.ok()) {
      told = std::move(message->delivered);
      budget_->release(message->charged);
      t.message = nullptr;
    }
    took_locked(id, bytes, &complete);
  }
  if (told != nullptr) told(refused);
  if (complete != nullptr) finish(complete);
  return absl::OkStatus();
}

Status Assembler::place_wide(Incoming* message, uint64_t offset, uint64_t bytes,
                             const FrameView* in, Status* refused) {
  WideParts& wide = *message->wide;
  std::optional<PayloadReader> reader;
  if (in != nullptr) reader.emplace(*in);
  if (wide.open != nullptr) {
    const uint64_t n = std::min(bytes, wide.header_length - offset);
    if (reader.has_value()) reader->read(wide.header.data() + offset, n, wide.header_length);
    if (offset + n < wide.header_length) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(open_wide(message, refused));
    if (!refused->ok()) return absl::OkStatus();
    bytes -= n;
  }
  // As many as there are places for: open_wide() has compared them with the transfer.
  while (bytes > 0) {
    const auto& [target, length] = wide.places[wide.at];
    const uint64_t n = std::min(bytes, length - wide.filled);
    if (reader.has_value()) reader->read(target + wide.filled, n, length);
    wide.advance(n);
    bytes -= n;
  }
  return absl::OkStatus();
}

Status Assembler::open_wide(Incoming* message, Status* refused) {
  WideParts& wide = *message->wide;
  const Open open = std::exchange(wide.open, nullptr);
  WEFT_ASSIGN_OR_RETURN(Opened opened, open(wide.header));
  wide.header = std::string();
  const v1::Layout& layout = *opened.layout;
  if (is_wide(layout)) return protocol_error("a wide message in a wide message");
  for (const v1::Segment& s : layout.segments()) {
    if (s.transfer_id() == 0) continue;
    return protocol_error(absl::StrCat("a segment of transfer ", s.transfer_id(),
                                       " in a wide message, which has one transfer of its own"));
  }
  message->delivered = std::move(opened.delivered);
  const auto charge_more = [&](uint64_t bytes) {
    *refused = budget_->charge(bytes);
    if (refused->ok()) {
      message->charged += bytes;
    } else if (budget_->may_fit(message->charged + bytes)) {
      *refused = no_room_now(*refused);
    }
    return refused->ok();
  };
  const uint64_t segments = static_cast<uint64_t>(layout.segments_size());
  if (!charge_more(kSegmentBytes * segments)) return absl::OkStatus();
  uint64_t bytes = 0;  // of memory to be made
  const uint64_t rest = wide.length - wide.header_length;
  if (Status valid = validate(layout, rest, &bytes, &message->metas); !valid.ok()) {
    if (error_kind(valid) != ErrorKind::kResource) return valid;
    *refused = std::move(valid);
    return absl::OkStatus();
  }
  // Copies of what lies in an arena and may not stay there.
  if (!charge_more(std::max(bytes, rest) - rest)) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(Places places, borrow_places(layout, wide.connection));
  message->payload.body.resize(layout.segments(0).length());
  if (Status filled = fill_buffers(layout, std::move(places), message); !filled.ok()) {
    if (error_kind(filled) == ErrorKind::kProtocol) return filled;
    *refused = std::move(filled);
    return absl::OkStatus();
  }
  const uint64_t read = kReadFactor * wide.header_length;  // all of it but the metadata is over
  budget_->release(read);
  message->charged -= read;
  wide.places.reserve(segments);
  const auto add = [&](char* target, const v1::Segment& s) {
    if (s.length() > 0 && !s.has_arena_offset()) wide.places.emplace_back(target, s.length());
  };
  add(message->payload.body.data(), layout.segments(0));
  int i = 1;
  for (Buffers& buffers : message->buffers) {
    for (at::Tensor& b : buffers) {
      add(static_cast<char*>(b.mutable_data_ptr()), layout.segments(i++));
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
