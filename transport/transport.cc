#include "weft/transport/transport.h"

#include "absl/strings/str_cat.h"

namespace weft {

StatusOr<Borrowed> Connection::borrow(const Placement& placement, uint64_t length) {
  (void)length;
  return make_error(ErrorKind::kProtocol,
                    absl::StrCat("a message at ", placement.offset,
                                 " of memory that this connection does not share"));
}

std::string_view frame_kind_name(FrameKind kind) {
  switch (kind) {
    case FrameKind::kHello: return "hello";
    case FrameKind::kHelloAck: return "hello_ack";
    case FrameKind::kRequest: return "request";
    case FrameKind::kResponse: return "response";
    case FrameKind::kError: return "error";
    case FrameKind::kChunk: return "chunk";
    case FrameKind::kTransferAbort: return "transfer_abort";
    case FrameKind::kCancel: return "cancel";
    case FrameKind::kHeartbeat: return "heartbeat";
    case FrameKind::kGoodbye: return "goodbye";
    case FrameKind::kArenaProbe: return "arena_probe";
    case FrameKind::kArenaFree: return "arena_free";
    case FrameKind::kDataOffer: return "data_offer";
    case FrameKind::kDataEnd: return "data_end";
    case FrameKind::kLanesWanted: return "lanes_wanted";
  }
  return "unknown";
}

}  // namespace weft
