#include "weft/dist_autograd/context.h"

#include <utility>

#include "ATen/TensorOperators.h"
#include "ATen/ops/ones_like.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "torch/csrc/autograd/variable.h"
#include "weft/dist_autograd/ended_passes.h"
#include "weft/dist_autograd/internal/service.h"
#include "weft/dist_autograd/leaf_effect.h"

namespace weft {
namespace {

using internal::ContextRef;
using internal::DistAutogradService;

std::shared_ptr<DistAutogradService> service_of(const Worker& worker) {
  auto service = worker.service<DistAutogradService>();
  if (service == nullptr) {
    throw_error(make_error(ErrorKind::kState, absl::StrCat("worker '", worker.name(),
                                                           "' has no distributed autograd: list "
                                                           "dist_autograd_service() at join")));
  }
  return service;
}

std::string shape_of(const at::Tensor& tensor) {
  return absl::StrCat(tensor.toString(), " of [", absl::StrJoin(tensor.sizes(), ", "), "]");
}

Status wrong(size_t loss, std::string_view what) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("backward: loss ", loss, " ", std::string(what)));
}

// The gradient to begin with.
StatusOr<at::Tensor> first_gradient(size_t index, const at::Tensor& loss, const at::Tensor& given) {
  if (!loss.defined()) return wrong(index, "is undefined");
  if (!loss.requires_grad()) return wrong(index, "does not require grad");
  if (!given.defined()) {
    if (loss.numel() == 1) return at::ones_like(loss);
    return wrong(index, absl::StrCat("is ", shape_of(loss),
                                     ": only one of a single element can be without a gradient"));
  }
  if (given.sizes() != loss.sizes() || given.dtype() != loss.dtype() ||
      given.device() != loss.device()) {
    return wrong(index, absl::StrCat("is ", shape_of(loss), ", its gradient is ", shape_of(given)));
  }
  return given;
}

std::vector<AutogradGradient> to_public(std::vector<internal::LeafGradient> leaves) {
  std::vector<AutogradGradient> out;
  out.reserve(leaves.size());
  for (internal::LeafGradient& one : leaves) {
    out.push_back(AutogradGradient{std::move(one.leaf), std::move(one.gradient)});
  }
  return out;
}

std::vector<AutogradGradient> gradients_of(const ContextRef& context) {
  return to_public(context->gradients());
}

StatusOr<ContextRef> find_context(const Worker& worker, const AutogradContextId& id) {
  const auto service = service_of(worker);
  if (ContextRef context = service->find(id)) return context;
  if (service->was_released(id)) {
    return make_error(ErrorKind::kState, absl::StrCat(to_string(id), " has been released"));
  }
  return make_error(ErrorKind::kNotFound,
                    absl::StrCat("Could not find autograd context with id: ", to_string(id),
                                 " on worker '", worker.name(), "'"));
}

// As LibTorch accumulates: what is there is added to in place.
void write(const std::vector<AutogradGradient>& gradients) {
  const c10::AutoGradMode no_grad(false);
  for (const AutogradGradient& one : gradients) {
    at::Tensor& grad = one.leaf.mutable_grad();
    if (!grad.defined()) {
      grad = one.gradient.clone();
    } else if (grad.is_sparse() && !one.gradient.is_sparse()) {
      grad = one.gradient + grad;
    } else {
      grad.add_(one.gradient);
    }
  }
}

}  // namespace

namespace internal {

// Access to parts of the public classes that no user code sees.
class BackwardCall {
 public:
  static Status run(const DistAutogradContext& context, const std::vector<at::Tensor>& losses,
                    const BackwardOptions& options, std::string effect, LeafOutcomes* outcomes) {
    return run(context.service_, context.state_, losses, options, std::move(effect), outcomes);
  }
  static Status run(const std::shared_ptr<DistAutogradService>& service, const ContextRef& context,
                    const std::vector<at::Tensor>& losses, const BackwardOptions& options,
                    std::string effect, LeafOutcomes* outcomes) {
    if (options.create_graph) {
      return make_error(ErrorKind::kUnimplemented,
                        "backward: create_graph: gradients of gradients would have to be recorded "
                        "on all workers, which is not supported; compute them at one worker, on "
                        "tensors that were fetched there");
    }
    if (losses.empty()) {
      return make_error(ErrorKind::kInvalidArgument, "backward: no losses were given");
    }
    if (!options.gradients.empty() && options.gradients.size() != losses.size()) {
      return make_error(ErrorKind::kInvalidArgument,
                        absl::StrCat("backward: ", losses.size(), " losses, but ",
                                     options.gradients.size(), " gradients"));
    }
    torch::autograd::edge_list roots;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < losses.size(); ++i) {
      const at::Tensor given = options.gradients.empty() ? at::Tensor() : options.gradients[i];
      WEFT_ASSIGN_OR_RETURN(at::Tensor first, first_gradient(i, losses[i], given));
      gradients.push_back(std::move(first));
      roots.push_back(torch::autograd::impl::gradient_edge(losses[i]));
    }
    return service->backward(context, std::move(roots), std::move(gradients), options,
                             std::move(effect), outcomes);
  }
  static EndedPasses ended(const DistAutogradContext& context) {
    return context.state_->own_passes();
  }
};

EndedPasses ended_passes(const DistAutogradContext& context) {
  return BackwardCall::ended(context);
}

StatusOr<std::vector<AutogradGradient>> gradients_of_ended(const Worker& worker,
                                                           const AutogradContextId& id,
                                                           const EndedPasses& ended) {
  WEFT_ASSIGN_OR_RETURN(const ContextRef context, find_context(worker, id));
  WEFT_ASSIGN_OR_RETURN(std::vector<LeafGradient> found, context->gradients(ended));
  return to_public(std::move(found));
}

LeafEffect::~LeafEffect() = default;

void set_leaf_effects(const Worker& worker, MakeLeafEffect make) {
  service_of(worker)->set_leaf_effects(std::move(make));
}

Status backward_with_effect(const DistAutogradContext& context,
                            const std::vector<at::Tensor>& losses, const BackwardOptions& options,
                            std::string data, LeafOutcomes* outcomes) {
  return BackwardCall::run(context, losses, options, std::move(data), outcomes);
}

}  // namespace internal

std::string to_string(const AutogradContextId& id) {
  return absl::StrCat("autograd context ", to_string(id.creator.id), "/",
                      to_string(id.creator.incarnation), "/", id.counter);
}

DistAutogradContext::DistAutogradContext(const Worker& worker)
    : service_(service_of(worker)), state_(value_or_throw(service_->make_context())) {
  scope_.emplace(service_->scope_of(state_));
}

DistAutogradContext::~DistAutogradContext() {
  // Does not wait for the release; the service retries what fails.
  if (!scope_.has_value()) return;
  scope_.reset();
  service_->release_later(state_);
}

const AutogradContextId& DistAutogradContext::id() const { return state_->id(); }

Status DistAutogradContext::try_backward(const std::vector<at::Tensor>& losses,
                                         const BackwardOptions& options) {
  return internal::backward_with_effect(*this, losses, options, "", nullptr);
}

void DistAutogradContext::backward(const std::vector<at::Tensor>& losses,
                                   const BackwardOptions& options) {
  throw_if_error(try_backward(losses, options));
}

std::vector<AutogradGradient> DistAutogradContext::gradients() const {
  return gradients_of(state_);
}

at::Tensor DistAutogradContext::gradient(const at::Tensor& leaf) const {
  return state_->gradient(leaf);
}

Status try_backward(const Worker& worker, const AutogradContextId& id,
                    const std::vector<at::Tensor>& losses, const BackwardOptions& options) {
  WEFT_ASSIGN_OR_RETURN(const ContextRef context, find_context(worker, id));
  return internal::BackwardCall::run(service_of(worker), context, losses, options, "", nullptr);
}

void backward(const Worker& worker, const AutogradContextId& id,
              const std::vector<at::Tensor>& losses, const BackwardOptions& options) {
  throw_if_error(try_backward(worker, id, losses, options));
}

void DistAutogradContext::write_to_grad() const { write(gradients()); }

double DistAutogradContext::clip_grad_norm(double max_norm, const ClipOptions& options) {
  return clip(max_norm, options, nullptr);
}

double DistAutogradContext::clip(double max_norm, const ClipOptions& options,
                                 const internal::ClipRanks* trainers) {
  if (!(max_norm > 0) || !(options.norm_type > 0)) {
    throw_error(make_error(ErrorKind::kInvalidArgument,
                           absl::StrCat("clip_grad_norm: max_norm is ", max_norm, ", norm_type is ",
                                        options.norm_type, "; both must be positive")));
  }
  return value_or_throw(
      service_->clip(state_, max_norm, options.norm_type, options.error_if_nonfinite,
                     options.deadline.value_or(service_->worker().rpc_timeout()), trainers));
}

Future<void> DistAutogradContext::release() {
  scope_.reset();
  return service_->release(state_);
}

bool DistAutogradContext::released() const { return state_->closed(); }

AutogradContextGuard::AutogradContextGuard(const DistAutogradContext& context)
    : scope_(context.service_->scope_of(context.state_)) {}

std::optional<AutogradContextId> current_autograd_context(const Worker& worker) {
  const ContextRef context = service_of(worker)->current();
  if (context == nullptr || context->closed()) return std::nullopt;
  return context->id();
}

StatusOr<std::vector<AutogradGradient>> try_autograd_gradients(const Worker& worker,
                                                               const AutogradContextId& id) {
  WEFT_ASSIGN_OR_RETURN(const ContextRef context, find_context(worker, id));
  return gradients_of(context);
}

void write_autograd_gradients(const Worker& worker, const AutogradContextId& id) {
  write(autograd_gradients(worker, id));
}

std::vector<AutogradGradient> autograd_gradients(const Worker& worker,
                                                 const AutogradContextId& id) {
  return value_or_throw(try_autograd_gradients(worker, id));
}

}  // namespace weft
