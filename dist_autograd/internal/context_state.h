#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_CONTEXT_STATE_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_CONTEXT_STATE_H_

// ContextState: what one worker holds of a context: the sends that it has recorded, the workers
// that it has told of the context, its passes, and the gradients of its leaves.
//
//   CTX-1  a context that has been released records nothing, and nothing brings it back.
//   CTX-2  gradients of a pass count from when it is done here until it fails anywhere; a
//          reader meets each such pass once, also while those that have succeeded are added up.
//
// Threads: all methods from anywhere. Its mutex is taken below a pass's, never the other way; that
// of the sums above both.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "weft/common/api.h"
#include "weft/common/mutex.h"
#include "weft/dist_autograd/ended_passes.h"
#include "weft/dist_autograd/internal/pass.h"

namespace weft::internal {

// Gradients by leaf, in the order in which leaves came.
class LeafSums {
 public:
  // Null: there is none.
  const LeafGradient* find(const at::Tensor& leaf) const;
  LeafGradient* find(const at::Tensor& leaf);
  LeafGradient& add(LeafGradient one);  // REQUIRES: its leaf is not there
  const std::vector<LeafGradient>& all() const { return all_; }
  std::vector<LeafGradient>& all() { return all_; }
  size_t size() const { return all_.size(); }

 private:
  std::vector<LeafGradient> all_;
  absl::flat_hash_map<const void*, size_t> places_;  // by identity
};

class WEFT_API ContextState : public std::enable_shared_from_this<ContextState> {
 public:
  ContextState(const AutogradContextId& id, const WorkerKey& self) : id_(id), self_(self) {}

  const AutogradContextId& id() const { return id_; }

  // ---- recording ----
  // A message to `to` is about to leave with these tensors. False: released, and it is none of the
  // context's. `number` is used when one of them requires grad; otherwise it is set to 0.
  // `devices`: of these (devices_of()). `served`: the call whose handler sends it.
  bool record(const WorkerKey& to, const std::vector<at::Tensor>& tensors, bool grad_mode,
              bool is_request, const CallOrder& served, uint64_t* number,
              std::vector<DeviceCode>* devices);
  // The message has proven never to have arrived.
  void forget(uint64_t number);
  // By number: what has been recorded here.
  std::map<uint64_t, NodePtr> sends() const;

  // ---- passes ----
  // A new one, with this worker as its root.
  StatusOr<std::shared_ptr<BackwardPass>> begin(absl::Time deadline,
                                                const std::shared_ptr<PassLinks>& links);
  // One of another root. `make`: if it is not there. Refused when it has ended.
  StatusOr<std::shared_ptr<BackwardPass>> find(const PassId& pass, absl::Time deadline, bool make,
                                               const std::shared_ptr<PassLinks>& links);
  // One that is not here has failed: what engages this worker in it comes too late.
  void refuse(const PassId& pass, const Status& why);
  // What `root` says of its earlier passes: `aborted` are those that failed.
  void settle(const WorkerKey& root, uint64_t ended_below, const std::vector<uint64_t>& aborted);
  // Records the end of a pass of this worker's own, for settle() on other workers. `all_told`:
  // every worker knows of its failure.
  void ended(const BackwardPass& pass, bool all_told);
  // What to tell of the passes of `root`, by the root or by a worker that it has told.
  void ended_passes(const WorkerKey& root, uint64_t* below, std::vector<uint64_t>* aborted) const;
  // This worker's own passes, for a reader that uses the gradients of just those.
  EndedPasses own_passes() const;
  // Whether the pass, of this worker's own, has failed and some worker may not know it.
  bool has_failed(const PassId& pass) const;
  std::vector<std::shared_ptr<BackwardPass>> passes() const;

  // ---- gradients ----
  std::vector<LeafGradient> gradients() const;
  // The gradient of one leaf; undefined when it has none.
  at::Tensor gradient(const at::Tensor& leaf) const;
  // The gradients of those passes of the root that `ended` names and of no others; an error, kind
  // state, when others have been added to them already. Settles what it tells.
  StatusOr<std::vector<LeafGradient>> gradients(const EndedPasses& ended);
  // Multiplies them; REQUIRES: no pass is running. What gradients() has given before stays.
  void scale(double factor);
  // The workers that it has told of the context.
  std::set<WorkerKey> known() const;

  // CTX-1. Passes that run fail with `why`. Returns the workers that it has told of the context.
  std::set<WorkerKey> close(const Status& why);
  Status release_error() const;  // for close(): the context was released
  bool closed() const;

  struct Counts {
    int64_t sends = 0;
    int64_t running = 0;  // passes
    int64_t leaves = 0;
  };
  Counts counts() const;

 private:
  PassGraph::FindSend find_send();
  std::shared_ptr<BackwardPass> add_locked(const PassId& pass, absl::Time deadline,
                                           const std::shared_ptr<PassLinks>& links)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void merge_locked(std::vector<LeafGradient> leaves) ABSL_EXCLUSIVE_LOCKS_REQUIRED(leaves_mutex_);
  // What is added up, and of passes that are not: those that `counts` says.
  LeafSums sum_locked(std::vector<LeafGradient>* apart,
                      const std::function<bool(const PassId&)>& counts) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(leaves_mutex_);
  Status check_added_locked(const EndedPasses& ended) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(leaves_mutex_);

  const AutogradContextId id_;
  const WorkerKey self_;

  // Gradients of the passes that have succeeded everywhere, in the order in which leaves came. A
  // pass leaves passes_ and is added here under this mutex, in one step.
  mutable Mutex leaves_mutex_;
  LeafSums leaves_ ABSL_GUARDED_BY(leaves_mutex_);

  mutable Mutex mutex_ ABSL_ACQUIRED_AFTER(leaves_mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, NodePtr> sends_ ABSL_GUARDED_BY(mutex_);
  size_t outputs_ ABSL_GUARDED_BY(mutex_) = 0;  // of all sends
  std::set<WorkerKey> known_ ABSL_GUARDED_BY(mutex_);
  std::map<PassId, std::shared_ptr<BackwardPass>> passes_ ABSL_GUARDED_BY(mutex_);
  // Why they have failed: their aborts have overtaken all else.
  std::map<PassId, Status> refused_ ABSL_GUARDED_BY(mutex_);
  struct Settled {
    uint64_t below = 0;
    std::vector<uint64_t> aborted{};
  };
  std::map<WorkerKey, Settled> settled_ ABSL_GUARDED_BY(mutex_);  // by root, other than this worker
  uint64_t last_pass_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_added_own_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> running_own_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> aborted_own_ ABSL_GUARDED_BY(mutex_);  // not known to all
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_CONTEXT_STATE_H_
