#include "weft/collectives/internal/link.h"
#include "weft/collectives/internal/text.h"

namespace weft::internal {

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

Status fault_of(int peer, uint32_t kind, std::string_view text) {
  const auto known = kind <= static_cast<uint32_t>(ErrorKind::kPermission)
                         ? static_cast<ErrorKind>(kind)
                         : ErrorKind::kInternal;
  return make_error(known == ErrorKind::kNone ? ErrorKind::kInternal : known,
                    cat("rank ", peer, " says: ", text));
}

Status peer_left(int peer) {
  return make_error(ErrorKind::kPeerLost, cat("rank ", peer, " has left the group"));
}

Status peer_lost(int peer, std::string_view how) {
  return make_error(ErrorKind::kPeerLost, cat("rank ", peer, " is gone: ", how));
}

}  // namespace weft::internal
