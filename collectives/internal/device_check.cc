// What operations on a GPU cannot do, before anything moves.
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

Status lacks(const Operation& o, std::string_view why) {
  return make_error(ErrorKind::kUnimplemented, cat(o.name, ": backend nccl ", why));
}

Status check_places(const DeviceEngine& engine, const Operation& o, const Tensors& tensors,
                    std::string_view role) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const c10::Device device = tensors[i].device();
    if (device.is_cuda() && device.index() == engine.device()) continue;
    return make_error(ErrorKind::kInvalidArgument,
                      cat(o.name, ": the ", role, " tensor ", i, " is on ", device.str(),
                          ", and this group (backend nccl) works on tensors of cuda:",
                          engine.device(), " alone"));
  }
  return absl::OkStatus();
}

}  // namespace

Status check_on_device(const Membership& member, const DeviceEngine& engine, const Operation& o) {
  (void)member;
  if (o.algorithm != Algorithm::kAuto) {
    return lacks(o, cat("chooses the algorithm itself, not ",
                        algorithm_name(static_cast<uint8_t>(o.algorithm))));
  }
  if (o.kind == OpKind::kSend) {
    if (o.any_shape) return lacks(o, "receives no tensor of unknown shape");
    if (o.receives && o.root < 0) return lacks(o, "cannot receive from any source: name the rank");
    if (o.tag != 0) return lacks(o, cat("has no tags, and ", o.tag, " was given"));
  }
  WEFT_RETURN_IF_ERROR(check_places(engine, o, o.outputs, "output"));
  WEFT_RETURN_IF_ERROR(check_places(engine, o, o.inputs, "input"));
  const bool reduces =
      o.kind == OpKind::kAllReduce || o.kind == OpKind::kReduce || o.kind == OpKind::kReduceScatter;
  if (!reduces) return absl::OkStatus();
  const at::ScalarType type = (o.outputs.empty() ? o.inputs : o.outputs)[0].scalar_type();
  if (engine.reduces(type, o.op.kind())) return absl::OkStatus();
  return lacks(o, cat("does not reduce ", c10::toString(type), " by ",
                      reduction_name(static_cast<uint8_t>(o.op.kind()))));
}

}  // namespace weft::internal
