// How a reduction ends: on all ranks alike.

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "weft/collectives/internal/ddp/gradient_copy.h"
#include "weft/collectives/internal/ddp/group_io.h"
#include "weft/collectives/internal/ddp/reducer.h"

namespace weft::internal {
namespace {

// What the ranks agree on, the largest of each: whether one has failed, the number of the forward
// and its negative, and (with find_unused, and first of a static graph) which parameters are used.
constexpr int64_t kFailed = 0;
constexpr int64_t kNumber = 1;
constexpr int64_t kNegated = 2;
constexpr int64_t kUsed = 3;

// For another reduction to end, and for operations, which end by their own deadline before.
constexpr absl::Duration kTurn = absl::Minutes(11);

// What the ranks compare: the number, and whether it was given.
int64_t code_of(const ForwardTicket& ticket) { return ticket.number * 2 + (ticket.given ? 1 : 0); }

std::string of_backward(const GradAccessor::BackwardId& id) {
  return id.context.has_value()
             ? absl::StrCat("a backward of autograd context ", id.context->counter, " of ",
                            to_string(id.context->creator))
             : absl::StrCat("local backward ", id.number);
}

}  // namespace

absl::Duration Reducer::time_for(const Reduction& reduction) const {
  return std::min(reduction.accessor->time_left(), options_.timeout.value_or(kTurn));
}

Status Reducer::missing_arrivals_locked(const Reduction& reduction) const {
  for (size_t i = 0; i < arrivals_.size(); ++i) {
    if (reduction.fired[i] >= arrivals_[i]) continue;
    return make_error(
        ErrorKind::kState,
        absl::StrCat("the graph is not static: parameter '", parameters_[i].model.name,
                     "' was ready ", reduction.fired[i], " times, ", arrivals_[i],
                     " in the first backward that was reduced; unset static_graph, and set "
                     "find_unused_parameters where parameters may be unused"));
  }
  return absl::OkStatus();
}

Status Reducer::missing_locked(const Reduction& reduction) const {
  if (reduction.shadow) return absl::OkStatus();
  if (options_.find_unused) return absl::OkStatus();
  if (options_.static_graph) return missing_arrivals_locked(reduction);
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!reduction.ready[i]) names.push_back(absl::StrCat("'", parameters_[i].model.name, "'"));
  }
  if (names.empty()) return absl::OkStatus();
  const size_t all = names.size();
  constexpr size_t kShown = 8;
  if (all > kShown) names.resize(kShown);
  return make_error(
      ErrorKind::kState,
      absl::StrCat("no gradient for ", all, " of ", parameters_.size(),
                   " parameters: ", absl::StrJoin(names, ", "), all > kShown ? ", ..." : "",
                   "; all are to take part in each forward and its loss, or "
                   "find_unused_parameters is to be set"));
}

void Reducer::finalize(const ReductionRef& reduction) {
  const c10::AutoGradMode no_grad(false);
  try {
    reduction->at_end->store(Reduction::AtEnd::kWaitsForTurn);
    wait_turn(reduction);
    reduction->at_end->store(Reduction::AtEnd::kReduces);
    {
      MutexLock lock(&mutex_);
      complete_locked(reduction.get());
    }
    settle_join(reduction.get());
    wait_buckets(reduction.get());
    agree(reduction.get());
    const std::vector<int64_t> order = agree_on_order(reduction.get());
    write_back(reduction.get());
    MutexLock lock(&mutex_);
    ++reductions_;
    learn_graph_locked(*reduction);
    for (size_t i = 0; i < parameters_.size(); ++i) unused_[i] = !is_used(*reduction, i);
    watch_->end(launched_early_ - early_before_);
    std::fill(used_.begin(), used_.end(), false);
    if (!order.empty()) {
      rebuilt_ = true;
      order_ = order;
      build_buckets_locked(true);
    }
    forget_locked(reduction);
  } catch (...) {
    const Status failed = annotate(status_from_current_exception(), "DistributedDataParallel");
    bool under_way = false;
    {
      MutexLock lock(&mutex_);
      if (active_ == reduction) {
        for (const Bucket& one : buckets_) {
          under_way |= one.is_under_way();
        }
        under_way |= reduction->agreeing.valid() && !reduction->agreeing.is_completed();
        watch_->fail(std::string(failed.message()));
      }
      forget_locked(reduction);
    }
    // This rank has stopped to wait. What it would issue next would meet the others' answers to
    // this: no order of operations is left that all share.
    if (under_way && group_.failure().ok()) group_.abort(std::string(failed.message()));
    throw_error(failed);
  }
}

void Reducer::wait_turn(const ReductionRef& reduction) {
  const Runtime& runtime = *group_.runtime();
  const absl::Time end = runtime.now() + time_for(*reduction);
  MutexLock lock(&mutex_);
  while (true) {
    activate_next_locked();
    if (active_ == reduction) return;
    const Status waited = changed_.wait_until(&mutex_, end);
    if (waited.ok()) continue;
    const std::string other =
        active_ != nullptr
            ? absl::StrCat("the reduction of ", of_backward(active_->id), ", which is under way")
            : absl::StrCat("forward ", next_number_, " to be reduced before forward ",
                           reduction->ticket.number);
    throw_error(annotate(waited, absl::StrCat("the gradients of ", of_backward(reduction->id),
                                              " wait for ", other)));
  }
}

void Reducer::complete_locked(Reduction* reduction) {
  note_reduced_locked();
  watch_->gradients_ended();
  const Status missing = missing_locked(*reduction);
  if (reduction->failed.ok()) reduction->failed = missing;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!reduction->ready[i]) mark_ready_locked(reduction, i, reduction->gives_zeros());
  }
  launch_ready_locked();
  reduction->asks_used = options_.find_unused || (options_.static_graph && static_used_.empty());
  const auto used = reduction->asks_used ? static_cast<int64_t>(parameters_.size()) : 0;
  reduction->agreed = at::zeros({kUsed + used}, at::kLong);
  auto* const mine = reduction->agreed.mutable_data_ptr<int64_t>();
  mine[kFailed] = reduction->failed.ok() ? 0 : 1;
  // That of a rank without batches is none, and so never the largest.
  const int64_t number = code_of(reduction->ticket);
  mine[kNumber] = reduction->shadow ? std::numeric_limits<int64_t>::min() : number;
  mine[kNegated] = reduction->shadow ? std::numeric_limits<int64_t>::min() : -number;
  for (int64_t i = 0; i < used; ++i) {
    mine[kUsed + i] = !reduction->shadow && used_[static_cast<size_t>(i)] ? 1 : 0;
  }
  reduction->agreeing = group_.all_reduce_async(
      reduction->agreed, {.op = ReduceOp::kMax, .timeout = options_.timeout});
}

void Reducer::wait_buckets(Reduction* reduction) {
  struct Awaited {
    std::string what{};
    std::function<Status(absl::Duration)> wait{};
    std::optional<size_t> bucket{};
  };
  std::vector<Awaited> works;
  bool hooked = false;
  {
    MutexLock lock(&mutex_);
    hooked = hook_ != nullptr;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      if (!buckets_[i].work.valid() && !buckets_[i].hooked.has_value()) continue;
      const std::vector<size_t>& members = buckets_[i].parameters;
      works.push_back(Awaited{
          absl::StrCat(
              "bucket ", i, " of ", buckets_.size(), " (", parameters_[members.front()].model.name,
              members.size() > 1 ? absl::StrCat(" and ", members.size() - 1, " more") : "", ")"),
          [bucket = buckets_[i]](absl::Duration time) {
            if (!bucket.hooked.has_value()) return bucket.work.try_wait(time);
            const StatusOr<at::Tensor> mean = bucket.hooked->try_wait(time);
            if (!mean.ok()) return mean.status();
            if (mean->is_same(bucket.buffer)) return absl::OkStatus();
            if (mean->defined() && mean->numel() == bucket.buffer.numel()) {
              bucket.buffer.copy_(mean->reshape({-1}));
              return absl::OkStatus();
            }
            return make_error(ErrorKind::kInvalidArgument,
                              absl::StrCat("the hook gave ", mean->defined() ? mean->numel() : 0,
                                           " elements for ", bucket.buffer.numel()));
          },
          i});
    }
  }
  works.push_back(
      Awaited{"agreeing on the result",
              [work = reduction->agreeing](absl::Duration time) { return work.try_wait(time); }});
  for (const Awaited& one : works) {
    watch_->waits_for(one.what);
    const Status done = one.wait(time_for(*reduction));
    if (done.ok()) {
      if (one.bucket.has_value()) {
        if (*one.bucket >= watch_->first_unreduced()) watch_->reduced(*one.bucket);
        write_early(reduction, *one.bucket);
      }
      continue;
    }
    // An operation that has failed says itself whom it had waited for.
    const std::string ranks =
        error_kind(done) == ErrorKind::kDeadline && group_.failure().ok() ? watch_->ranks() : "";
    const Status failed =
        annotate(done, absl::StrCat(one.what, ranks.empty() ? "" : ", which waits for ", ranks));
    // What a hook gives is known to this rank alone, and the others may have agreed already.
    if (hooked && group_.failure().ok()) group_.abort(std::string(failed.message()));
    throw_error(failed);
  }
}

// This thread has nothing else to do until the last bucket is reduced. A local backward has added to
// the gradients before it fails, so they are of no use then, whether some are means or not. Those of
// a pass are dropped with it, and what is not used by any rank is known when the ranks have agreed.
void Reducer::write_early(Reduction* reduction, size_t bucket) {
  const bool later = reduction->id.context.has_value() || reduction->asks_used ||
                     reduction->shadow || reduction->announced != nullptr;
  if (later || options_.bucket_view || !reduction->failed.ok()) return;
  std::vector<size_t> members;
  {
    MutexLock lock(&mutex_);
    const Bucket& one = buckets_[bucket];
    if (!buckets_.back().is_under_way() || !one.buffer.is_cpu()) return;
    members = one.parameters;
    written_early_ += static_cast<int64_t>(members.size());
  }
  reduction->written.resize(parameters_.size());
  for (const size_t i : members) {
    if (is_used(*reduction, i)) write_mean(*reduction, parameters_[i]);
    reduction->written[i] = true;
  }
}

void Reducer::agree(Reduction* reduction) {
  const auto* const all = reduction->agreed.const_data_ptr<int64_t>();
  const bool same = all[kNumber] == -all[kNegated];
  const int64_t number = all[kNumber] / 2;
  const bool given = all[kNumber] % 2 != 0;
  if (reduction->shadow) {
    // As if this rank had made the forward of the others.
    MutexLock lock(&mutex_);
    if (given) next_number_ = std::max(next_number_, number + 1);
    if (!given) forwards_ = std::max(forwards_, number);
  }
  if (all[kFailed] == 0 && same) return;
  {
    // Also what comes next would differ: a rank has gone on after a backward that failed before it
    // came here.
    MutexLock lock(&mutex_);
    if (!same && !reduction->ticket.given) forwards_ = std::max(forwards_, number);
  }
  std::string mine = reduction->failed.ok() ? "" : std::string(reduction->failed.message());
  if (!same && mine.empty() && !reduction->shadow) {
    mine = absl::StrCat("its gradients are of forward ", reduction->ticket.number, ", in ",
                        of_backward(reduction->id));
  }
  const Notes notes = begin_all_gather_notes(group_, mine, options_.timeout);
  throw_if_error(notes.work.try_wait(time_for(*reduction)));
  const std::vector<std::string> texts = read_notes(notes);
  std::vector<std::string> said;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) said.push_back(absl::StrCat("rank ", rank, ": ", texts[rank]));
  }
  throw_error(make_error(reduction->failed.ok() ? ErrorKind::kState : error_kind(reduction->failed),
                         absl::StrCat(same ? "" : "ranks reduce gradients of different forwards; ",
                                      absl::StrJoin(said, "; "))));
}

std::vector<int64_t> Reducer::agree_on_order(Reduction* reduction) {
  std::vector<int64_t> order;
  {
    MutexLock lock(&mutex_);
    if (rebuilt_ || options_.find_unused || parameters_.size() < 2) return {};
  }
  // Each where it arrived last; what did not arrive (it is unused in a static graph), at the end.
  std::vector<bool> there(parameters_.size());
  for (auto i = reduction->arrived.rbegin(); i != reduction->arrived.rend(); ++i) {
    if (!there[*i]) order.push_back(static_cast<int64_t>(*i));
    there[*i] = true;
  }
  std::reverse(order.begin(), order.end());
  for (size_t i = 0; i < there.size(); ++i) {
    if (!there[i]) order.push_back(static_cast<int64_t>(i));
  }
  // Rank 0's counts, or under a Join that of the highest rank with batches: gradients may get ready
  // in another order elsewhere.
  const int root =
      reduction->announced != nullptr || reduction->shadow ? reduction->active.highest : 0;
  const at::Tensor all = at::empty({static_cast<int64_t>(parameters_.size())}, at::kLong);
  std::copy(order.begin(), order.end(), all.mutable_data_ptr<int64_t>());
  const Work work = group_.broadcast_async(all, {.root = root, .timeout = options_.timeout});
  throw_if_error(work.try_wait(time_for(*reduction)));
  const auto* const data = all.const_data_ptr<int64_t>();
  return {data, data + all.numel()};
}

bool Reducer::is_used(const Reduction& reduction, size_t parameter) const {
  if (!reduction.asks_used) return static_used_.empty() || static_used_[parameter];
  return reduction.agreed.const_data_ptr<int64_t>()[kUsed + static_cast<int64_t>(parameter)] != 0;
}

void Reducer::learn_graph_locked(const Reduction& reduction) {
  if (!options_.static_graph) return;
  if (arrivals_.empty() && !reduction.shadow) arrivals_ = reduction.fired;
  if (!static_used_.empty()) return;
  std::vector<bool> used;
  for (size_t i = 0; i < parameters_.size(); ++i) used.push_back(is_used(reduction, i));
  static_used_ = std::move(used);
}

// No other reduction uses the buckets: this one is active.
void Reducer::write_back(Reduction* reduction) {
  const double share = share_of_absent(*reduction);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (parameter.model.sparse) {
      reduce_sparse(reduction, &parameter);
      continue;
    }
    if (!is_used(*reduction, i)) continue;  // by no rank: its gradient stays as it is
    if (!reduction->written.empty() && reduction->written[i]) continue;
    if (share != 1) parameter.view.mul_(share);
    write_mean(*reduction, parameter);
  }
}

void Reducer::write_mean(const Reduction& reduction, const Parameter& parameter) {
  const bool alias = options_.bucket_view && !reduction.id.context.has_value();
  const at::Tensor& view = parameter.view;
  const size_t whole = gradient_bytes_;
  reduction.accessor->with_grad(parameter.model.tensor, [alias, whole, &view](at::Tensor& grad) {
    if (alias) {
      grad = view;
    } else {
      // One that has none gets one of the strides that its copy in the bucket has.
      if (!grad.defined()) grad = at::empty_like(view);
      copy_gradient(view, whole, grad);
    }
    return true;
  });
}

void Reducer::reduce_sparse(Reduction* reduction, Parameter* parameter) {
  at::Tensor mine;
  if (!reduction->gives_zeros()) {
    reduction->accessor->with_grad(parameter->model.tensor, [&mine](at::Tensor& grad) {
      mine = grad;
      return false;
    });
  }
  at::Tensor sum = all_reduce_sparse(group_, mine, parameter->model.tensor, options_.timeout);
  sum.mul_(share_of_absent(*reduction) / static_cast<double>(world_));
  const size_t index = static_cast<size_t>(parameter - parameters_.data());
  if (!is_used(*reduction, index)) return;
  reduction->accessor->with_grad(parameter->model.tensor, [&sum](at::Tensor& grad) {
    grad = std::move(sum);
    return true;
  });
}

void Reducer::abandon(const ReductionRef& reduction) {
  MutexLock lock(&mutex_);
  if (std::find(waiting_.begin(), waiting_.end(), reduction) == waiting_.end()) return;
  reduction->abandoned = true;
  if (reduction->failed.ok()) {
    reduction->failed = make_error(
        ErrorKind::kUser, absl::StrCat(of_backward(reduction->id), " failed before its end"));
  }
  if (active_ == reduction) {
    give_up_locked(reduction);
  } else {
    activate_next_locked();  // which does it, when it is its turn
  }
}

void Reducer::give_up_locked(const ReductionRef& reduction) {
  const c10::AutoGradMode no_grad(false);
  try {
    complete_locked(reduction.get());
    watch_->fail(std::string(reduction->failed.message()));
    // Tells the other ranks why; this one does not wait for them.
    (void)begin_all_gather_notes(group_, std::string(reduction->failed.message()),
                                 options_.timeout);
  } catch (...) {
    // The group takes no more operations: then it tells the others itself.
  }
  forget_locked(reduction);
}

}  // namespace weft::internal
