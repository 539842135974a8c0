// What a reducer has between backwards: its parameters, hooks and buckets. What happens in one: reducer_ready.cc and
// reducer_end.cc.

#include "weft/collectives/internal/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/internal/ddp/buckets.h"
#include "weft/collectives/internal/group_handle.h"

namespace weft::internal {
namespace {

// A part of the buffer with the strides of the parameter, so that gradients are copied as they lie.
at::Tensor part_of(const at::Tensor& buffer, int64_t offset, const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return buffer.as_strided(parameter.sizes(), parameter.strides(), offset);
  }
  return buffer.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

}  // namespace

Reducer::Reducer(std::vector<ModelTensor> parameters, const ProcessGroup& group,
                 const ReducerOptions& options)
    : group_(group),
      options_(options),
      world_(group_.size()),
      watch_(std::make_shared<ReductionWatch>(group, options.module)),
      changed_(group_.runtime().get()) {
  for (ModelTensor& one : parameters) {
    Parameter parameter;
    parameter.options = one.tensor.options();
    parameter.sizes = one.tensor.sizes().vec();
    parameter.strides = one.tensor.strides().vec();
    parameter.model = std::move(one);
    gradient_bytes_ += parameter.model.tensor.nbytes();
    parameters_.push_back(std::move(parameter));
  }
  MutexLock lock(&mutex_);
  used_.resize(parameters_.size());
  build_buckets_locked(true);
  first_bytes_ = bucket_bytes_locked();
  unused_.resize(parameters_.size());
  group_.handle()->core().add_user(watch_);
}

Reducer::~Reducer() { hooks_.clear(); }

void Reducer::attach() {
  for (const Parameter& one : parameters_) {
    if (!LeafHook::is_on(one.model.tensor)) continue;
    throw_error(make_error(
        ErrorKind::kState,
        absl::StrCat("DistributedDataParallel: parameter '", one.model.name,
                     "' is in another DistributedDataParallel, which lives: destroy that first")));
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.emplace_back(parameters_[i].model.tensor,
                        [weak = weak_from_this(), i](const std::shared_ptr<GradAccessor>& of) {
                          if (const auto self = weak.lock()) self->on_ready(i, of);
                        });
  }
}

void Reducer::check_parameters() const {
  for (const Parameter& one : parameters_) {
    const at::Tensor& now = one.model.tensor;
    if (now.requires_grad() && now.sizes() == at::IntArrayRef(one.sizes) &&
        now.scalar_type() == one.options.dtype().toScalarType() &&
        now.device() == one.options.device()) {
      continue;
    }
    throw_error(
        make_error(ErrorKind::kState,
                   absl::StrCat("DistributedDataParallel: parameter '", one.model.name, "' is now ",
                                now.toString(), " of [", absl::StrJoin(now.sizes(), ", "), "] on ",
                                now.device().str(), now.requires_grad() ? "" : ", without grad",
                                "; it was [", absl::StrJoin(one.sizes, ", "),
                                "] of another kind when this "
                                "was made: change a module before it is wrapped")));
  }
}

void Reducer::build_buckets_locked(bool keep) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  for (const Parameter& one : parameters_) {
    tensors.push_back(one.model.tensor);
    sparse.push_back(one.model.sparse);
  }
  BucketAssignment assigned = compute_bucket_assignment_by_size(
      tensors, {options_.first_bucket_bytes, options_.bucket_bytes}, sparse, order_);
  // Gradients get ready in about the reverse order of the forward.
  if (order_.empty()) std::reverse(assigned.buckets.begin(), assigned.buckets.end());
  std::vector<Bucket> made;
  for (const std::vector<size_t>& members : assigned.buckets) {
    Bucket& bucket = made.emplace_back();
    bucket.parameters = members;
    int64_t elements = 0;
    for (const size_t i : members) {
      parameters_[i].bucket = made.size() - 1;
      elements += parameters_[i].model.tensor.numel();
    }
    if (parameters_[members.front()].model.sparse) {
      parameters_[members.front()].view = at::Tensor();
      continue;
    }
    const at::TensorOptions& kind = parameters_[members.front()].options;
    const auto dtype = kind.dtype().toScalarType();
    bucket.buffer = kind.device().is_cpu()
                        ? group_.empty({elements}, dtype)
                        : at::empty({elements}, at::device(kind.device()).dtype(dtype));
    int64_t offset = 0;
    for (const size_t i : members) {
      Parameter& one = parameters_[i];
      const at::Tensor view = part_of(bucket.buffer, offset, one.model.tensor);
      offset += one.model.tensor.numel();
      const at::Tensor grad = one.model.tensor.grad();
      // Where gradients lie in buckets, they move along.
      if (options_.bucket_view && one.view.defined() && grad.defined() &&
          grad.is_alias_of(one.view)) {
        keep ? view.copy_(grad) : view.zero_();
        one.model.tensor.mutable_grad() = view;
      }
      one.view = view;
    }
  }
  buckets_ = std::move(made);
}

void Reducer::set_hook(CommHook hook) {
  MutexLock lock(&mutex_);
  if (hook != nullptr && hook_ == nullptr && reductions_ == 0 && waiting_.empty()) {
    hook_ = std::move(hook);
    return;
  }
  throw_error(make_error(
      ErrorKind::kState,
      absl::StrCat(
          "DistributedDataParallel: a hook is registered once, before the first backward; ",
          hook == nullptr
              ? "this is none"
              : (hook_ != nullptr ? "there is one already" : "there was a backward already"))));
}

ForwardTicket Reducer::next_ticket(int64_t number) {
  MutexLock lock(&mutex_);
  if (number > 0) return {number, true};
  return {++forwards_, false};
}

void Reducer::watch(const ForwardTicket& ticket, const std::vector<at::Tensor*>& outputs) {
  const absl::Duration deadline = options_.timeout.value_or(group_.timeout());
  watch_outputs(outputs, deadline, [weak = weak_from_this(), ticket](const auto& accessor) {
    const auto self = weak.lock();
    if (self != nullptr) self->on_begin(ticket, accessor);
  });
}

std::vector<int64_t> Reducer::bucket_bytes_locked() const {
  std::vector<int64_t> out;
  for (const Bucket& one : buckets_) {
    out.push_back(one.buffer.defined() ? static_cast<int64_t>(one.buffer.nbytes()) : 0);
  }
  return out;
}

void Reducer::zero_grad(bool set_to_none) {
  const c10::AutoGradMode no_grad(false);
  for (const Parameter& one : parameters_) {
    at::Tensor& grad = one.model.tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (options_.bucket_view && one.view.defined() && grad.is_alias_of(one.view)) {
      grad.zero_();
    } else if (set_to_none) {
      grad.reset();
    } else {
      if (grad.grad_fn() != nullptr) grad.detach_();
      grad.zero_();
    }
  }
}

Reducer::Sight Reducer::sight() const {
  MutexLock lock(&mutex_);
  Sight out;
  for (const Bucket& bucket : buckets_) {
    auto& names = out.buckets.emplace_back();
    for (const size_t i : bucket.parameters) names.push_back(parameters_[i].model.name);
  }
  out.reductions = reductions_;
  out.launched_early = launched_early_;
  out.written_early = written_early_;
  out.rebuilt = rebuilt_;
  out.first_bytes = first_bytes_;
  out.bucket_bytes = bucket_bytes_locked();
  for (size_t i = 0; i < unused_.size(); ++i) {
    if (!unused_[i]) continue;
    out.unused.push_back(parameters_[i].model.name);
    out.unused_bytes += static_cast<int64_t>(parameters_[i].model.tensor.nbytes());
  }
  out.order = order_;
  out.hooked = hook_ != nullptr;
  return out;
}

}  // namespace weft::internal
