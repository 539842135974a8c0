#include "weft/rpc/internal/agent/message.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "ATen/ops/clone.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "weft/common/call_scope.h"
#include "weft/transport/frame.h"
#include "weft/transport/protocol_error.h"
#include "weft/transport/stream_copy.h"

namespace weft::internal {
namespace {

// Segments of a large message up to this size still travel in its header frame.
constexpr size_t kSmallSegmentBytes = 4 << 10;
// The descriptor of a dense tensor of a few dimensions.
constexpr size_t kUsualMetaBytes = 16;

// The payload of such an error (proto/rpc.proto).
constexpr std::string_view kNoRoomNow = "no room now";

void put_u32(std::string* out, uint32_t v) {
  for (int i = 0; i < 4; ++i) out->push_back(static_cast<char>(v >> (8 * i)));
}
void put_text(std::string* out, std::string_view s) {
  put_u32(out, static_cast<uint32_t>(s.size()));
  out->append(s);
}
bool take_text(std::string_view* in, std::string* out) {
  if (in->size() < 4) return false;
  uint32_t n = 0;
  for (int i = 0; i < 4; ++i) n |= uint32_t{static_cast<unsigned char>((*in)[i])} << (8 * i);
  in->remove_prefix(4);
  if (in->size() < n) return false;
  out->assign(in->substr(0, n));
  in->remove_prefix(n);
  return true;
}

// Memory of at::from_blob(): of an owner outside LibTorch, whatever its counts say.
bool is_foreign(const at::Tensor& buffer) {
  return buffer.device().is_cpu() && buffer.storage().allocator() == nullptr;
}

bool held_elsewhere(const at::Tensor& buffer) {
  return buffer.use_count() > 1 || buffer.storage().use_count() > 1 || is_foreign(buffer);
}

StatusOr<at::Tensor> own_copy(const at::Tensor& buffer, ReceiveMemory* memory) {
  if (!buffer.device().is_cpu()) {
    try {
      // On the current stream: after the kernels of the handler, before those of the next.
      const c10::InferenceMode not_inference(false);
      const c10::NoGradGuard no_grad;
      return buffer.clone(at::MemoryFormat::Contiguous);
    } catch (...) {
      return status_from_current_exception();
    }
  }
  BufferSpec spec{buffer.scalar_type(), c10::DimVector(buffer.sizes()), buffer.nbytes()};
  WEFT_ASSIGN_OR_RETURN(at::Tensor copy, allocate_buffer(spec, memory));
  copy_part(static_cast<char*>(copy.mutable_data_ptr()),
            static_cast<const char*>(buffer.const_data_ptr()), spec.nbytes, spec.nbytes);
  return copy;
}

// Copies a buffer of a result that other code may write to before the message has left.
Status own(at::Tensor* buffer, ReceiveMemory* memory) {
  // A view knows its base and would hold it.
  if (buffer->is_view()) *buffer = buffer->variable_data();
  if (buffer->nbytes() == 0 || !held_elsewhere(*buffer)) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(*buffer, own_copy(*buffer, memory));
  return absl::OkStatus();
}

}  // namespace

OutMessage::~OutMessage() {
  if (!foreign || on_pool_thread()) return;
  const std::shared_ptr<Executor> to = pool.lock();
  // Refused by a pool that is no more: then here.
  if (to != nullptr) (void)to->post([freed = std::move(buffers)] {});
}

StatusOr<std::shared_ptr<OutMessage>> pack(Payload payload, TensorMemory memory,
                                           const DeviceRoute* route, ReceiveMemory* copies) {
  auto out = std::make_shared<OutMessage>();
  out->body = std::move(payload.body);
  out->bytes = out->body.size();
  out->tensor_metas.reserve(kUsualMetaBytes * payload.tensors.size());
  for (size_t i = 0; i < payload.tensors.size(); ++i) {
    at::Tensor tensor = std::move(payload.tensors[i]);
    DeviceCode target = kCpuCode;
    const bool travels =
        tensor.defined() && (tensor.device().is_cpu() || tensor.device().is_cuda());
    if (travels && payload.devices != nullptr && i < payload.devices->targets.size()) {
      target = payload.devices->targets[i];
    } else if (tensor.defined() && (route != nullptr || !tensor.device().is_cpu())) {
      const StatusOr<DeviceCode> found = target_device(route, tensor.device());
      if (!found.ok()) return annotate(found.status(), absl::StrCat("tensor ", i));
      target = *found;
    }
    StatusOr<TensorParts> parts = split_for_wire(tensor, memory == TensorMemory::kCopied);
    if (!parts.ok()) return annotate(parts.status(), absl::StrCat("tensor ", i));
    parts->meta.device = target;
    tensor = at::Tensor();  // so that any other holder of the memory is not this message
    append_meta(parts->meta, &out->tensor_metas);
    for (at::Tensor& buffer : parts->buffers) {
      if (memory == TensorMemory::kOwned ||
          (memory == TensorMemory::kOwnedOnHost && buffer.device().is_cpu())) {
        if (Status s = own(&buffer, copies); !s.ok()) {
          return annotate(s, absl::StrCat("copying tensor ", i));
        }
      }
      out->foreign = out->foreign || is_foreign(buffer);
      out->bytes += buffer.nbytes();
      if (!buffer.device().is_cpu()) out->on_device.push_back(out->buffers.size());
      out->buffers.push_back(std::move(buffer));
    }
  }
  return out;
}

OutMessageRef pack_error(const Status& error, std::string_view self) {
  const ErrorDetails details = error_details(error);
  auto out = std::make_shared<OutMessage>();
  put_text(&out->body, std::string_view(error.message().data(), error.message().size()));
  put_text(&out->body, details.origin.empty() ? self : std::string_view(details.origin));
  put_text(&out->body, details.remote_trace);
  put_text(&out->body, details.payload);
  out->bytes = out->body.size();
  return out;
}

Status unpack_error(uint32_t code, uint32_t kind, std::string_view body, std::string_view origin) {
  std::string message;
  ErrorDetails details;
  if (!take_text(&body, &message) || !take_text(&body, &details.origin) ||
      !take_text(&body, &details.remote_trace) || !take_text(&body, &details.payload)) {
    return protocol_error(
        absl::StrCat("an error answer from ", std::string(origin), " that cannot be read"));
  }
  if (details.origin.empty()) details.origin = std::string(origin);
  details.kind = kind <= static_cast<uint32_t>(ErrorKind::kPermission) && kind > 0
                     ? static_cast<ErrorKind>(kind)
                     : ErrorKind::kUser;
  const auto status_code =
      code > 0 && code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)
          ? static_cast<absl::StatusCode>(code)
          : absl::StatusCode::kUnknown;
  return with_details(Status(status_code, message), details);
}

Status no_room_now(const Status& refused) {
  ErrorDetails details = error_details(refused);
  details.payload = kNoRoomNow;
  return with_details(refused, details);
}

bool is_no_room_now(const Status& error) {
  const ErrorDetails details = error_details(error);
  return details.kind == ErrorKind::kResource && details.payload == kNoRoomNow;
}

std::string encode_chunk_header(uint64_t transfer_id, uint64_t offset) {
  std::string out(kChunkHeaderBytes, '\0');
  for (int i = 0; i < 8; ++i) {
    out[i] = static_cast<char>(transfer_id >> (8 * i));
    out[8 + i] = static_cast<char>(offset >> (8 * i));
  }
  return out;
}

Status decode_chunk_header(std::string_view header, uint64_t* transfer_id, uint64_t* offset) {
  if (header.size() != kChunkHeaderBytes) {
    return protocol_error(absl::StrCat("chunk header of ", header.size(), " bytes, must be 16"));
  }
  *transfer_id = 0;
  *offset = 0;
  for (int i = 0; i < 8; ++i) {
    *transfer_id |= uint64_t{static_cast<unsigned char>(header[i])} << (8 * i);
    *offset |= uint64_t{static_cast<unsigned char>(header[8 + i])} << (8 * i);
  }
  return absl::OkStatus();
}

namespace {

// What a chunk frame has besides its bytes, and room to spare.
constexpr size_t kChunkFrameBytes = 1 << 10;

}  // namespace

// A peer with smaller chunks than ours accepts smaller frames only.
size_t fitting_chunk(const MessageLimits& limits, const Hello& peer) {
  const size_t accepted = peer.max_frame_bytes;
  return accepted > 2 * kChunkFrameBytes ? std::min(limits.chunk_bytes, accepted - kChunkFrameBytes)
                                         : limits.chunk_bytes;
}

void plan_layout(Connection* connection, const OutMessage& message, const MessageLimits& limits,
                 v1::Layout* layout, std::atomic<uint64_t>* transfers) {
  layout->Clear();
  layout->set_tensor_metas(message.tensor_metas);
  const bool wide = transfers == nullptr;
  const bool whole = message.bytes <= limits.inline_bytes;
  size_t inlined = 0;
  layout->mutable_segments()->Reserve(static_cast<int>(message.segments()));
  for (size_t i = 0; i < message.segments(); ++i) {
    const size_t size = message.segment(i).size();
    v1::Segment* segment = layout->add_segments();
    segment->set_length(size);
    if (whole) continue;
    if (size <= kSmallSegmentBytes && (wide || inlined + size <= limits.inline_bytes)) {
      inlined += size;
      continue;
    }
    // Not the value tree: what is parsed must not change while it is.
    const std::optional<Placement> placed =
        i == 0 ? std::nullopt : connection->place(message.segment(i));
    if (placed.has_value()) {
      segment->set_arena_offset(placed->offset);
      segment->set_arena_lease(placed->lease);
      continue;
    }
    if (!wide) segment->set_transfer_id(transfers->fetch_add(1, std::memory_order_relaxed) + 1);
  }
}

void unplace_all(Connection* connection, const v1::Layout& layout) {
  for (const v1::Segment& s : layout.segments()) {
    if (s.has_arena_offset()) connection->unplace({s.arena_offset(), s.arena_lease()});
  }
}

Status check_size(const OutMessage& message, const MessageLimits& limits) {
  if (message.bytes <= limits.max_message_bytes) return absl::OkStatus();
  return make_error(ErrorKind::kResource,
                    absl::StrCat("a message of ", message.bytes, " bytes exceeds the bound of ",
                                 limits.max_message_bytes, " (WEFT_MAX_MESSAGE_BYTES)"));
}

Status send_frames(Connection* connection, FrameKind kind, std::string header,
                   const v1::Layout& layout, const OutMessageRef& message,
                   const MessageLimits& limits, uint64_t cookie, int bulk_lane, int small_lane) {
  weft::Frame first;
  first.kind = kind;
  first.header = std::move(header);
  first.payload.reserve(message->segments());
  std::vector<std::pair<uint64_t, std::string_view>> chunked;
  for (int i = 0; i < layout.segments_size(); ++i) {
    const std::string_view s = message->segment(static_cast<size_t>(i));
    if (layout.segments(i).transfer_id() != 0) {
      chunked.emplace_back(layout.segments(i).transfer_id(), s);
    } else if (!s.empty() && !layout.segments(i).has_arena_offset()) {
      first.payload.push_back(Slice{s.data(), s.size(), message});
    }
  }
  const int lane = chunked.empty() ? small_lane : bulk_lane;
  if (chunked.empty()) first.cookie = cookie;
  const Status sent = connection->send(std::move(first), lane);
  if (!sent.ok()) unplace_all(connection, layout);
  if (!sent.ok() || chunked.empty()) return sent;
  const size_t chunk_bytes = fitting_chunk(limits, connection->peer());
  for (size_t i = 0; i < chunked.size(); ++i) {
    const auto& [id, segment] = chunked[i];
    for (size_t offset = 0; offset < segment.size(); offset += chunk_bytes) {
      const size_t n = std::min(chunk_bytes, segment.size() - offset);
      weft::Frame chunk;
      chunk.kind = FrameKind::kChunk;
      chunk.header = encode_chunk_header(id, offset);
      chunk.payload.push_back(Slice{segment.data() + offset, n, message});
      // The callee runs nothing before the last chunk, so that one decides whether it was
      // delivered.
      if (i + 1 == chunked.size() && offset + n == segment.size()) chunk.cookie = cookie;
      WEFT_RETURN_IF_ERROR(connection->send(std::move(chunk), bulk_lane));
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::internal
