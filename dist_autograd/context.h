#ifndef WEFT_DIST_AUTOGRAD_CONTEXT_H_
#define WEFT_DIST_AUTOGRAD_CONTEXT_H_

// DistAutogradContext: backward through calls to other workers.
//
//   weft::DistAutogradContext context(worker);
//   at::Tensor loss = rpc_sync(worker, "ps0", &forward, x).sum();   // recorded at both ends
//   context.backward({loss});
//   for (const auto& [leaf, gradient] : context.gradients()) ...    // of this worker's leaves
//
// While the context lives, calls that this thread makes are part of it: tensors that require grad
// keep their history across workers, and handlers, what they call, their continuations and
// coroutines join in by themselves. Each worker keeps the gradients of its own leaves, per context;
// `.grad` is not touched.
//
// backward() finds out by itself what the losses depend on: unused calls cost nothing and hang
// nothing. Several losses, several passes (with retain_graph where they share nodes), and passes of
// several threads at once are allowed. An error anywhere ends the pass on all workers and is thrown
// here; the context can be used again, without retain_graph only for what has not run yet.
// In LibTorch's anomaly mode (torch::autograd::DetectAnomalyGuard, which is per process) the error
// of a node carries the calls that made it, and NaN in a gradient is an error.
//
// Threads: it is made and destroyed on one thread, whose calls it records; AutogradContextGuard
// lets others join. backward() and gradients() from any.

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/common/api.h"
#include "weft/common/call_scope.h"
#include "weft/common/future.h"
#include "weft/common/time.h"
#include "weft/dist_autograd/id.h"

namespace weft {

class ProcessGroup;
class Worker;
namespace internal {
class ContextState;
class DistAutogradService;
class BackwardCall;
}  // namespace internal

// How the workers of a pass know which gradients will come.
enum class BackwardMode : uint8_t {
  // They find out: what the losses do not depend on is not waited for. As many hops as kFast when
  // the losses depend on all that was recorded.
  kExact,
  // They take it that the losses depend on every message that the context has recorded, as
  // torch.distributed.autograd does; otherwise the pass fails at its deadline, and says what it
  // waited for. To compare with.
  kFast,
};

struct BackwardOptions {  // of backward()
  // One for each loss, of its shape and type; an undefined one stands for ones. Empty: all ones,
  // and every loss is to have a single element.
  std::vector<at::Tensor> gradients{};
  // Keep what the nodes have saved, so that they can run again.
  bool retain_graph = false;
  // Refused, kind unimplemented: higher-order gradients across workers are not supported.
  bool create_graph = false;
  // The time of the whole pass, on all workers. Default: the worker's rpc_timeout, or that of the process group whose gradients a
  // DistributedDataParallel of this worker reduces in the pass. The deadlines of calls do not count
  // here.
  Timeout deadline{};
  BackwardMode mode = BackwardMode::kExact;
};

struct ClipOptions {     // of clip_grad_norm()
  double norm_type = 2;  // p of the p-norm; infinity: the largest magnitude
  // Fail, and scale nothing, when the norm is infinite or not a number.
  bool error_if_nonfinite = false;
  Timeout deadline{};  // default: the worker's rpc_timeout
};

// What a context has for one leaf of this worker. It is to be read before the next pass.
struct AutogradGradient {
  at::Tensor leaf{};
  at::Tensor gradient{};
};

class WEFT_API DistAutogradContext {
 public:
  // Throws weft::Error, kind state: the worker does not list dist_autograd_service(), has shut
  // down, or this thread is in a context of it already.
  explicit DistAutogradContext(const Worker& worker);
  // Releases it, and does not wait.
  ~DistAutogradContext();
  DistAutogradContext(const DistAutogradContext&) = delete;
  DistAutogradContext& operator=(const DistAutogradContext&) = delete;

  const AutogradContextId& id() const;  // equal on all workers

  // Blocks until every worker that takes part is done. Throws weft::Error:
  //   invalid_argument  no losses; one that does not require grad, or has several elements and no
  //                     gradient; a gradient of another shape or type
  //   unimplemented     create_graph
  //   deadline          and what it was that the pass waited for
  //   state             the context has been released
  //   peer_lost         a worker that takes part died or left, also this one
  //   of a node, a hook or a function of the user: its own, and origin() is where
  void backward(const std::vector<at::Tensor>& losses, const BackwardOptions& options = {});
  Status try_backward(const std::vector<at::Tensor>& losses, const BackwardOptions& options = {});

  // Returns the gradients of this worker's leaves that have one, in the order in which the leaves
  // were first reached.
  std::vector<AutogradGradient> gradients() const;
  // Returns the gradient of one leaf; undefined when it has none.
  at::Tensor gradient(const at::Tensor& leaf) const;

  // Adds them to `.grad` of this worker's leaves, as a local backward() does.
  void write_to_grad() const;
  // The norm of all gradients of the context at all of its workers, as of one vector; when it is
  // above `max_norm`, all are multiplied by max_norm / (norm + 1e-6), as by torch's function of
  // that name. Gradients that were read before stay as they were. While no pass is running; one
  // message to each worker, and a second one when it scales. Throws weft::Error:
  //   invalid_argument  max_norm or norm_type that is not positive; a norm that is not finite (if
  //                     that is to be an error)
  //   state             the context has been released
  //   deadline, peer_lost, ...  a worker did not answer; some may have been scaled then
  double clip_grad_norm(double max_norm, const ClipOptions& options = {});
  // The hybrid: `trainers` are the ranks whose DistributedDataParallel averages the dense gradients. All of them call
  // this, each with its own context, and all scale by the same factor, so that their replicas stay equal. The norm is
  // that of all their contexts as of one vector, in which what a DistributedDataParallel averages counts once. One
  // operation of the group besides, in the same order on all ranks as its other operations; `deadline` bounds it
  // separately. Throws what the above throws, and
  //   state             another rank could not ask the workers of its context; no rank has scaled
  //   of the group      a rank died or left, or did not come within the deadline, which ends the group
  double clip_grad_norm(double max_norm, ProcessGroup& trainers, const ClipOptions& options = {});

  // The context ends on all workers; afterwards calls of this thread are ordinary ones, a running
  // pass fails with `cancelled`, and tensors of calls that are under way arrive detached. Completes
  // when every living worker has forgotten it. On the thread that made the context.
  Future<void> release();
  bool released() const;

 private:
  friend class AutogradContextGuard;
  friend class internal::BackwardCall;
  double clip(double max_norm, const ClipOptions& options, ProcessGroup* trainers);

  const std::shared_ptr<internal::DistAutogradService> service_;
  const std::shared_ptr<internal::ContextState> state_;
  std::optional<ScopeGuard> scope_;
};

// Makes a context that of the calling thread, too, as long as the guard lives.
class WEFT_API AutogradContextGuard {
 public:
  explicit AutogradContextGuard(const DistAutogradContext& context);

 private:
  ScopeGuard scope_;
};

// For handlers: the context of the call that is being served on this thread, if it is in one, and
// what that has for leaves of this worker.
WEFT_API std::optional<AutogradContextId> current_autograd_context(const Worker& worker);
// Throws weft::Error, not_found: no such context here (yet); state: it has been released.
WEFT_API std::vector<AutogradGradient> autograd_gradients(const Worker& worker,
                                                          const AutogradContextId& id);
// For handlers, and threads with an AutogradContextGuard: backward() of a context that another worker
// may have made, from losses of this one. The same errors, and not_found when the context is not
// known here. Blocks as that does, so not in a coroutine.
//   context.backward(...) at its creator, or, in what it calls:
//   weft::backward(call.worker(), *weft::current_autograd_context(call.worker()), {loss});
WEFT_API void backward(const Worker& worker, const AutogradContextId& id,
                       const std::vector<at::Tensor>& losses, const BackwardOptions& options = {});
WEFT_API Status try_backward(const Worker& worker, const AutogradContextId& id,
                             const std::vector<at::Tensor>& losses,
                             const BackwardOptions& options = {});
// For handlers: as write_to_grad(), at this worker.
WEFT_API void write_autograd_gradients(const Worker& worker, const AutogradContextId& id);
WEFT_API StatusOr<std::vector<AutogradGradient>> try_autograd_gradients(
    const Worker& worker, const AutogradContextId& id);

}  // namespace weft

#endif  // WEFT_DIST_AUTOGRAD_CONTEXT_H_
