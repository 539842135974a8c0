#include "weft/transport/channel.h"

#include "absl/strings/str_cat.h"
#include "weft/common/internal/text.h"

namespace weft::internal {

StatusOr<Borrowed> Channel::borrow(const Placement& placement, uint64_t length) {
  return make_error(
      ErrorKind::kProtocol,
      absl::StrCat("a message at ", placement.offset, "+", length,
                   " of memory that both sides see, and channel '", view(name()), "' has none"));
}

Status Channel::send(Frame frame, size_t index) {
  return make_error(ErrorKind::kInvalidArgument,
                    absl::StrCat("a frame of kind ", view(frame_kind_name(frame.kind)), " on lane ",
                                 index, " of channel '", view(name()), "', which has none"));
}

}  // namespace weft::internal
