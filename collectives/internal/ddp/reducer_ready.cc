// Reductions while a backward runs: parameters get ready, buckets leave.

#include <algorithm>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "weft/collectives/internal/ddp/gradient_copy.h"
#include "weft/collectives/internal/ddp/reducer.h"

namespace weft::internal {
namespace {

constexpr size_t kEarly = 4;

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
  buckets_[parameter.bucket].streams.add(stream_here(view));
  if (zeros) {
    view.zero_();
    return;
  }
  const double share = hook_ != nullptr ? 1 : 1.0 / static_cast<double>(world_);
  const bool alias = options_.bucket_view && !reduction->id.context.has_value();
  // A small bucket is sent or reduced at once, from the caches.
  const size_t whole = buckets_[parameter.bucket].buffer.nbytes();
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
    copy_scaled(grad, share, whole, view);
    if (alias) grad = view;
    return alias;
  });
}

void Reducer::launch_locked(size_t index) {
  Bucket& bucket = buckets_[index];
  // Nodes of a backward on a device run on the streams of their forwards.
  use_here(std::exchange(bucket.streams, {}).mark(), bucket.buffer);
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

}  // namespace weft::internal
