// send() and recv(): a message has the sizes of its tensor and then its elements.
#include <cstring>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "weft/collectives/internal/operation.h"
#include "weft/collectives/internal/reduce.h"
#include "weft/collectives/internal/text.h"
#include "weft/rpc/plain_tensor.h"

namespace weft::internal {
namespace {

// A message as a tensor, after everything in it was checked.
StatusOr<at::Tensor> tensor_of(const PointMessage& message, at::ScalarType type) {
  const Header& h = message.header;
  const uint64_t size = element_size(static_cast<ElementType>(h.type));
  const Status bad =
      make_error(ErrorKind::kProtocol,
                 cat("rank ", message.peer, " sent a tensor of ", h.detail, " dimensions and ",
                     h.count, " elements in ", message.body.size(), " bytes"));
  if (h.detail > 64 || h.bytes != message.body.size() || h.bytes < h.detail * sizeof(int64_t) ||
      size == 0) {
    return bad;
  }
  const uint64_t shape = h.detail * sizeof(int64_t);
  if ((h.bytes - shape) / size != h.count || (h.bytes - shape) % size != 0) return bad;
  std::vector<int64_t> sizes(h.detail);
  if (shape > 0) std::memcpy(sizes.data(), message.body.data(), shape);
  uint64_t elements = 1;
  for (const int64_t n : sizes) {
    if (n < 0 || __builtin_mul_overflow(elements, static_cast<uint64_t>(n), &elements)) return bad;
  }
  if (elements != h.count) return bad;
  at::Tensor out = at::empty(sizes, at::TensorOptions().dtype(type));
  if (h.count > 0) {
    std::memcpy(out.mutable_data_ptr(), message.body.data() + shape, h.count * size);
  }
  return out;
}

}  // namespace

Status perform_send(Engine& engine, const Turn& turn, const Operation& o, ElementType type) {
  const at::Tensor& t = o.inputs[0];
  Header header;
  header.op = static_cast<uint8_t>(OpKind::kSend);
  header.type = static_cast<uint8_t>(type);
  header.group = engine.member().group;
  header.generation = engine.member().generation;
  header.tag = o.tag;
  header.count = static_cast<uint64_t>(t.numel());
  header.detail = static_cast<uint64_t>(t.dim());
  const uint64_t shape = header.detail * sizeof(int64_t);
  const uint64_t bytes = header.count * element_size(type);
  header.bytes = shape + bytes;
  std::vector<char> body(header.bytes);
  if (shape > 0) std::memcpy(body.data(), t.sizes().data(), shape);
  if (bytes > 0 && o.staging == nullptr) {
    const at::Tensor values = plain(t);
    std::memcpy(body.data() + shape, values.const_data_ptr(), bytes);
  } else if (bytes > 0) {
    const at::Tensor values =
        at::from_blob(body.data() + shape, {t.numel()}, at::TensorOptions().dtype(t.scalar_type()));
    move_in(o, turn, o.inputs, values);
  }
  const Outgoing out{o.root, header, body.data()};
  engine.count(out);
  return engine.link().send_points({&out, 1}, turn.deadline);
}

Status perform_receive(Engine& engine, const Turn& turn, Operation& o) {
  WEFT_ASSIGN_OR_RETURN(const PointMessage message,
                        engine.link().receive_point(o.root, o.tag, turn.deadline));
  WEFT_ASSIGN_OR_RETURN(const at::ScalarType type, scalar_type_of(message.header.type));
  WEFT_ASSIGN_OR_RETURN(const at::Tensor got, tensor_of(message, type));
  if (o.source != nullptr) *o.source = message.peer;
  if (o.any_shape) {
    o.received = got;
    return absl::OkStatus();
  }
  const at::Tensor& to = o.outputs[0];
  if (to.scalar_type() != type || to.numel() != got.numel()) {
    return make_error(ErrorKind::kInvalidArgument,
                      cat("rank ", message.peer, " sent ", element_name(message.header.type), " x ",
                          got.numel(), " with tag ", o.tag, ", this rank expects ",
                          c10::toString(to.scalar_type()), " x ", to.numel()));
  }
  move_out(o, turn, o.outputs, got.view({got.numel()}));
  return absl::OkStatus();
}

}  // namespace weft::internal
