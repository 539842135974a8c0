#include "weft/collectives/internal/device_queue.h"

#include <utility>

namespace weft::internal {

StatusOr<DeviceQueued> queue_on_device(GroupHandle& handle, absl::Span<const Operation> operations,
                                       Timeout timeout, DeviceOrder order) {
  GroupCore& core = handle.core();
  DeviceEngine& device = *core.device();
  uint64_t bytes = 0;
  for (const Operation& one : operations) {
    WEFT_RETURN_IF_ERROR(check_on_device(core.member(), device, one));
    bytes += bytes_of(one);
  }
  const Operation& first = operations.front();
  const std::string_view name = operations.size() > 1 ? "batch_isend_irecv" : first.name;
  DeviceQueued queued;
  WEFT_RETURN_IF_ERROR(core.run(name, timeout, first.counts(), [&](const Turn& turn) -> Status {
    core.engine().note().set_algorithm("nccl");
    core.engine().note().set_bytes(bytes);
    if (handle.options().compare_operations && first.counts()) {
      WEFT_RETURN_IF_ERROR(
          core.on_host([&] { return compare_operations(core.engine(), turn, first); }));
    }
    WEFT_ASSIGN_OR_RETURN(queued, device.perform(turn, operations, order));
    return absl::OkStatus();
  }));
  return queued;
}

std::vector<Work> batch_on_device(GroupHandle& handle,
                                  const std::vector<PointOperation>& operations) {
  std::vector<Operation> all;
  Timeout timeout;
  Status bad;
  for (const PointOperation& one : operations) {
    Operation o;
    o.kind = OpKind::kSend;
    o.name = one.sends ? "send" : "recv";
    (one.sends ? o.inputs : o.outputs).push_back(one.tensor);
    o.root = one.peer;
    o.tag = one.options.tag;
    o.receives = !one.sends;
    if (o.receives) o.source = std::make_shared<int>(-1);
    if (!timeout.is_set()) timeout = one.options.timeout;
    if (bad.ok()) bad = check_operation(handle.core().member(), o);
    all.push_back(std::move(o));
  }
  std::vector<Work> out;
  if (all.empty()) return out;
  auto queued = bad.ok() ? queue_on_device(handle, all, timeout, DeviceOrder::kBesideCaller)
                         : StatusOr<DeviceQueued>(bad);
  for (Operation& one : all) {
    out.push_back(queued.ok() ? Work(handle.core().queued(one.name, queued->guard), one.source)
                              : Work(Future<void>::ready(queued.status())));
  }
  return out;
}

}  // namespace weft::internal
