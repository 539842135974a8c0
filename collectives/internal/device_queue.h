#ifndef WEFT_COLLECTIVES_INTERNAL_DEVICE_QUEUE_H_
#define WEFT_COLLECTIVES_INTERNAL_DEVICE_QUEUE_H_

// Operations of a group that works on a GPU: from the caller to the group's DeviceEngine. Any
// thread.

#include <vector>

#include "absl/types/span.h"
#include "weft/collectives/internal/device_engine.h"
#include "weft/collectives/internal/group_handle.h"
#include "weft/collectives/point_operations.h"

namespace weft::internal {

// One operation, or several sends and receives. REQUIRES: the group has a device(), and
// check_operation().
StatusOr<DeviceQueued> queue_on_device(GroupHandle& handle, absl::Span<const Operation> operations,
                                       Timeout timeout, DeviceOrder order);

// batch_isend_irecv() of such a group: all of them begin, or none.
std::vector<Work> batch_on_device(GroupHandle& handle,
                                  const std::vector<PointOperation>& operations);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DEVICE_QUEUE_H_
