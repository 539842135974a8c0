#ifndef WEFT_DIST_AUTOGRAD_ID_H_
#define WEFT_DIST_AUTOGRAD_ID_H_

// Names of contexts. A value type; it compares, hashes and orders.

#include <string>

#include "weft/common/api.h"
#include "weft/common/worker_key.h"

namespace weft {

// A context, named by the worker that made it; never used again, also after a restart.
using AutogradContextId = CreatedId<struct AutogradContextIdTag>;

WEFT_API std::string to_string(const AutogradContextId& id);  // "autograd context 2/00ab/17"

}  // namespace weft

#endif  // WEFT_DIST_AUTOGRAD_ID_H_
