// The norm of a context's gradients over its workers, and scaling them.

#include <cmath>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "torch/csrc/autograd/variable.h"
#include "weft/collectives/grad_accessor.h"
#include "weft/common/future.h"
#include "weft/dist_autograd/internal/service.h"

namespace weft::internal {
namespace {

// Sum of |g|^p, in double whatever the type of the gradients; for infinity: the largest.
double sum_of_powers(const std::vector<LeafGradient>& leaves, double p) {
  const c10::AutoGradMode no_grad(false);
  double sum = 0;
  for (const LeafGradient& one : leaves) {
    // A row that a sparse gradient has twice counts as their sum.
    at::Tensor values = one.gradient.is_sparse() ? one.gradient.coalesce()._values() : one.gradient;
    if (values.numel() == 0) continue;
    values = values.abs().to(at::kDouble);
    if (std::isinf(p)) {
      const double largest = values.max().item<double>();
      if (!(largest <= sum)) sum = largest;  // also when it is not a number
    } else {
      sum += (p == 2 ? values.square() : values.pow(p)).sum().item<double>();
    }
  }
  return sum;
}

double combined(double a, double b, double p) {
  if (!std::isinf(p)) return a + b;
  return std::isnan(a) || std::isnan(b) ? std::nan("") : std::max(a, b);
}

// A reducer averages the gradients of this leaf over ranks (GradReadyHook), so all of them have the same.
bool is_reduced(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (accumulator == nullptr) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<const GradReadyReceiver*>(hook.get()) != nullptr) return true;
  }
  return false;
}

// What a rank tells the others of the gradients in its context.
struct RankSums {
  double failed = 0;   // 1: it does not know them
  double reduced = 0;  // of leaves that a reducer averages: equal on all ranks
  double own = 0;      // of all others, at all workers of its context
};

// The sum over the contexts of all ranks. What a reducer averages counts once; rank 0's bits of it count, so that all
// ranks come to one factor.
StatusOr<double> sum_over_ranks(const ClipRanks& group, const RankSums& mine, double p,
                                absl::Duration time) {
  constexpr int64_t kWords = 3;
  const at::Tensor out = at::tensor({mine.failed, mine.reduced, mine.own}, at::kDouble);
  const at::Tensor all = at::empty({group.size, kWords}, at::kDouble);
  WEFT_RETURN_IF_ERROR(group.gather(all, out, time));
  const auto* const words = all.const_data_ptr<double>();
  std::vector<int> failed;
  double sum = words[1];
  for (int rank = 0; rank < group.size; ++rank) {
    if (words[kWords * rank] != 0) failed.push_back(rank);
    sum = combined(sum, words[kWords * rank + 2], p);
  }
  if (failed.empty()) return sum;
  return make_error(
      ErrorKind::kState,
      absl::StrCat("clip_grad_norm: rank ", absl::StrJoin(failed, ", "), " of group '", group.name,
                   "' could not ask the workers of its context; nothing was scaled"));
}

}  // namespace

// One call of clip_grad_norm().
struct DistAutogradService::Clip {
  ContextRef context{};
  double norm_type = 2;
  absl::Time end = absl::InfiniteFuture();
  std::vector<WorkerKey> with_gradients{};
  size_t workers = 1;
};

Future<std::string> DistAutogradService::ask_for_clip(const Clip& clip, const WorkerKey& to,
                                                      std::string_view method,
                                                      const std::string& bytes) {
  Promise<std::string> promise(context_.executor);
  Future<std::string> answer = promise.future();
  send(to, method, kBytesSignature, bytes_payload(bytes), clip.end - runtime().now(),
       [promise = std::move(promise)](StatusOr<std::string> result) mutable {
         promise.try_set(std::move(result));
       });
  return answer;
}

Status DistAutogradService::clip_failed(const Clip& clip, const WorkerKey& at, const Status& why,
                                        std::string_view what) const {
  return annotate(why, absl::StrCat("clip_grad_norm: ", std::string(what), " at worker '",
                                    name_of(at), "' in ", weft::to_string(clip.context->id())));
}

StatusOr<double> DistAutogradService::sum_at_others(Clip* clip) {
  const ContextRef& context = clip->context;
  NormRequestData request{context->id(), clip->norm_type, 0, {}};
  context->ended_passes(self(), &request.ended_below, &request.aborted);
  double sum = 0;
  std::set<WorkerKey> met = {self()};
  std::set<WorkerKey> next = context->known();
  while (!next.empty()) {
    std::vector<std::pair<WorkerKey, Future<std::string>>> asked;
    for (const WorkerKey& worker : next) {
      if (!met.insert(worker).second) continue;
      asked.emplace_back(worker, ask_for_clip(*clip, worker, kNormMethod, encode(request)));
    }
    next.clear();
    for (const auto& [worker, answer] : asked) {
      const auto bytes = answer.try_wait(absl::InfiniteDuration());
      if (!bytes.ok()) return clip_failed(*clip, worker, bytes.status(), "asking for the norm");
      WEFT_ASSIGN_OR_RETURN(const NormData found, decode_norm(*bytes));
      sum = combined(sum, found.sum, clip->norm_type);
      if (found.sum != 0) clip->with_gradients.push_back(worker);
      next.insert(found.known.begin(), found.known.end());
    }
  }
  clip->workers = met.size();
  return sum;
}

StatusOr<double> DistAutogradService::clip(const ContextRef& context, double most, double norm_type,
                                           bool refuse_nonfinite, absl::Duration deadline,
                                           const ClipRanks* trainers) {
  Clip clip{.context = context, .norm_type = norm_type, .end = runtime().now() + deadline};
  RankSums sums;
  StatusOr<double> others = 0;
  if (context->closed()) {
    others = make_error(ErrorKind::kState,
                        absl::StrCat(weft::to_string(context->id()), " has been released"));
  } else {
    std::vector<LeafGradient> reduced;
    std::vector<LeafGradient> own;
    for (LeafGradient& one : context->gradients()) {
      (trainers != nullptr && is_reduced(one.leaf) ? reduced : own).push_back(std::move(one));
    }
    sums.reduced = sum_of_powers(reduced, norm_type);
    sums.own = sum_of_powers(own, norm_type);
    others = sum_at_others(&clip);
  }
  double sum = 0;
  if (trainers == nullptr) {
    WEFT_RETURN_IF_ERROR(others.status());
    sum = combined(sums.own, *others, norm_type);
  } else {
    // Also a rank that knows no norm takes part: the others wait for it.
    sums.failed = others.ok() ? 0 : 1;
    if (others.ok()) sums.own = combined(sums.own, *others, norm_type);
    const StatusOr<double> all = sum_over_ranks(*trainers, sums, norm_type, deadline);
    WEFT_RETURN_IF_ERROR(others.status());
    WEFT_ASSIGN_OR_RETURN(sum, all);
  }
  const double norm = std::isinf(norm_type) ? sum : std::pow(sum, 1 / norm_type);
  if (refuse_nonfinite && !std::isfinite(norm)) {
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("clip_grad_norm: the norm of order ", norm_type, " over ", clip.workers,
                     " workers",
                     trainers == nullptr ? "" : absl::StrCat(" and ", trainers->size, " ranks"),
                     " is ", norm));
  }
  const double factor = most / (norm + 1e-6);
  if (factor >= 1) return norm;
  std::vector<Future<std::string>> told;
  for (const WorkerKey& worker : clip.with_gradients) {
    told.push_back(
        ask_for_clip(clip, worker, kScaleMethod, encode(ScaleData{context->id(), factor})));
  }
  context->scale(factor);
  for (size_t i = 0; i < told.size(); ++i) {
    const auto answer = told[i].try_wait(absl::InfiniteDuration());
    if (!answer.ok()) {
      return clip_failed(clip, clip.with_gradients[i], answer.status(), "scaling");
    }
  }
  return norm;
}

void DistAutogradService::on_norm(CallContext& call, Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = take_bytes(std::move(arguments));
  if (!bytes.ok()) return reply(bytes.status());
  const StatusOr<NormRequestData> request = decode_norm_request(*bytes);
  if (!request.ok()) return reply(request.status());
  NormData answer;
  // A worker that the context has not reached has no gradients.
  if (const ContextRef context = find(request->context)) {
    context->settle(key_of(call.caller()), request->ended_below, request->aborted);
    answer.sum = sum_of_powers(context->gradients(), request->norm_type);
    const std::set<WorkerKey> known = context->known();
    answer.known.assign(known.begin(), known.end());
  }
  reply(bytes_payload(encode(answer)));
}

void DistAutogradService::on_scale(CallContext&, Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = take_bytes(std::move(arguments));
  if (!bytes.ok()) return reply(bytes.status());
  const StatusOr<ScaleData> scale = decode_scale(*bytes);
  if (!scale.ok()) return reply(scale.status());
  const ContextRef context = find(scale->context);
  if (context == nullptr) {
    return reply(make_error(ErrorKind::kState,
                            absl::StrCat(weft::to_string(scale->context), " has been released")));
  }
  context->scale(scale->factor);
  reply(bytes_payload(""));
}

}  // namespace weft::internal
