#ifndef WEFT_RPC_INTERNAL_HEADER_H_
#define WEFT_RPC_INTERNAL_HEADER_H_

// Headers of the frames of calls (proto/rpc.proto), read from a frame of an open connection.
// Errors, kind protocol: no correct peer sends them. Pure functions; any thread.

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/proto/rpc.pb.h"
#include "weft/transport/transport.h"

namespace weft::internal {

inline constexpr int kMaxMetadataEntries = 16;
inline constexpr size_t kMaxMetadataBytes = 16 << 10;

// REQUIRES: the frame is of the header's kind.
WEFT_API Status parse_header(const FrameView& frame, v1::CallHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::ResponseHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::ErrorHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::CancelHeader* header);
WEFT_API Status parse_header(const FrameView& frame, v1::GoodbyeHeader* header);

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_HEADER_H_
