#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_GROUP_IO_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_GROUP_IO_H_

// What data parallelism asks of a process group, besides single operations.
//
// Threads: as the group.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/collectives/work.h"
#include "weft/common/time.h"

namespace weft::internal {

// Tensors of the root to all, several in one operation: at most `limit` bytes in one, two of them
// under way. All ranks give tensors of the same shapes and types, in the same order.
void broadcast_all(ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root,
                   int64_t limit, Timeout timeout);
// The lines of each rank.
std::vector<std::vector<std::string>> all_gather_lines(ProcessGroup& group,
                                                       const std::vector<std::string>& mine,
                                                       Timeout timeout);
// A short text of each rank, in one operation; what is too long is cut.
struct Notes {
  at::Tensor mine{};
  std::vector<at::Tensor> all{};
  Work work{};
};
Notes begin_all_gather_notes(ProcessGroup& group, std::string_view mine, Timeout timeout);
// REQUIRES: its work is done.
std::vector<std::string> read_notes(const Notes& notes);
// The sum of everybody's sparse gradients, the same on all ranks, coalesced. `mine` may be
// undefined: then it is empty, of the shape and type of `like`.
at::Tensor all_reduce_sparse(ProcessGroup& group, const at::Tensor& mine, const at::Tensor& like,
                             Timeout timeout);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_GROUP_IO_H_
