#include "weft/rref/id.h"

#include "absl/strings/str_cat.h"

namespace weft {

std::string to_string(const RRefId& id) {
  return absl::StrCat("RRef ", to_string(id.creator.id), "/", to_string(id.creator.incarnation),
                      "/", id.counter);
}

std::string to_string(const ForkId& id) {
  return absl::StrCat("fork ", to_string(id.creator.id), "/", to_string(id.creator.incarnation),
                      "/", id.counter);
}

}  // namespace weft
