#include "weft/transport/internal/grpc/bytes.h"

#include <cstring>
#include <utility>

#include <grpc/slice.h>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"
#include "weft/transport/frame.h"

namespace weft::internal {
namespace {

using Owner = std::shared_ptr<const void>;

void drop_owner(void* owner) { delete static_cast<Owner*>(owner); }

// The slice refers to the bytes; without an owner they live for ever.
grpc::Slice refer(Slice& piece) {
  void* const data = const_cast<char*>(piece.data);
  if (piece.owner == nullptr) return grpc::Slice(data, piece.size, grpc::Slice::STATIC_SLICE);
  return grpc::Slice(data, piece.size, &drop_owner, new Owner(std::move(piece.owner)));
}

}  // namespace

grpc::ByteBuffer encode_message(absl::Span<Frame> frames) {
  size_t copied = 0;
  size_t referred = 0;
  for (const Frame& frame : frames) {
    copied += kPrefixBytes + frame.header.size();
    for (const Slice& piece : frame.payload) {
      if (piece.size < kCopyBelow) copied += piece.size;
      if (piece.size >= kCopyBelow) ++referred;
    }
  }
  grpc_slice block = grpc_slice_malloc(copied);
  char* out = reinterpret_cast<char*>(GRPC_SLICE_START_PTR(block));
  if (referred == 0) {
    for (const Frame& frame : frames) out = encode_frame(frame, out);
    grpc::Slice slice(block, grpc::Slice::STEAL_REF);
    return grpc::ByteBuffer(&slice, 1);
  }
  // The block is filled first and then cut where pieces that stay in place lie between its bytes.
  struct Part {
    size_t end;    // of the block's bytes that come before `piece`
    Slice* piece;  // null: none follows
  };
  absl::InlinedVector<Part, 8> parts;
  char* const begin = out;
  for (Frame& frame : frames) {
    encode_prefix(frame.kind, frame.header.size(), frame.payload_bytes(), out);
    out += kPrefixBytes;
    std::memcpy(out, frame.header.data(), frame.header.size());
    out += frame.header.size();
    for (Slice& piece : frame.payload) {
      if (piece.size >= kCopyBelow) {
        parts.push_back({static_cast<size_t>(out - begin), &piece});
      } else if (piece.size > 0) {
        std::memcpy(out, piece.data, piece.size);
        out += piece.size;
      }
    }
  }
  parts.push_back({copied, nullptr});
  absl::InlinedVector<grpc::Slice, 8> slices;
  size_t from = 0;
  for (const Part& part : parts) {
    if (part.end > from) {
      slices.emplace_back(grpc_slice_sub(block, from, part.end), grpc::Slice::STEAL_REF);
    }
    from = part.end;
    if (part.piece != nullptr) slices.push_back(refer(*part.piece));
  }
  grpc_slice_unref(block);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

Status status_from_grpc(const grpc::Status& status, std::string_view what) {
  const std::string message = absl::StrCat(view(what), ": ", status.error_message());
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::ABORTED: return make_error(ErrorKind::kUnavailable, message);
    case grpc::StatusCode::DEADLINE_EXCEEDED: return make_error(ErrorKind::kDeadline, message);
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return make_error(ErrorKind::kResource, message);
    case grpc::StatusCode::UNIMPLEMENTED:
      return make_error(ErrorKind::kProtocol,
                        absl::StrCat(message, " (a gRPC server, but no worker of weft)"));
    case grpc::StatusCode::INTERNAL: return make_error(ErrorKind::kProtocol, message);
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED: return make_error(ErrorKind::kPermission, message);
    default: return make_error(ErrorKind::kInternal, message);
  }
}

}  // namespace weft::internal
