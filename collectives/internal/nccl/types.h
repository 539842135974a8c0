#ifndef WEFT_COLLECTIVES_INTERNAL_NCCL_TYPES_H_
#define WEFT_COLLECTIVES_INTERNAL_NCCL_TYPES_H_

// How NCCL reduces what LibTorch has. Any thread.

#include <nccl.h>

#include <optional>

#include "c10/core/ScalarType.h"
#include "weft/collectives/reduce_op.h"

namespace weft::internal {

// Elements of `type` as `parts` elements of NCCL's.
struct NcclReduction {
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;  // of kPremulSum: without meaning
  uint64_t parts = 1;
};

// Nothing: NCCL does not have it. `version`: of the library.
std::optional<NcclReduction> nccl_reduction(c10::ScalarType type, ReduceOp::Kind kind, int version);

// The factor of a premultiplied sum in elements of `type`; `room` has 8 bytes.
void write_factor(ncclDataType_t type, double factor, void* room);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_NCCL_TYPES_H_
