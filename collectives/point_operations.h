#ifndef WEFT_COLLECTIVES_POINT_OPERATIONS_H_
#define WEFT_COLLECTIVES_POINT_OPERATIONS_H_

// batch_isend_irecv: several sends and receives of one rank, begun together.
//
//   auto works = weft::batch_isend_irecv(group, {weft::isend(a, next), weft::irecv(b, previous)});
//   for (const weft::Work& work : works) work.wait();
//
// Threads: as ProcessGroup.

#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/collectives/work.h"
#include "weft/common/api.h"

namespace weft {

struct PointOperation {  // one send or receive of a batch
  bool sends = false;
  at::Tensor tensor;  // sent, or written into
  int peer = 0;       // a receive: kAnySource is allowed
  PointOptions options{};
};
inline PointOperation isend(const at::Tensor& tensor, int to, const PointOptions& options = {}) {
  return {true, tensor, to, options};
}
inline PointOperation irecv(const at::Tensor& tensor, int from = kAnySource,
                            const PointOptions& options = {}) {
  return {false, tensor, from, options};
}

// In the order of the list. Sends begin first, whatever the order: a rank that waits for room
// receives what others send, so ranks that all send first do not wait for each other.
WEFT_API std::vector<Work> batch_isend_irecv(ProcessGroup& group,
                                             const std::vector<PointOperation>& operations);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_POINT_OPERATIONS_H_
