#ifndef WEFT_COLLECTIVES_C10D_BACKEND_H_
#define WEFT_COLLECTIVES_C10D_BACKEND_H_

// c10d_backend: a process group of weft as a backend of LibTorch's own c10d, so that what stands on
// c10d (c10d::Reducer, say) runs on it. Library weft::c10d, which nothing else links.
//
//   #include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
//   auto theirs = c10::make_intrusive<c10d::ProcessGroup>(c10_store, group.rank(), group.size());
//   theirs->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
//                      weft::c10d_backend(group));
//
// Every operation that c10d asks of a backend is either right or refused by name. Refused, by a
// c10::Error before anything moves: startCoalescing, merge, shrink, completion hooks, several
// tensors where c10d means one per device, a reduction that c10d names and we do not have. Errors
// of operations under way are weft::Error, thrown by wait() and stored in the Work's future. Sparse
// allreduce and split() block until they are done.
//
// The backend shares the group and keeps it alive. Nothing is registered. Threads: as
// ProcessGroup.

#include "c10/util/intrusive_ptr.h"
#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace weft {

// REQUIRES: group.valid().
WEFT_API c10::intrusive_ptr<c10d::Backend> c10d_backend(ProcessGroup group);

}  // namespace weft

#endif  // WEFT_COLLECTIVES_C10D_BACKEND_H_
