#ifndef WEFT_COLLECTIVES_DDP_JOIN_H_
#define WEFT_COLLECTIVES_DDP_JOIN_H_

// Join: ranks with different numbers of batches train together. A rank that has no batches left
// takes part in the reductions of the others with zeros, until all have come to the end; then all
// get the parameters and buffers of a rank that was among the last.
//
//   weft::DistributedDataParallel ddp(net, group);
//   weft::Join join({ddp});                            // all ranks, before their first batch
//   while (const auto batch = mine.next()) {
//     ddp.zero_grad();
//     loss_of(ddp.forward(batch->x), batch->y).backward();
//     optimizer.step();
//   }
//   join.wait();                                       // all ranks
//
// With a ZeroRedundancyOptimizer name both: Join join({ddp, optimizer}). A rank that waits then
// steps its part of the parameters with the gradients that the others have. Other optimizers are
// not stepped by a rank that waits: what they keep for their next steps stays as it was.
//
// What takes part announces each of its steps by one small operation of the group. Collectives of
// the module's own are answered by no rank that waits: a SyncBatchNorm in the module is an error
// here, and another operation of the group in a forward is an error of that forward, which names
// the module.
//
// Threads: one. What takes part must not be moved while a Join is around it.

#include <initializer_list>
#include <memory>

#include "weft/collectives/process_group.h"
#include "weft/common/api.h"

namespace weft {

struct UnevenJoinOptions {  // of Join
  // Gradients are divided by the size of the group; otherwise by the number of ranks that have
  // batches.
  bool divide_by_initial_world_size = true;
  // The first rank that comes to its end ends the group, and all ranks get an error that names it.
  bool throw_on_early_termination = false;
};

namespace internal {

class JoinSession;
class Joinable;

// A DistributedDataParallel or a ZeroRedundancyOptimizer.
struct JoinableRef {
  template <class T>
  JoinableRef(T& one) : joinable(&one.joinable()) {}  // NOLINT(google-explicit-constructor)
  Joinable* joinable;
};

}  // namespace internal

class WEFT_API Join {
 public:
  // All ranks make one, with the same parts in the same order. Throws weft::Error:
  //   invalid_argument  no part; parts of different groups; a module with a SyncBatchNorm, by name
  //   state             a part is in another Join, or in a backward
  explicit Join(std::initializer_list<internal::JoinableRef> parts,
                const UnevenJoinOptions& options = {});
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  // Without wait(), as when an exception leaves the loop, it ends the group: other ranks would wait.
  ~Join();

  // Returns when all ranks have called it. A backward that fails on all ranks meanwhile is theirs
  // alone; throws what ends the group. Once.
  void wait();

 private:
  std::shared_ptr<internal::JoinSession> session_;
};

}  // namespace weft

#endif  // WEFT_COLLECTIVES_DDP_JOIN_H_
