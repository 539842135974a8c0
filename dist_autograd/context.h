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

#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
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

// What clip_grad_norm() needs of a process group.
struct ClipRanks {
  int size = 0;
  std::string name{};
  // As ProcessGroup::try_all_gather_into_tensor().
  std::function<Status(const at::Tensor& all, const at::Tensor& mine, absl::Duration timeout)>
      gather{};
};
}  // namespace internal

// How the workers of a pass know which gradients will arrive.
enum class BackwardMode : uint8_t {
  // They find out which messages the losses depend on, and wait for no others. Takes as many hops
  // as kFast when the losses depend on all recorded messages.
  kExact,
  // They assume that the losses depend on every message that the context has recorded, as
  // torch.distributed.autograd does; otherwise the pass fails at its deadline, and says what it
  // waited for. For comparisons.
  kFast,
};

struct BackwardOptions {  // of backward()
  // One gradient for each loss, of its shape and type; an undefined one stands for ones. Empty: all
  // ones, and every loss must have a single element.
  std::vector<at::Tensor> gradients{};
  // Keeps what the nodes have saved, so that they can run again.
  bool retain_graph = false;
  // Refused, kind unimplemented: higher-order gradients across workers are not supported.
  bool create_graph = false;
  // Deadline of the whole pass, on all workers. Default: the worker's rpc_timeout, or the timeout
  // of the process group whose gradients a DistributedDataParallel of this worker reduces in the
  // pass. The deadlines of calls do not count here.
  Timeout deadline{};
  BackwardMode mode = BackwardMode::kExact;
};

struct ClipOptions {     // of clip_grad_norm()
  double norm_type = 2;  // p of the p-norm; infinity: the largest magnitude
  // Fail, and scale nothing, when the norm is infinite or not a number.
  bool error_if_nonfinite = false;
  Timeout deadline{};  // default: the worker's rpc_timeout
};

// The gradient that a context has for one leaf of this worker. Read it before the next pass.
struct AutogradGradient {
  at::Tensor leaf{};
  at::Tensor gradient{};
};

class WEFT_API DistAutogradContext {
 public:
  // Begins a context on the calling thread. Throws weft::Error, kind state: the worker does not
  // list dist_autograd_service(), has shut down, or this thread is in a context of it already.
  explicit DistAutogradContext(const Worker& worker);
  // Releases the context on all workers, and does not wait.
  ~DistAutogradContext();
  DistAutogradContext(const DistAutogradContext&) = delete;
  DistAutogradContext& operator=(const DistAutogradContext&) = delete;

  const AutogradContextId& id() const;  // equal on all workers

  // Runs one backward from the losses through all workers, and blocks until every worker that takes
  // part is done. Throws weft::Error:
  //   invalid_argument  no losses; one that does not require grad, or has several elements and no
  //                     gradient; a gradient of another shape or type
  //   unimplemented     create_graph
  //   deadline          names what the pass waited for
  //   state             the context has been released
  //   peer_lost         a worker that takes part died or left, also this one
  //   any other kind    thrown by a node, a hook or a user's function; origin() is its worker
  void backward(const std::vector<at::Tensor>& losses, const BackwardOptions& options = {});
  Status try_backward(const std::vector<at::Tensor>& losses, const BackwardOptions& options = {});

  // Returns the gradients of this worker's leaves that have one, in the order in which the leaves
  // were first reached.
  std::vector<AutogradGradient> gradients() const;
  // Returns the gradient of one leaf; undefined when it has none.
  at::Tensor gradient(const at::Tensor& leaf) const;

  // Adds the gradients to `.grad` of this worker's leaves, as a local backward() does.
  void write_to_grad() const;
  // Returns the norm of all gradients of the context on all of its workers, as of one vector. If it
  // is above `max_norm`, multiplies all of them by max_norm / (norm + 1e-6), as torch's function of
  // that name does. Gradients that were read before keep their values. Requires that no pass is
  // running. Costs one message to each worker, and a second one when it scales. Throws weft::Error:
  //   invalid_argument  max_norm or norm_type that is not positive; a norm that is not finite, with
  //                     error_if_nonfinite
  //   state             the context has been released
  //   deadline, peer_lost, ...  a worker did not answer; some gradients may have been scaled
  double clip_grad_norm(double max_norm, const ClipOptions& options = {});
  // The same beside data parallelism: `trainers` are the ranks whose DistributedDataParallel
  // averages the dense gradients. All of them call this, each with its own context, and all scale
  // by the same factor, so that their replicas stay equal. The norm is that of all their contexts
  // as of one vector, in which gradients that a DistributedDataParallel averages count once. Runs
  // one operation of the group, in the same order on all ranks as its other operations; `deadline`
  // bounds it separately. Throws what the above throws, and
  //   state             another rank could not ask the workers of its context; no rank has scaled
  //   errors of groups  a rank died or left, or did not call this within the deadline; the group
  //                     has ended
  // A template, so that weft::collectives is linked by programs that have a group and by no other.
  template <class Group>
  requires std::same_as<Group, ProcessGroup>
  double clip_grad_norm(double max_norm, Group& trainers, const ClipOptions& options = {}) {
    const internal::ClipRanks ranks{
        trainers.size(), trainers.name(),
        [&trainers](const at::Tensor& all, const at::Tensor& mine, absl::Duration timeout) {
          return trainers.try_all_gather_into_tensor(all, mine, {.timeout = timeout});
        }};
    return clip(max_norm, options, &ranks);
  }

  // Ends the context on all workers: later calls of this thread are ordinary ones, a running pass
  // fails with `cancelled`, and tensors of calls that are under way arrive detached. Completes when
  // every living worker has forgotten the context. Call it on the thread that made the context.
  Future<void> release();
  bool released() const;

 private:
  friend class AutogradContextGuard;
  friend class internal::BackwardCall;
  double clip(double max_norm, const ClipOptions& options, const internal::ClipRanks* trainers);

  const std::shared_ptr<internal::DistAutogradService> service_;
  const std::shared_ptr<internal::ContextState> state_;
  std::optional<ScopeGuard> scope_;
};

// Lets the calling thread take part in a context while the guard lives.
class WEFT_API AutogradContextGuard {
 public:
  explicit AutogradContextGuard(const DistAutogradContext& context);

 private:
  ScopeGuard scope_;
};

// For handlers: returns the context of the call that this thread serves, if the call is in one.
WEFT_API std::optional<AutogradContextId> current_autograd_context(const Worker& worker);
// Returns the gradients that a context has for leaves of this worker. Throws weft::Error,
// not_found: no such context here (yet); state: it has been released.
WEFT_API std::vector<AutogradGradient> autograd_gradients(const Worker& worker,
                                                          const AutogradContextId& id);
// For handlers, and threads with an AutogradContextGuard: runs backward() in a context that another
// worker may have made, from losses of this worker. Throws the same errors, and not_found when the
// context is not known here. Blocks as backward() does, so it must not be called in a coroutine.
//   context.backward(...) at its creator, or, in what it calls:
//   weft::backward(call.worker(), *weft::current_autograd_context(call.worker()), {loss});
WEFT_API void backward(const Worker& worker, const AutogradContextId& id,
                       const std::vector<at::Tensor>& losses, const BackwardOptions& options = {});
WEFT_API Status try_backward(const Worker& worker, const AutogradContextId& id,
                             const std::vector<at::Tensor>& losses,
                             const BackwardOptions& options = {});
// For handlers: adds a context's gradients to `.grad` of this worker's leaves.
WEFT_API void write_autograd_gradients(const Worker& worker, const AutogradContextId& id);
WEFT_API StatusOr<std::vector<AutogradGradient>> try_autograd_gradients(
    const Worker& worker, const AutogradContextId& id);

}  // namespace weft

#endif  // WEFT_DIST_AUTOGRAD_CONTEXT_H_
