#ifndef WEFT_COLLECTIVES_SPARSE_H_
#define WEFT_COLLECTIVES_SPARSE_H_

// The sum of sparse tensors: gradients of embeddings.
//
//   at::Tensor sum = weft::all_reduce_sparse(group, gradient);
//
// Every rank gives a sparse COO tensor of one type and of equal sizes, with as many entries as it
// has, and gets their sum, coalesced. Entries travel, not the tensors. Equal bits on all ranks:
// entries of one place are added in the order of the ranks. Three operations of the group; threads
// as ProcessGroup.

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/common/error.h"

namespace weft {

// kSum or kAvg. Errors, kind invalid_argument: not sparse, another reduction; sizes that differ
// between ranks are an error on all of them.
WEFT_API StatusOr<at::Tensor> try_all_reduce_sparse(ProcessGroup& group, const at::Tensor& mine,
                                                    const AllReduceOptions& options = {});
inline at::Tensor all_reduce_sparse(ProcessGroup& group, const at::Tensor& mine,
                                    const AllReduceOptions& options = {}) {
  return value_or_throw(try_all_reduce_sparse(group, mine, options));
}

}  // namespace weft

#endif  // WEFT_COLLECTIVES_SPARSE_H_
