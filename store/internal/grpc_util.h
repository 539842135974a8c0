#ifndef WEFT_STORE_INTERNAL_GRPC_UTIL_H_
#define WEFT_STORE_INTERNAL_GRPC_UTIL_H_

// Small things that the stores over gRPC share. Pure functions; any thread.

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace weft::internal {

// The point in time `length` from now, on the monotonic clock.
inline gpr_timespec grpc_after(absl::Duration length) {
  if (length == absl::InfiniteDuration()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const int64_t nanos = absl::ToInt64Nanoseconds(std::max(length, absl::ZeroDuration()));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(nanos, GPR_TIMESPAN));
}

template <class Message>
bool to_bytes(const Message& message, grpc::ByteBuffer* out) {
  bool own = false;
  return grpc::SerializationTraits<Message>::Serialize(message, out, &own).ok();
}

template <class Message>
bool from_bytes(grpc::ByteBuffer* in, Message* out) {
  return grpc::SerializationTraits<Message>::Deserialize(in, out).ok();
}

// "UNAVAILABLE: connection refused"
inline std::string grpc_status_text(const grpc::Status& status) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const int code = static_cast<int>(status.error_code());
  const bool known = code >= 0 && code < static_cast<int>(std::size(kNames));
  return absl::StrCat(known ? kNames[code] : "gRPC status ", known ? "" : absl::StrCat(code), ": ",
                      status.error_message());
}

// How every channel of a store dials: quickly again after a failure (gRPC's own default waits a
// second), over a connection of its own, never through a proxy; a silent peer is noticed in 30 s.
grpc::ChannelArguments store_channel_arguments();

}  // namespace weft::internal

#endif  // WEFT_STORE_INTERNAL_GRPC_UTIL_H_
