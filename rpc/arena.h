#ifndef WEFT_RPC_ARENA_H_
#define WEFT_RPC_ARENA_H_

// Tensors that workers of one host read where they lie. A worker shares a piece of memory, its
// arena, with the peers of its user on its host (see docs/arena.md). Large tensors are copied there
// when they are sent; a tensor that lies there already is sent without a copy, in the time of a
// small call whatever its size:
//
//   at::Tensor weights = weft::move_to_arena(worker, model_weights);
//   rpc_sync(worker, "worker1", &evaluate, weights);      // 64 MiB, no byte copied
//
// The price is that sender and receivers see the same bytes for as long as any of them uses them: a
// receiver must not write to what it got from another's arena (clone() it first), and what the
// sender writes after sending is seen by receivers at any time. An ordinary tensor has neither
// restriction: its receiver gets a copy of its own.
//
// Threads: any. Such tensors may outlive the worker.

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/rpc/worker.h"

namespace weft {

// A contiguous tensor on the CPU with values of any kind, as at::empty makes them. Ordinary memory
// when the worker shares none, or has no room: then sending it copies, as with any tensor. Throws
// c10::Error when the sizes are impossible.
WEFT_API at::Tensor arena_tensor(const Worker& worker, at::IntArrayRef sizes,
                                 at::ScalarType dtype = at::kFloat);
// A contiguous copy of a dense tensor on the CPU, detached from autograd. Throws weft::Error, kind
// invalid_argument, for any other tensor.
WEFT_API at::Tensor move_to_arena(const Worker& worker, const at::Tensor& tensor);

}  // namespace weft

#endif  // WEFT_RPC_ARENA_H_
