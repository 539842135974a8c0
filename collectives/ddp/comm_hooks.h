#ifndef WEFT_COLLECTIVES_DDP_COMM_HOOKS_H_
#define WEFT_COLLECTIVES_DDP_COMM_HOOKS_H_

// CommHook: how a bucket of gradients becomes their mean over the ranks.
//
//   ddp.register_comm_hook(&weft::bf16_compress_hook);
//   ddp.register_comm_hook([](weft::ProcessGroup& group, const weft::GradBucket& bucket) {
//     at::Tensor sum = bucket.buffer;
//     return group.all_reduce_async(sum).then([sum] { return sum.div_(2); });
//   });
//
// A hook is called for each bucket, in the order of the buckets on every rank, when all its
// gradients are there, and begins what it takes; gradients have not been divided. What its future
// gives is the mean: the buffer, or a tensor of as many elements, which is copied to it. It issues
// the same operations on all ranks and does not call the DistributedDataParallel. One that throws,
// or gives something else, ends the group: the other ranks are in operations that this one never
// joins.
//
// Threads: hooks are called by whatever thread runs the backward, one at a time.

#include <cstddef>
#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"
#include "weft/common/future.h"

namespace weft {

struct GradBucket {
  size_t index = 0;                      // of this bucket, from 0
  size_t count = 0;                      // of all buckets
  at::Tensor buffer{};                   // of one dimension
  std::vector<at::Tensor> gradients{};   // views of its parts...
  std::vector<at::Tensor> parameters{};  // ...and whose they are

  bool is_last() const { return index + 1 == count; }  // no more buckets follow
};

using CommHook = std::function<Future<at::Tensor>(ProcessGroup& group, const GradBucket& bucket)>;

// Divides, then adds up: what happens without a hook.
WEFT_API Future<at::Tensor> allreduce_hook(ProcessGroup& group, const GradBucket& bucket);
// The same in half the bytes: cast, divided, added up, cast back. Sums are rounded once per hop.
WEFT_API Future<at::Tensor> fp16_compress_hook(ProcessGroup& group, const GradBucket& bucket);
WEFT_API Future<at::Tensor> bf16_compress_hook(ProcessGroup& group, const GradBucket& bucket);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_COMM_HOOKS_H_
