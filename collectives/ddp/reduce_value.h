#ifndef WEFT_COLLECTIVES_DDP_REDUCE_VALUE_H_
#define WEFT_COLLECTIVES_DDP_REDUCE_VALUE_H_

// What all ranks of a group have measured, as one number: losses, accuracies.
//
//   double accuracy = weft::reduce_value(group, right, /*weight=*/samples);   // the same everywhere
//
// Threads: as the group.

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace weft {

// The mean over the ranks of `value`, each counting as much as its weight. Throws what operations of
// the group throw; invalid_argument, on every rank: the weights add up to nothing, or one is
// negative or no number.
WEFT_API double reduce_value(ProcessGroup& group, double value, double weight = 1);
// The same of a tensor, which is not changed.
WEFT_API at::Tensor reduce_value(ProcessGroup& group, const at::Tensor& value, double weight = 1);

// The rows of all ranks, one rank's behind the other's, on every rank. They may have different
// numbers of rows: rank r's predictions without what its sampler has repeated.
WEFT_API at::Tensor all_gather_rows(ProcessGroup& group, const at::Tensor& rows);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_REDUCE_VALUE_H_
