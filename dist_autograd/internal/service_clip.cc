// The norm of a context's gradients over its workers, and scaling them.

#include <cmath>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/common/future.h"
#include "weft/dist_autograd/internal/service.h"

namespace weft::internal {
namespace {

// Of |g|^p, in double whatever the type of the gradients; of infinity: the largest.
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

}  // namespace

StatusOr<double> DistAutogradService::clip(const ContextRef& context, double most, double norm_type,
                                           bool refuse_nonfinite, absl::Duration deadline) {
  const absl::Time end = runtime().now() + deadline;
  if (context->closed()) {
    return make_error(ErrorKind::kState,
                      absl::StrCat(weft::to_string(context->id()), " has been released"));
  }
  NormRequestData request{context->id(), norm_type, 0, {}};
  context->ended_passes(self(), &request.ended_below, &request.aborted);
  const auto ask = [&](const WorkerKey& to, std::string_view method, const std::string& bytes) {
    Promise<std::string> promise(context_.executor);
    Future<std::string> answer = promise.future();
    send(to, method, kBytesSignature, bytes_payload(bytes), end - runtime().now(),
         [promise = std::move(promise)](StatusOr<std::string> result) mutable {
           promise.try_set(std::move(result));
         });
    return answer;
  };
  const auto failed = [&](const WorkerKey& at, const Status& why, std::string_view what) {
    return annotate(why, absl::StrCat("clip_grad_norm: ", std::string(what), " at worker '",
                                      name_of(at), "' in ", weft::to_string(context->id())));
  };
  double sum = sum_of_powers(context->gradients(), norm_type);
  std::vector<WorkerKey> with_gradients;
  std::set<WorkerKey> met = {self()};
  std::set<WorkerKey> next = context->known();
  while (!next.empty()) {
    std::vector<std::pair<WorkerKey, Future<std::string>>> asked;
    for (const WorkerKey& worker : next) {
      if (!met.insert(worker).second) continue;
      asked.emplace_back(worker, ask(worker, kNormMethod, encode(request)));
    }
    next.clear();
    for (const auto& [worker, answer] : asked) {
      const auto bytes = answer.try_wait(absl::InfiniteDuration());
      if (!bytes.ok()) return failed(worker, bytes.status(), "asking for the norm");
      WEFT_ASSIGN_OR_RETURN(const NormData found, decode_norm(*bytes));
      sum = combined(sum, found.sum, norm_type);
      if (found.sum != 0) with_gradients.push_back(worker);
      next.insert(found.known.begin(), found.known.end());
    }
  }
  const double norm = std::isinf(norm_type) ? sum : std::pow(sum, 1 / norm_type);
  if (refuse_nonfinite && !std::isfinite(norm)) {
    return make_error(ErrorKind::kInvalidArgument,
                      absl::StrCat("clip_grad_norm: the norm of order ", norm_type, " over ",
                                   met.size(), " workers is ", norm));
  }
  const double factor = most / (norm + 1e-6);
  if (factor >= 1) return norm;
  std::vector<Future<std::string>> told;
  for (const WorkerKey& worker : with_gradients) {
    told.push_back(ask(worker, kScaleMethod, encode(ScaleData{context->id(), factor})));
  }
  context->scale(factor);
  for (size_t i = 0; i < told.size(); ++i) {
    const auto answer = told[i].try_wait(absl::InfiniteDuration());
    if (!answer.ok()) return failed(with_gradients[i], answer.status(), "scaling");
  }
  return norm;
}

void DistAutogradService::on_norm(CallContext& call, Payload arguments, ReplyFn reply) {
  const StatusOr<std::string> bytes = take_bytes(std::move(arguments));
  if (!bytes.ok()) return reply(bytes.status());
  const StatusOr<NormRequestData> request = decode_norm_request(*bytes);
  if (!request.ok()) return reply(request.status());
  NormData answer;
  // Whom the context has not reached has no gradients.
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
