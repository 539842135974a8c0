#include "weft/rpc/call.h"

#include <utility>

#include "weft/rpc/internal/codec/text.h"
#include "weft/rpc/library.h"

namespace weft::internal {

namespace {

std::string call_label(std::string_view method, const Destination& to) {
  // Runs for every call, so without cat(), which is for errors.
  std::string label = "rpc '";
  label.append(method);
  if (to.by_id()) return label.append("' to worker ").append(std::to_string(to.id()));
  return label.append("' to '").append(to.name()).append("'");
}

}  // namespace

void expect_answer(const Worker& worker, std::string_view method, const Destination& to,
                   FutureCore* future) {
  future->set_default_wait(absl::InfiniteDuration());
  future->set_label(call_label(method, to));
  Continuation with = continuation_of(worker);
  future->adopt_executor(with.executor);
  future->set_wait_driver(std::move(with.driver));
}

StatusOr<std::string> name_in_library(const Worker& worker, const PointerKey& pointer,
                                      std::type_index type, std::string_view signature) {
  const Library* const library = library_of(worker);
  if (library == nullptr) {
    return make_error(ErrorKind::kState,
                      cat("calling a function by pointer, ", signature,
                          ": this worker has no library any more, it has shut down"));
  }
  return library->name_of(pointer, type, signature);
}

Status argument_error(const Status& why, size_t index, std::string_view method) {
  return annotate(why, cat("argument ", index, " of '", method, "'"));
}

Status does_not_fit(double value, size_t type_bytes, bool type_signed) {
  return make_error(
      absl::StatusCode::kOutOfRange, ErrorKind::kInvalidArgument,
      cat(std::to_string(value), " does not fit ", type_signed ? "a signed" : "an unsigned",
          " integer of ", type_bytes * 8, " bits"));
}

}  // namespace weft::internal
