#include "weft/collectives/internal/mesh.h"

#include <poll.h>

#include "absl/strings/str_join.h"
#include "weft/collectives/internal/stream_link.h"
#include "weft/collectives/internal/text.h"
#include "weft/common/call_scope.h"

namespace weft::internal {

int Mesh::milliseconds_left() const { return milliseconds_until(runtime_.now(), deadline_); }

Status Mesh::wait(int fd, short events, int peer, std::string_view what) const {
  BlockingRegion region;
  WEFT_RETURN_IF_ERROR(region.status());
  while (!over()) {
    pollfd one = {fd, events, 0};
    if (poll(&one, 1, milliseconds_left()) > 0) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(given_up_());
  }
  return make_error(ErrorKind::kDeadline, cat("waited for rank ", peer, " ", what));
}

wire::GroupHello Mesh::own_hello() const {
  wire::GroupHello hello;
  hello.set_version(kGroupVersion);
  hello.set_group(member_.group);
  hello.set_generation(member_.generation);
  hello.set_rank(static_cast<uint32_t>(member_.rank));
  hello.set_identity(identities_[static_cast<size_t>(member_.rank)]);
  return hello;
}

bool Mesh::fits(const wire::GroupHello& hello, int peer) const {
  return hello.version() == kGroupVersion && hello.group() == member_.group &&
         hello.generation() == member_.generation && hello.rank() == static_cast<uint32_t>(peer) &&
         hello.identity() == identities_[static_cast<size_t>(peer)];
}

int Mesh::dialling_rank(const wire::GroupHello& hello) const {
  if (hello.rank() <= static_cast<uint32_t>(member_.rank) ||
      hello.rank() >= static_cast<uint32_t>(member_.size)) {
    return -1;
  }
  return static_cast<int>(hello.rank());
}

Status Mesh::late_error(std::string_view what, const std::vector<int>& ranks) {
  return make_error(ErrorKind::kDeadline,
                    cat("waited for ", what, " of rank ", absl::StrJoin(ranks, " ")));
}

}  // namespace weft::internal
