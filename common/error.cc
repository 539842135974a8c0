#include "weft/common/error.h"

#include <cxxabi.h>

#include <new>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "absl/strings/cord.h"
#include "weft/common/internal/text.h"

namespace weft {
namespace {

using internal::view;

constexpr char kPayloadUrl[] = "weft/error";

// Details are packed as: kind byte, then three strings, each with a 32-bit little-endian length.
void append_string(std::string* out, std::string_view s) {
  const uint32_t n = static_cast<uint32_t>(s.size());
  for (int i = 0; i < 4; ++i) out->push_back(static_cast<char>(n >> (8 * i)));
  out->append(s);
}

bool take_string(std::string_view* in, std::string* out) {
  if (in->size() < 4) return false;
  uint32_t n = 0;
  for (int i = 0; i < 4; ++i)
    n |= static_cast<uint32_t>(static_cast<unsigned char>((*in)[i])) << (8 * i);
  in->remove_prefix(4);
  if (in->size() < n) return false;
  out->assign(in->data(), n);
  in->remove_prefix(n);
  return true;
}

// The table of exception types: the first match wins, so a derived type stands before its base.
struct Row {
  bool (*matches)(const std::exception&);
  absl::StatusCode code;
};

template <class E>
bool is(const std::exception& e) {
  return dynamic_cast<const E*>(&e) != nullptr;
}

constexpr Row kRows[] = {
    {&is<std::invalid_argument>, absl::StatusCode::kInvalidArgument},
    {&is<std::domain_error>, absl::StatusCode::kInvalidArgument},
    {&is<std::out_of_range>, absl::StatusCode::kOutOfRange},
    {&is<std::length_error>, absl::StatusCode::kOutOfRange},
    {&is<std::range_error>, absl::StatusCode::kOutOfRange},
    {&is<std::overflow_error>, absl::StatusCode::kOutOfRange},
    {&is<std::underflow_error>, absl::StatusCode::kOutOfRange},
    {&is<std::bad_alloc>, absl::StatusCode::kResourceExhausted},
};

// LibTorch's, by the names of their types as the compiler writes them: this module must not know
// LibTorch. c10::Error is the base of all others and has no row of its own.
constexpr std::string_view kTorchBase = "N3c105ErrorE";
struct TorchRow {
  std::string_view type;
  absl::StatusCode code;
};
constexpr TorchRow kTorchRows[] = {
    {"N3c1010IndexErrorE", absl::StatusCode::kOutOfRange},
    {"N3c1010ValueErrorE", absl::StatusCode::kInvalidArgument},
    {"N3c109TypeErrorE", absl::StatusCode::kInvalidArgument},
    {"N3c1011LinAlgErrorE", absl::StatusCode::kInvalidArgument},
    {"N3c1011SyntaxErrorE", absl::StatusCode::kInvalidArgument},
    {"N3c1011BufferErrorE", absl::StatusCode::kInvalidArgument},
    {"N3c1019NotImplementedErrorE", absl::StatusCode::kUnimplemented},
    {"N3c1016OutOfMemoryErrorE", absl::StatusCode::kResourceExhausted},
    {"N3c1018EnforceFiniteErrorE", absl::StatusCode::kOutOfRange},
    {"N3c1016AcceleratorErrorE", absl::StatusCode::kInternal},
    {"N3c1016DistNetworkErrorE", absl::StatusCode::kUnavailable},
    {"N3c1014DistStoreErrorE", absl::StatusCode::kUnavailable},
    {"N3c109DistErrorE", absl::StatusCode::kUnavailable},
};

// The type and its bases, nearest first. All of LibTorch's have one base each; where a type has
// several, the walk ends.
absl::StatusCode torch_code(const std::type_info& thrown, bool* is_torch) {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  const std::type_info* type = &thrown;
  while (type != nullptr) {
    const std::string_view name = type->name();
    if (name == kTorchBase) *is_torch = true;
    for (const TorchRow& row : kTorchRows) {
      if (code == absl::StatusCode::kUnknown && row.type == name) code = row.code;
    }
    const auto* single = dynamic_cast<const abi::__si_class_type_info*>(type);
    type = single == nullptr ? nullptr : single->__base_type;
  }
  return *is_torch ? code : absl::StatusCode::kUnknown;
}

// Where the backtrace begins in what() of a c10::Error.
constexpr std::string_view kBacktraceMark = "\nException raised from ";

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

Status status_of(const std::exception& e) {
  const char* const text = e.what();
  std::string_view message = text == nullptr ? "" : text;
  for (const Row& row : kRows) {
    if (row.matches(e)) return make_error(row.code, ErrorKind::kUser, message);
  }
  bool is_torch = false;
  const absl::StatusCode code = torch_code(typeid(e), &is_torch);
  ErrorDetails details;
  details.kind = ErrorKind::kUser;
  const size_t mark = is_torch ? message.find(kBacktraceMark) : std::string_view::npos;
  if (mark != std::string_view::npos) {
    details.remote_trace = without_paths(message.substr(mark + 1));
    message = message.substr(0, mark);
  }
  return with_details(make_error(code, ErrorKind::kUser, message), details);
}

}  // namespace

std::string_view kind_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kNone: return "none";
    case ErrorKind::kUser: return "user";
    case ErrorKind::kSignature: return "signature";
    case ErrorKind::kNotFound: return "not_found";
    case ErrorKind::kInvalidArgument: return "invalid_argument";
    case ErrorKind::kDeadline: return "deadline";
    case ErrorKind::kCancelled: return "cancelled";
    case ErrorKind::kNotDelivered: return "not_delivered";
    case ErrorKind::kMaybeExecuted: return "maybe_executed";
    case ErrorKind::kPeerLost: return "peer_lost";
    case ErrorKind::kProtocol: return "protocol";
    case ErrorKind::kResource: return "resource";
    case ErrorKind::kState: return "state";
    case ErrorKind::kUnimplemented: return "unimplemented";
    case ErrorKind::kInternal: return "internal";
    case ErrorKind::kUnavailable: return "unavailable";
    case ErrorKind::kPermission: return "permission";
  }
  return "unknown";
}

absl::StatusCode default_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kNone:
    case ErrorKind::kUser: return absl::StatusCode::kUnknown;
    case ErrorKind::kSignature:
    case ErrorKind::kInvalidArgument: return absl::StatusCode::kInvalidArgument;
    case ErrorKind::kNotFound: return absl::StatusCode::kNotFound;
    case ErrorKind::kDeadline: return absl::StatusCode::kDeadlineExceeded;
    case ErrorKind::kCancelled: return absl::StatusCode::kCancelled;
    case ErrorKind::kNotDelivered:
    case ErrorKind::kMaybeExecuted:
    case ErrorKind::kPeerLost:
    case ErrorKind::kUnavailable: return absl::StatusCode::kUnavailable;
    case ErrorKind::kProtocol: return absl::StatusCode::kDataLoss;
    case ErrorKind::kResource: return absl::StatusCode::kResourceExhausted;
    case ErrorKind::kState: return absl::StatusCode::kFailedPrecondition;
    case ErrorKind::kUnimplemented: return absl::StatusCode::kUnimplemented;
    case ErrorKind::kInternal: return absl::StatusCode::kInternal;
    case ErrorKind::kPermission: return absl::StatusCode::kPermissionDenied;
  }
  return absl::StatusCode::kUnknown;
}

Status with_details(Status status, const ErrorDetails& details) {
  if (status.ok()) return status;
  std::string packed(1, static_cast<char>(details.kind));
  append_string(&packed, details.origin);
  append_string(&packed, details.remote_trace);
  append_string(&packed, details.payload);
  status.SetPayload(kPayloadUrl, absl::Cord(std::move(packed)));
  return status;
}

Status make_error(absl::StatusCode code, ErrorKind kind, std::string_view message) {
  if (code == absl::StatusCode::kOk) code = absl::StatusCode::kUnknown;
  return with_details(Status(code, view(message)), ErrorDetails{kind, "", "", ""});
}

Status make_error(ErrorKind kind, std::string_view message) {
  return make_error(default_code(kind), kind, message);
}

ErrorDetails error_details(const Status& status) {
  ErrorDetails details;
  const auto packed = status.GetPayload(kPayloadUrl);
  if (!packed.has_value()) return details;
  const std::string bytes(*packed);
  std::string_view in(bytes);
  if (in.empty()) return details;
  details.kind = static_cast<ErrorKind>(in[0]);
  in.remove_prefix(1);
  if (!take_string(&in, &details.origin) || !take_string(&in, &details.remote_trace) ||
      !take_string(&in, &details.payload)) {
    return ErrorDetails{};
  }
  return details;
}

ErrorKind error_kind(const Status& status) {
  const auto packed = status.GetPayload(kPayloadUrl);
  if (!packed.has_value() || packed->empty()) return ErrorKind::kNone;
  return static_cast<ErrorKind>((*packed)[0]);
}

Status annotate(const Status& status, std::string_view context) {
  if (status.ok()) return status;
  std::string message(context);
  message.append(": ");
  message.append(status.message().data(), status.message().size());
  Status out(status.code(), message);
  status.ForEachPayload(
      [&out](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

Error::Error(absl::StatusCode code, std::string_view message)
    : Error(make_error(code, ErrorKind::kUser, message)) {}

Error::Error(Status status) : status_(std::move(status)), details_(error_details(status_)) {
  render();
}

void Error::render() {
  what_ = std::string(absl::StatusCodeToString(status_.code()));
  what_.append(" (").append(kind_name(details_.kind)).append("): ");
  what_.append(status_.message().data(), status_.message().size());
  if (!details_.origin.empty()) what_.append(" [at worker ").append(details_.origin).append("]");
  if (!details_.remote_trace.empty()) what_.append("\n").append(details_.remote_trace);
}

Error& Error::with_payload(std::string payload) & {
  details_.payload = std::move(payload);
  return *this;
}

Error&& Error::with_payload(std::string payload) && {
  details_.payload = std::move(payload);
  return std::move(*this);
}

void throw_error(const Status& status) { throw Error(status); }

Status status_from_current_exception() {
  try {
    throw;
  } catch (const Error& e) {
    return e.status();
  } catch (const std::exception& e) {
    return status_of(e);
  } catch (...) {
    return make_error(absl::StatusCode::kUnknown, ErrorKind::kUser,
                      "an exception that is not derived from std::exception was thrown");
  }
}

}  // namespace weft
