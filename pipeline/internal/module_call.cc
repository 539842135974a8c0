#include "weft/pipeline/internal/module_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "weft/rpc/call_context.h"
#include "weft/rpc/containers.h"
#include "weft/rpc/value.h"

namespace weft::pipeline::internal {
namespace {

StatusOr<Tensors> take_tensors(Payload result) {
  Decoder in(std::move(result));
  Tensors out;
  if (in.next() == ValueKind::kList) {
    WEFT_ASSIGN_OR_RETURN(out, in.take<Tensors>());
  } else if (in.next() == ValueKind::kTuple) {
    // Its size is found by trying: a tuple converts only to a tuple of the same size.
    return cannot("it gives a tuple with something else than 2 to 4 tensors");
  } else {
    WEFT_ASSIGN_OR_RETURN(out.emplace_back(), in.take<at::Tensor>());
  }
  WEFT_RETURN_IF_ERROR(in.finish());
  return out;
}

template <size_t N>
StatusOr<Tensors> take_tuple(const Payload& result) {
  Decoder in{Payload(result)};
  WEFT_RETURN_IF_ERROR(in.begin_tuple(N));
  Tensors out;
  for (size_t i = 0; i < N; ++i) {
    WEFT_ASSIGN_OR_RETURN(out.emplace_back(), in.take<at::Tensor>());
  }
  in.end();
  WEFT_RETURN_IF_ERROR(in.finish());
  return out;
}

StatusOr<Tensors> tensors_of(Payload result) {
  for (const auto& taken : {take_tuple<2>(result), take_tuple<3>(result), take_tuple<4>(result)}) {
    if (taken.ok()) return taken;
  }
  return take_tensors(std::move(result));
}

}  // namespace

std::string shape_text(const at::Tensor& t) {
  return t.defined() ? absl::StrCat("[", absl::StrJoin(t.sizes(), ", "), "]") : "undefined";
}

std::optional<int> tensors_taken(std::string_view signature) {
  const size_t end = signature.find(")->");
  if (end == std::string_view::npos || signature.empty() || signature[0] != '(') return {};
  std::string_view list = signature.substr(1, end - 1);
  if (list == "list<tensor>") return -1;
  int n = 0;
  while (!list.empty()) {
    constexpr std::string_view kTensor = "tensor";
    if (list.substr(0, kTensor.size()) != kTensor) return {};
    list.remove_prefix(kTensor.size());
    if (!list.empty() && list[0] == ',') list.remove_prefix(1);
    ++n;
  }
  return n;
}

StatusOr<Tensors> invoke(const Worker& worker, const Method& method,
                         const std::shared_ptr<void>& object, const Tensors& arguments) {
  const int taken = *tensors_taken(method.signature);
  if (taken >= 0 && taken != static_cast<int>(arguments.size())) {
    return cannot(
        absl::StrCat(method.name, method.signature, " is given ", arguments.size(), " tensors"));
  }
  Payload payload;
  Encoder out(&payload);
  out.begin_tuple(taken < 0 ? 1 : arguments.size());
  if (taken < 0) {
    out.put(arguments);
  } else {
    for (const at::Tensor& t : arguments) out.put(t);
  }
  out.end();
  WEFT_RETURN_IF_ERROR(out.status());
  CallContext context(worker, worker.info(), 0, std::make_shared<CallScope>(),
                      absl::InfiniteDuration());
  // Kept by both: a handler that answers later finds it, and is refused.
  const auto answer = std::make_shared<std::optional<StatusOr<Payload>>>();
  method.invoke(context, object, std::move(payload),
                [answer](StatusOr<Payload> result) { answer->emplace(std::move(result)); });
  if (!answer->has_value()) {
    return cannot(absl::StrCat(method.name, " gives a future: a stage gives its tensors at once"));
  }
  WEFT_RETURN_IF_ERROR((*answer)->status());
  auto tensors = tensors_of(std::move(***answer));
  if (!tensors.ok()) return annotate(tensors.status(), "the result of " + method.name);
  return tensors;
}

}  // namespace weft::pipeline::internal
