// Reductions while a backward runs: parameters get ready, buckets leave.

#include "weft/collectives/internal/ddp/reducer.h"

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/mul.h"
#include "ATen/ops/scalar_tensor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/internal/ddp/buckets.h"
#include "weft/collectives/internal/group_handle.h"

namespace weft::internal {
namespace {

constexpr size_t kEarly = 4;

// A part of the buffer with the strides of the parameter, so that gradients are copied as they lie.
at::Tensor part_of(const at::Tensor& buffer, int64_t offset, const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return buffer.as_strided(parameter.sizes(), parameter.strides(), offset);
  }
  return buffer.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

}  // namespace

// Runs the end of a reduction, or learns that there is none.
class Reducer::End {
 public:
  End(std::weak_ptr<Reducer> reducer, ReductionRef reduction)
      : reducer_(std::move(reducer)), reduction_(std::move(reduction)) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    const auto reducer = reducer_.lock();
    if (reduction_ != nullptr && reducer != nullptr) reducer->abandon(reduction_);
  }
  void run() {
    const ReductionRef reduction = std::exchange(reduction_, nullptr);
    const auto reducer = reducer_.lock();
    if (reducer != nullptr) return reducer->finalize(reduction);
    throw_error(make_error(ErrorKind::kState,
                           "DistributedDataParallel was destroyed before the backward of its "
                           "forward had ended"));
  }

 private:
  const std::weak_ptr<Reducer> reducer_;
  ReductionRef reduction_;
};

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

void Reducer::on_begin(const ForwardTicket& ticket, const std::shared_ptr<GradAccessor>& accessor) {
  const GradAccessor::BackwardId id = accessor->backward_id();
  ReductionRef made;
  {
    MutexLock lock(&mutex_);
    for (const ReductionRef& one : waiting_) {
      if (one->id != id) continue;
      // Another forward of the same backward.
      one->ticket.number = std::max(one->ticket.number, ticket.number);
      return;
    }
    made = make_reduction(accessor);
    made->ticket = ticket;
    const auto early = std::find_if(early_.begin(), early_.end(),
                                    [&id](const Early& one) { return one.id == id; });
    if (early != early_.end()) {
      made->arrived = std::move(early->arrived);
      early_.erase(early);
    }
    waiting_.push_back(made);
  }
  using AtEnd = Reduction::AtEnd;
  accessor->show_wait([watch = watch_, at = made->at_end]() -> std::string {
    const AtEnd now = at->load();
    if (now == AtEnd::kReduces) return watch->doing();
    return now == AtEnd::kWaitsForTurn ? "the turn of its reduction" : "";
  });
  // Without the mutex: what the accessor drops may be an End.
  accessor->at_end([end = std::make_unique<End>(weak_from_this(), made)] { end->run(); });
  MutexLock lock(&mutex_);
  activate_next_locked();
}

void Reducer::on_ready(size_t parameter, const std::shared_ptr<GradAccessor>& accessor) {
  const GradAccessor::BackwardId id = accessor->backward_id();
  MutexLock lock(&mutex_);
  used_[parameter] = true;
  if (const ReductionRef one = reduction_of_locked(id); one != nullptr) {
    one->arrived.push_back(parameter);
    if (one == active_) take_arrived_locked(one.get());
    return;
  }
  const auto early =
      std::find_if(early_.begin(), early_.end(), [&id](const Early& one) { return one.id == id; });
  if (early != early_.end()) return early->arrived.push_back(parameter);
  early_.push_back(Early{id, accessor, {parameter}});
  if (early_.size() > kEarly) early_.pop_front();
}

Reducer::ReductionRef Reducer::reduction_of_locked(const GradAccessor::BackwardId& id) const {
  ReductionRef local;
  int locals = 0;
  for (const ReductionRef& one : waiting_) {
    if (one->id == id) return one;
    if (one->id.context.has_value()) continue;
    local = one;
    ++locals;
  }
  // A node of that backward runs one of its own (a checkpoint), which adds to the same gradients.
  const bool nested = options_.static_graph && !id.context.has_value() && locals == 1;
  return nested ? local : nullptr;
}

bool Reducer::is_next_locked(const Reduction& reduction) const {
  if (reduction.shadow) return true;
  if (reduction.ticket.given) return reduction.ticket.number == next_number_;
  for (const ReductionRef& one : waiting_) {
    if (!one->ticket.given) return one.get() == &reduction;
  }
  return false;
}

void Reducer::activate_next_locked() {
  while (active_ == nullptr) {
    ReductionRef reduction;
    for (const ReductionRef& one : waiting_) {
      if (is_next_locked(*one)) reduction = one;
    }
    if (reduction == nullptr) return;
    active_ = reduction;
    next_bucket_ = 0;
    early_before_ = launched_early_;
    watch_->begin(reduction->ticket.number, buckets_.size());
    if (join_ != nullptr && !reduction->shadow) {
      reduction->announced = join_->announce(join_part_, JoinStep::kReduce);
    }
    for (Bucket& bucket : buckets_) {
      bucket.pending = bucket.parameters.size();
      bucket.work = {};
      bucket.hooked.reset();
    }
    take_arrived_locked(reduction.get());
    if (!reduction->abandoned) break;
    give_up_locked(reduction);
  }
  changed_.notify_all();
}

void Reducer::take_arrived_locked(Reduction* reduction) {
  const c10::AutoGradMode no_grad(false);
  note_reduced_locked();
  for (size_t i = 0; i < arrivals_.size(); ++i) {
    const bool unused = arrivals_[i] == 0 && !reduction->ready[i];
    if (unused) mark_ready_locked(reduction, i, reduction->gives_zeros());
  }
  while (reduction->taken < reduction->arrived.size()) {
    const size_t parameter = reduction->arrived[reduction->taken++];
    if (options_.static_graph && !is_complete_locked(reduction, parameter)) continue;
    mark_ready_locked(reduction, parameter, reduction->gives_zeros());
  }
  launch_ready_locked();
}

bool Reducer::is_complete_locked(Reduction* reduction, size_t parameter) const {
  const int64_t times = ++reduction->fired[parameter];
  if (arrivals_.empty()) return false;  // the first time all buckets leave at the end
  if (times > arrivals_[parameter] && reduction->failed.ok()) {
    reduction->failed = make_error(
        ErrorKind::kState,
        absl::StrCat("the graph is not static: parameter '", parameters_[parameter].model.name,
                     "' was ready ", times, " times, ", arrivals_[parameter],
                     " in the first backward that was reduced; unset static_graph, and set "
                     "find_unused_parameters where parameters may be unused"));
  }
  return times == arrivals_[parameter];
}

void Reducer::mark_ready_locked(Reduction* reduction, size_t index, bool zeros) {
  const Parameter& parameter = parameters_[index];
  if (reduction->ready[index]) {
    if (reduction->failed.ok()) {
      reduction->failed = make_error(
          ErrorKind::kState,
          absl::StrCat("parameter '", parameter.model.name,
                       "' was ready twice in one backward: "
                       "it is used in a backward inside of this one (a checkpoint), whose gradient "
                       "came after its bucket had left; static_graph is for that"));
    }
    return;
  }
  reduction->ready[index] = true;
  try {
    copy_in_locked(reduction, parameter, zeros);
  } catch (...) {
    // The others wait for this bucket.
    if (reduction->failed.ok()) {
      reduction->failed = annotate(status_from_current_exception(),
                                   absl::StrCat("the gradient of '", parameter.model.name, "'"));
    }
  }
  if (--buckets_[parameter.bucket].pending == 0) watch_->ready(parameter.bucket);
}

void Reducer::copy_in_locked(Reduction* reduction, const Parameter& parameter, bool zeros) {
  if (parameter.model.sparse) return;
  const at::Tensor& view = parameter.view;
  if (zeros) {
    view.zero_();
    return;
  }
  const double share = hook_ != nullptr ? 1 : 1.0 / static_cast<double>(world_);
  const bool alias = options_.bucket_view && !reduction->id.context.has_value();
  reduction->accessor->with_grad(parameter.model.tensor, [&](at::Tensor& grad) {
    if (!grad.defined()) {
      view.zero_();
      return false;
    }
    if (grad.is_alias_of(view)) {
      view.mul_(share);
      return false;
    }
    if (grad.is_sparse()) {
      throw_error(make_error(ErrorKind::kInvalidArgument,
                             "it is sparse, and only those of Embedding and EmbeddingBag modules "
                             "that say sparse(true) are expected to be"));
    }
    if (grad.scalar_type() == view.scalar_type() && grad.device() == view.device()) {
      at::Tensor out = view;
      at::mul_out(out, grad, at::scalar_tensor(share, grad.options()));
    } else {
      view.copy_(grad).mul_(share);
    }
    if (alias) grad = view;
    return alias;
  });
}

void Reducer::launch_locked(size_t index) {
  Bucket& bucket = buckets_[index];
  if (hook_ == nullptr) {
    bucket.work = group_.all_reduce_async(bucket.buffer, {.timeout = options_.timeout});
    return;
  }
  GradBucket given{index, buckets_.size(), bucket.buffer, {}, {}};
  for (const size_t i : bucket.parameters) {
    given.gradients.push_back(parameters_[i].view);
    given.parameters.push_back(parameters_[i].model.tensor);
  }
  try {
    bucket.hooked = hook_(group_, given);
  } catch (...) {
    const Status failed =
        annotate(status_from_current_exception(), absl::StrCat("the hook of bucket ", index));
    if (group_.failure().ok()) group_.abort(std::string(failed.message()));
    bucket.hooked = Future<at::Tensor>::ready(failed);
  }
}

void Reducer::launch_ready_locked() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
    Bucket& bucket = buckets_[next_bucket_++];
    if (bucket.buffer.defined()) {
      launch_locked(next_bucket_ - 1);
      watch_->launched(next_bucket_ - 1, static_cast<int64_t>(bucket.buffer.nbytes()));
    }
    for (const Bucket& later : buckets_) {
      if (later.pending == 0) continue;
      ++launched_early_;
      break;
    }
  }
}

void Reducer::note_reduced_locked() {
  for (size_t i = watch_->first_unreduced(); i < next_bucket_; ++i) {
    if (buckets_[i].is_under_way()) return;
    watch_->reduced(i);
  }
}

std::vector<int64_t> Reducer::bucket_bytes_locked() const {
  std::vector<int64_t> out;
  for (const Bucket& one : buckets_) {
    out.push_back(one.buffer.defined() ? static_cast<int64_t>(one.buffer.nbytes()) : 0);
  }
  return out;
}

void Reducer::forget_locked(const ReductionRef& reduction) {
  const auto at = std::find(waiting_.begin(), waiting_.end(), reduction);
  if (at == waiting_.end()) return;
  waiting_.erase(at);
  reduction->accessor.reset();
  if (reduction->ticket.given) next_number_ = std::max(next_number_, reduction->ticket.number + 1);
  if (active_ == reduction) {
    bool under_way = false;
    for (Bucket& bucket : buckets_) {
      under_way |= bucket.is_under_way();
      bucket.work = {};
      bucket.hooked.reset();
    }
    // This rank does not wait for them: they keep their memory, and the next ones get their own.
    if (under_way) build_buckets_locked(false);
    active_.reset();
  }
  activate_next_locked();
  changed_.notify_all();
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
