#include "weft/dist_autograd/rref_backward.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rpc/worker.h"

namespace weft {

Status try_backward(DistAutogradContext& context, const RRef<at::Tensor>& loss,
                    const BackwardOptions& options) {
  WEFT_ASSIGN_OR_RETURN(const auto worker, internal::worker_of(loss.handle()));
  if (context.id().creator != key_of(worker->info())) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("backward: worker '", worker->name(), "' holds ",
                                   to_string(loss.id()), ", but not ", to_string(context.id())));
  }
  const absl::Time end = worker->now() + options.deadline.value_or(worker->rpc_timeout());
  const AutogradContextGuard in_context(context);
  if (!current_autograd_context(*worker).has_value()) {
    return make_error(ErrorKind::kState,
                      absl::StrCat("backward: ", to_string(context.id()), " has been released"));
  }
  at::Tensor root;
  if (loss.is_owner()) {
    WEFT_ASSIGN_OR_RETURN(const auto value, loss.local_value_async(end - worker->now()).try_wait());
    root = *value;
  } else {
    WEFT_ASSIGN_OR_RETURN(root, loss.try_to_here({.deadline = end - worker->now()}));
  }
  BackwardOptions rest = options;
  // Otherwise that of the pass is its own default.
  if (options.deadline.is_set()) rest.deadline = end - worker->now();
  return context.try_backward({root}, rest);
}

void backward(DistAutogradContext& context, const RRef<at::Tensor>& loss,
              const BackwardOptions& options) {
  throw_if_error(try_backward(context, loss, options));
}

}  // namespace weft
