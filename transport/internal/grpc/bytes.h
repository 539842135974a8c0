#ifndef WEFT_TRANSPORT_INTERNAL_GRPC_BYTES_H_
#define WEFT_TRANSPORT_INTERNAL_GRPC_BYTES_H_

// Frames to gRPC's byte buffers and gRPC's errors to ours. Pure functions, any thread.

#include <string_view>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include "absl/types/span.h"
#include "weft/common/error.h"
#include "weft/transport/transport.h"

namespace weft::internal {

// A piece of a payload below this is copied: that is cheaper than to keep it.
inline constexpr size_t kCopyBelow = 4096;

// One message from one frame, or from several small ones. Prefixes, headers and small pieces are
// copied into one block; larger pieces stay where they are, and their owners are dropped when gRPC
// needs them no more, on whatever thread that happens.
grpc::ByteBuffer encode_message(absl::Span<Frame> frames);

// transport.md, P14. `what` begins the message: "the connection to ps0 was lost".
Status status_from_grpc(const grpc::Status& status, std::string_view what);

}  // namespace weft::internal

#endif  // WEFT_TRANSPORT_INTERNAL_GRPC_BYTES_H_
