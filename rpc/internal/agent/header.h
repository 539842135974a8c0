#ifndef WEFT_RPC_INTERNAL_AGENT_HEADER_H_
#define WEFT_RPC_INTERNAL_AGENT_HEADER_H_

// Headers of the frames of calls (proto/rpc.proto), read from a frame of an open connection.
// Errors, kind protocol: no correct peer sends them. Pure functions; any thread.

#include <string_view>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/proto/rpc.pb.h"
#include "weft/transport/transport.h"

namespace weft::internal {

inline constexpr int kMaxMetadataEntries = 16;

// REQUIRES: the frame is of the header's kind.
WEFT_API Status parse_header(const FrameView& frame, v1::CallHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::ResponseHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::ErrorHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::CancelHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::GoodbyeHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::HeartbeatHeader* header);

// The header of a wide message, for which `brief` stands in its frame.
WEFT_API Status parse_wide(std::string_view bytes, const v1::CallHeader& brief,
                           v1::CallHeader* header);
WEFT_API Status parse_wide(std::string_view bytes, const v1::ResponseHeader& brief,
                           v1::ResponseHeader* header);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_HEADER_H_
