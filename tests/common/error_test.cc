#include "weft/common/error.h"

#include <ios>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <typeinfo>
#include <utility>
#include <variant>

#include "gtest/gtest.h"

// LibTorch's exceptions by name and ancestry; this module and its tests do not know LibTorch
// itself.
namespace c10 {
struct Error : std::exception {
  explicit Error(std::string w) : what_text(std::move(w)) {}
  const char* what() const noexcept override { return what_text.c_str(); }
  std::string what_text;
};
struct IndexError : Error {
  using Error::Error;
};
struct DistError : Error {
  using Error::Error;
};
struct DistStoreError : DistError {
  using DistError::DistError;
};
struct DistBackendError : DistError {
  using DistError::DistError;
};
struct Unrelated : std::exception {};
}  // namespace c10

namespace weft {
namespace {

const ErrorDetails kDetails = {ErrorKind::kPeerLost, "ps0", "ps0: app.forward\ntrainer1: rpc_sync",
                               std::string("\0\xff\n bytes", 9)};

void expect_details(const Status& status) {
  const ErrorDetails got = error_details(status);
  EXPECT_EQ(got.kind, kDetails.kind);
  EXPECT_EQ(got.origin, kDetails.origin);
  EXPECT_EQ(got.remote_trace, kDetails.remote_trace);
  EXPECT_EQ(got.payload, kDetails.payload);
  EXPECT_EQ(error_kind(status), kDetails.kind);
}

TEST(Error, DetailsSurviveEverything) {
  const Status status = with_details(absl::UnavailableError("gone"), kDetails);
  expect_details(status);
  const StatusOr<int> inside = status;
  expect_details(inside.status());
  const Status annotated = annotate(status, "call 17 of app.forward");
  expect_details(annotated);
  EXPECT_EQ(annotated.message(), "call 17 of app.forward: gone");
  EXPECT_EQ(annotated.code(), absl::StatusCode::kUnavailable);
  try {
    throw_error(annotated);
  } catch (...) {
    expect_details(status_from_current_exception());
  }
}

TEST(Error, AStatusWithoutDetailsHasNone) {
  EXPECT_EQ(error_kind(absl::InternalError("x")), ErrorKind::kNone);
  EXPECT_EQ(error_details(absl::OkStatus()).kind, ErrorKind::kNone);
  EXPECT_TRUE(annotate(absl::OkStatus(), "context").ok());
  EXPECT_TRUE(with_details(absl::OkStatus(), kDetails).ok());
}

TEST(Error, OddBytesAndLargeMessagesStayAsTheyAre) {
  const std::string odd("a\0b\x80\xff\n", 6);
  EXPECT_EQ(make_error(ErrorKind::kUser, odd).message(), odd);
  const std::string large(1 << 20, 'x');
  const Status status = make_error(ErrorKind::kUser, large);
  EXPECT_EQ(status.message(), large);
  const Error error(annotate(status, "y"));
  EXPECT_EQ(error.message(), "y: " + large);
  const Error odd_error(absl::StatusCode::kAborted, odd);
  EXPECT_EQ(odd_error.message(), odd);
  EXPECT_EQ(odd_error.status().message(), odd);
}

TEST(Error, AnErrorIsNeverOk) {
  EXPECT_EQ(make_error(absl::StatusCode::kOk, ErrorKind::kInternal, "m").code(),
            absl::StatusCode::kUnknown);
}

TEST(Error, EveryKindHasANameAndACode) {
  for (int i = 0; i <= static_cast<int>(ErrorKind::kPermission); ++i) {
    const auto kind = static_cast<ErrorKind>(i);
    EXPECT_NE(kind_name(kind), "unknown") << i;
    EXPECT_NE(default_code(kind), absl::StatusCode::kOk) << i;
    EXPECT_EQ(error_kind(make_error(kind, "m")), kind);
  }
  EXPECT_EQ(kind_name(static_cast<ErrorKind>(200)), "unknown");
}

TEST(Error, SaysAllInWhat) {
  Error error(with_details(absl::UnavailableError("gone"), kDetails));
  const std::string what = error.what();
  for (const char* part : {"UNAVAILABLE", "peer_lost", "gone", "ps0", "app.forward"}) {
    EXPECT_NE(what.find(part), std::string::npos) << what;
  }
  const Error thrown = Error(absl::StatusCode::kAborted, "no").with_payload("pay");
  EXPECT_EQ(thrown.kind(), ErrorKind::kUser);
  EXPECT_EQ(thrown.payload(), "pay");
  EXPECT_EQ(error_details(thrown.status()).payload, "pay");
}

TEST(Error, ThrowHelpers) {
  EXPECT_NO_THROW(throw_if_error(absl::OkStatus()));
  EXPECT_THROW(throw_if_error(absl::AbortedError("x")), Error);
  EXPECT_EQ(value_or_throw(StatusOr<int>(7)), 7);
  EXPECT_THROW(value_or_throw(StatusOr<int>(absl::AbortedError("x"))), Error);
}

TEST(Error, Macros) {
  const auto half = [](int x) -> StatusOr<int> {
    if (x % 2 != 0) return absl::InvalidArgumentError("odd");
    return x / 2;
  };
  const auto quarter = [&](int x) -> StatusOr<int> {
    WEFT_ASSIGN_OR_RETURN(const int h, half(x));
    WEFT_ASSIGN_OR_RETURN(const int q, half(h));
    WEFT_RETURN_IF_ERROR(q > 100 ? absl::OutOfRangeError("big") : absl::OkStatus());
    return q;
  };
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(quarter(800).status().code(), absl::StatusCode::kOutOfRange);
}

template <class E>
Status thrown(const E& e) {
  try {
    throw e;
  } catch (...) {
    return status_from_current_exception();
  }
}

struct NullWhat : std::exception {
  const char* what() const noexcept override { return nullptr; }
};

TEST(Error, TableOfExceptions) {
  using absl::StatusCode;
  EXPECT_EQ(thrown(std::invalid_argument("m")).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(thrown(std::domain_error("m")).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(thrown(std::out_of_range("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(std::length_error("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(std::range_error("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(std::overflow_error("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(std::underflow_error("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(std::bad_alloc()).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(thrown(std::runtime_error("m")).code(), StatusCode::kUnknown);
  EXPECT_EQ(thrown(std::logic_error("m")).code(), StatusCode::kUnknown);
  EXPECT_EQ(thrown(std::bad_cast()).code(), StatusCode::kUnknown);
  EXPECT_EQ(thrown(std::bad_variant_access()).code(), StatusCode::kUnknown);
  EXPECT_EQ(thrown(std::runtime_error("text")).message(), "text");
  EXPECT_EQ(error_kind(thrown(std::runtime_error("m"))), ErrorKind::kUser);
  for (const Status& odd : {thrown(42), thrown("text"), thrown(std::string("text"))}) {
    EXPECT_EQ(odd.code(), StatusCode::kUnknown);
    EXPECT_EQ(error_kind(odd), ErrorKind::kUser);
    EXPECT_FALSE(odd.message().empty());
  }
  EXPECT_EQ(thrown(NullWhat()).code(), StatusCode::kUnknown);
  EXPECT_EQ(thrown(std::runtime_error("\xff\x01")).message(), "\xff\x01");
}

struct OfAUser : c10::IndexError {
  using IndexError::IndexError;
};

TEST(Error, LibTorchsExceptionsByTheNamesOfTheirTypes) {
  using absl::StatusCode;
  EXPECT_EQ(thrown(c10::Error("m")).code(), StatusCode::kUnknown);
  EXPECT_EQ(thrown(c10::IndexError("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(OfAUser("m")).code(), StatusCode::kOutOfRange);
  EXPECT_EQ(thrown(c10::DistStoreError("m")).code(), StatusCode::kUnavailable);
  EXPECT_EQ(thrown(c10::DistBackendError("m")).code(), StatusCode::kUnavailable);
  EXPECT_EQ(thrown(c10::Unrelated()).code(), StatusCode::kUnknown);
  EXPECT_EQ(error_kind(thrown(c10::IndexError("m"))), ErrorKind::kUser);
}

TEST(Error, LibTorchsBacktraceBecomesTheTrace) {
  const std::string what =
      "index 4 is out of range\nException raised from at at /builder/list.h:12 (most recent call "
      "first):\nframe #0: f + 0x12 (0x7f0011223344 in /usr/lib/libc10.so)\n";
  const Status status = thrown(c10::IndexError(what));
  EXPECT_EQ(status.message(), "index 4 is out of range");
  const std::string trace = error_details(status).remote_trace;
  EXPECT_EQ(trace.find("Exception raised from at at list.h:12"), 0u) << trace;
  EXPECT_NE(trace.find("in libc10.so"), std::string::npos) << trace;
  EXPECT_EQ(trace.find('/'), std::string::npos) << trace;
  EXPECT_EQ(trace.find("0x7f"), std::string::npos) << trace;
  // Only LibTorch's own: the text of others stays as it is.
  EXPECT_EQ(thrown(std::runtime_error(what)).message(), what);
}

}  // namespace
}  // namespace weft
