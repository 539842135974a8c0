#ifndef WEFT_RREF_ID_H_
#define WEFT_RREF_ID_H_

// Names of remote references and of their forks. Value types; they compare, hash and order.

#include <cstdint>
#include <string>

#include "weft/common/api.h"
#include "weft/common/worker_key.h"

namespace weft {

// A remote object, named by the worker that created the reference.
using RRefId = CreatedId<struct RRefIdTag>;
// One worker's share in it, named by the worker that made the fork.
using ForkId = CreatedId<struct ForkIdTag>;

// Where in a program something was made; no line: not known.
struct CallSite {
  const char* file = "";  // as the compiler names it
  uint32_t line = 0;
};

WEFT_API std::string to_string(const RRefId& id);  // "RRef 2/00000000000000ab/17"
WEFT_API std::string to_string(const ForkId& id);  // "fork 2/00000000000000ab/18"

}  // namespace weft

#endif  // WEFT_RREF_ID_H_
