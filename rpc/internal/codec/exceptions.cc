// What LibTorch throws, as errors of callers: the rows that common's table cannot have.

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "c10/util/Exception.h"
#include "weft/common/error.h"
#include "weft/rpc/handler.h"

namespace weft::internal {
namespace {

template <class E>
bool is(const c10::Error& e) {
  return dynamic_cast<const E*>(&e) != nullptr;
}

struct Row {
  bool (*matches)(const c10::Error&);
  absl::StatusCode code;
};
// The first match wins, so a derived type stands before its base.
constexpr Row kRows[] = {
    {&is<c10::IndexError>, absl::StatusCode::kOutOfRange},
    {&is<c10::ValueError>, absl::StatusCode::kInvalidArgument},
    {&is<c10::TypeError>, absl::StatusCode::kInvalidArgument},
    {&is<c10::LinAlgError>, absl::StatusCode::kInvalidArgument},
    {&is<c10::SyntaxError>, absl::StatusCode::kInvalidArgument},
    {&is<c10::BufferError>, absl::StatusCode::kInvalidArgument},
    {&is<c10::NotImplementedError>, absl::StatusCode::kUnimplemented},
    {&is<c10::OutOfMemoryError>, absl::StatusCode::kResourceExhausted},
    {&is<c10::EnforceFiniteError>, absl::StatusCode::kOutOfRange},
    {&is<c10::AcceleratorError>, absl::StatusCode::kInternal},
    {&is<c10::DistNetworkError>, absl::StatusCode::kUnavailable},
    {&is<c10::DistStoreError>, absl::StatusCode::kUnavailable},
    {&is<c10::DistError>, absl::StatusCode::kUnavailable},
};

// LibTorch's backtrace names files of the machine that built it and addresses of this process. Of a
// path its last part stays, an address goes.
std::string without_paths(std::string_view text) {
  constexpr size_t kMost = 16 * 1024;
  std::string out;
  size_t at = 0;
  while (at < text.size() && out.size() < kMost) {
    const size_t end = text.find_first_of(" \n()\"", at);
    const size_t stop = end == std::string_view::npos ? text.size() : end;
    std::string_view word = text.substr(at, stop - at);
    const size_t slash = word.rfind('/');
    if (slash != std::string_view::npos) word.remove_prefix(slash + 1);
    const bool address = word.size() > 4 && word.substr(0, 2) == "0x";
    if (!address) out.append(word);
    if (stop < text.size() && !address) out.push_back(text[stop]);
    at = stop + 1;
  }
  return out;
}

// The backtrace of an error whose type was lost: a coroutine's, which common turned into a Status.
constexpr std::string_view kBacktraceMark = "\nException raised from ";

}  // namespace

Status status_from_handler_exception() {
  try {
    throw;
  } catch (const c10::Error& e) {
    absl::StatusCode code = absl::StatusCode::kUnknown;
    for (const Row& row : kRows) {
      if (row.matches(e)) {
        code = row.code;
        break;
      }
    }
    ErrorDetails details;
    details.kind = ErrorKind::kUser;
    if (e.backtrace() != nullptr) details.remote_trace = without_paths(e.backtrace()->get());
    return with_details(make_error(code, ErrorKind::kUser, e.what_without_backtrace()), details);
  } catch (...) {
    return status_from_current_exception();
  }
}

Status as_handler_error(Status status) {
  ErrorDetails details = error_details(status);
  const std::string_view message(status.message().data(), status.message().size());
  const size_t mark = message.find(kBacktraceMark);
  const bool torch = mark != std::string_view::npos && details.remote_trace.empty() &&
                     (details.kind == ErrorKind::kUser || details.kind == ErrorKind::kNone);
  if (details.kind != ErrorKind::kNone && !torch) return status;
  if (details.kind == ErrorKind::kNone) details.kind = ErrorKind::kUser;
  if (torch) details.remote_trace = without_paths(message.substr(mark + 1));
  return with_details(
      make_error(status.code(), details.kind, torch ? message.substr(0, mark) : message), details);
}

}  // namespace weft::internal
