#include "weft/collectives/internal/link.h"

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {
namespace {

constexpr absl::string_view kSinceUrl = "weft/collectives/since";

Status with_since(Status status, uint64_t since) {
  if (since > 0) status.SetPayload(kSinceUrl, absl::Cord(absl::StrCat(since)));
  return status;
}

}  // namespace

Status deadline_error(const Header& mine, const std::vector<Awaited>& awaited) {
  std::string text = cat("the time given is over in ", mine.describe(), "; waited for");
  std::string_view separator = " ";
  for (const Awaited& one : awaited) {
    cat_to(&text, separator, "rank ", one.peer);
    if (static_cast<OpKind>(one.last.op) == OpKind::kNone) {
      cat_to(&text, ", from which nothing came yet");
    } else {
      cat_to(&text, ", whose last operation was ", one.last.describe());
    }
    separator = "; ";
  }
  return make_error(ErrorKind::kDeadline, text);
}

Status fault_of(int peer, uint32_t kind, std::string_view text, uint64_t since) {
  const auto known = kind <= static_cast<uint32_t>(ErrorKind::kPermission)
                         ? static_cast<ErrorKind>(kind)
                         : ErrorKind::kInternal;
  return with_since(make_error(known == ErrorKind::kNone ? ErrorKind::kInternal : known,
                               cat("rank ", peer, " says: ", text)),
                    since);
}

Status peer_left(int peer, uint64_t finished, uint64_t position) {
  Status left = make_error(ErrorKind::kPeerLost, cat("rank ", peer, " has left the group"));
  // A peer that is missing in an operation that it says it has finished breaks the protocol; then
  // no operation can be relied on.
  return position > finished ? with_since(std::move(left), finished + 1) : left;
}

Status peer_lost(int peer, std::string_view how) {
  return make_error(ErrorKind::kPeerLost, cat("rank ", peer, " is gone: ", how));
}

uint64_t since_of(const Status& cause) {
  const auto packed = cause.GetPayload(kSinceUrl);
  uint64_t since = 0;
  if (!packed.has_value() || !absl::SimpleAtoi(std::string(*packed), &since)) return 0;
  return since;
}

}  // namespace weft::internal
