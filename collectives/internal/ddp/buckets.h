#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_BUCKETS_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_BUCKETS_H_

// Which parameters share a bucket, that is: are reduced in one operation.
//
// Pure functions; any thread.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"

namespace weft::internal {

struct BucketAssignment {
  std::vector<std::vector<size_t>> buckets{};  // positions of tensors
  std::vector<int64_t> limits{};               // of each, in bytes; 0: its gradient is sparse
};

// As c10d's function of this name: tensors of one type and device are put together in their order
// until a bucket has as many bytes as its limit, which may take it above that; each kind of tensor
// walks through `limits` on its own and stays at the last. A sparse gradient has a bucket of its
// own. With `order`, the tensors are taken in it, and buckets stand in the order in which they were
// filled; without it, by their first tensor.
// REQUIRES: `limits` is not empty; `sparse` is empty or as long as `tensors`.
WEFT_API BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                            const std::vector<int64_t>& limits,
                                                            const std::vector<bool>& sparse = {},
                                                            const std::vector<int64_t>& order = {});

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_BUCKETS_H_
