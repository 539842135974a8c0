#include "weft/rpc/transport.h"

namespace weft {

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
  }
  return "unknown";
}

}  // namespace weft
