#ifndef WEFT_COMMON_ERROR_H_
#define WEFT_COMMON_ERROR_H_

// Errors. Inside weft and across threads an error is an absl::Status; towards the user a blocking
// call throws weft::Error, made from a Status in one place (throw_error). Both carry the same:
//
//   code          absl::StatusCode, one to one with gRPC's
//   message       what was tried, on whom, with which ids and sizes
//   kind          what went wrong, as a number: never recovered by parsing text
//   origin        name of the worker where the error arose ("" = here)
//   remote_trace  one line per hop and whatever the callee could tell, without file paths
//   payload       bytes that the thrower attached (weft::Error(...).with_payload)
//
// The details travel inside the Status as one payload, so they survive StatusOr, futures, `then`,
// and the wire unchanged. Value types; any thread.

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "weft/common/api.h"

namespace weft {

using absl::Status;
using absl::StatusOr;

// Sent as a number: values are never reused.
enum class ErrorKind : uint8_t {
  kNone = 0,             // not one of ours: a Status without details
  kUser = 1,             // thrown or returned by a handler
  kSignature = 2,        // registered with other types
  kNotFound = 3,         // unknown function, class, object, worker or key
  kInvalidArgument = 4,  // the caller's argument
  kDeadline = 5,         // the time given is over
  kCancelled = 6,
  kNotDelivered = 7,    // transport: proven that the callee never saw it
  kMaybeExecuted = 8,   // transport: sent, outcome unknown
  kPeerLost = 9,        // the peer's incarnation is dead or left
  kProtocol = 10,       // bytes that no correct peer sends
  kResource = 11,       // a budget or bound is exhausted
  kState = 12,          // not possible now (after shutdown, before join, ...)
  kUnimplemented = 13,  // the peer does not run that service
  kInternal = 14,       // our bug
  kUnavailable = 15,    // a store, host or port that cannot be reached
  kPermission = 16,     // refused by policy or credentials
};

// "user", "peer_lost", ...: for logs.
WEFT_API std::string_view kind_name(ErrorKind kind);

struct ErrorDetails {  // what an error carries beside code and text
  ErrorKind kind = ErrorKind::kNone;
  std::string origin;
  std::string remote_trace;
  std::string payload;
};

// A Status of `code` whose details say `kind`. The message is kept byte for byte (NULs included).
WEFT_API WEFT_COLD Status make_error(absl::StatusCode code, ErrorKind kind,
                                     std::string_view message);
// The usual code of a kind.
WEFT_API WEFT_COLD Status make_error(ErrorKind kind, std::string_view message);
WEFT_API absl::StatusCode default_code(ErrorKind kind);

// Details of a Status; kNone and empty strings when it has none.
WEFT_API WEFT_COLD ErrorDetails error_details(const Status& status);
WEFT_API WEFT_COLD Status with_details(Status status, const ErrorDetails& details);
WEFT_API ErrorKind error_kind(const Status& status);
// The same error with `context: ` put before its message; code and details stay.
WEFT_API WEFT_COLD Status annotate(const Status& status, std::string_view context);

class WEFT_API Error : public std::exception {
 public:
  // For handlers and user code: kind is `user`.
  Error(absl::StatusCode code, std::string_view message);
  explicit Error(Status status);

  Error& with_payload(std::string payload) &;
  Error&& with_payload(std::string payload) &&;

  const char* what() const noexcept override { return what_.c_str(); }
  absl::StatusCode code() const { return status_.code(); }
  ErrorKind kind() const { return details_.kind; }
  std::string message() const { return std::string(status_.message()); }
  const std::string& origin() const { return details_.origin; }
  const std::string& remote_trace() const { return details_.remote_trace; }
  const std::string& payload() const { return details_.payload; }
  Status status() const { return with_details(status_, details_); }  // with the details attached

 private:
  void render();

  Status status_;
  ErrorDetails details_;
  std::string what_;
};

// REQUIRES: !status.ok().
[[noreturn]] WEFT_API WEFT_COLD void throw_error(const Status& status);
inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw_error(status);
}
template <class T>
T value_or_throw(StatusOr<T> result) {
  if (!result.ok()) throw_error(result.status());
  return *std::move(result);
}

// The exception being handled, as a Status of kind `user`: weft::Error keeps code, payload, origin
// and trace; standard exception types and LibTorch's map to codes by one table (see error.cc), and
// LibTorch's backtrace becomes the trace; anything else, `throw 42` included, is code unknown.
// REQUIRES: called inside a catch block.
WEFT_API WEFT_COLD Status status_from_current_exception();

}  // namespace weft

#define WEFT_CONCAT_INNER_(a, b) a##b
#define WEFT_CONCAT_(a, b) WEFT_CONCAT_INNER_(a, b)
// Returns from the function with the status that `expr` gives, unless it is OK.
#define WEFT_RETURN_IF_ERROR(expr)                                   \
  do {                                                               \
    ::absl::Status weft_status_ = (expr);                            \
    if (ABSL_PREDICT_FALSE(!weft_status_.ok())) return weft_status_; \
  } while (false)
// Assigns the value of a StatusOr to `lhs`, or returns from the function with its status.
#define WEFT_ASSIGN_OR_RETURN(lhs, expr) \
  WEFT_ASSIGN_OR_RETURN_IMPL_(WEFT_CONCAT_(weft_result_, __LINE__), lhs, expr)
#define WEFT_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr)                     \
  auto result = (expr);                                                    \
  if (ABSL_PREDICT_FALSE(!result.ok())) return std::move(result).status(); \
  lhs = *std::move(result)

#endif  // WEFT_COMMON_ERROR_H_
