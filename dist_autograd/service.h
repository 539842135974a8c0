#ifndef WEFT_DIST_AUTOGRAD_SERVICE_H_
#define WEFT_DIST_AUTOGRAD_SERVICE_H_

// The service of distributed autograd, to be listed at join by every worker through which a
// gradient is to flow:
//
//   weft::Worker::join({.library = library(),
//                       .services = {weft::rref_service(), weft::dist_autograd_service()}});
//
// debug_info() of a worker then has "num_autograd_contexts", "num_current_backward_passes",
// "autograd_sends" (recorded messages), "autograd_leaves" (with a gradient), "autograd_releases"
// (under way), and how often each kind of message was sent: "autograd_discovers_sent" and so on.

#include "weft/common/api.h"
#include "weft/rpc/service.h"

namespace weft {

WEFT_API ServiceFactory dist_autograd_service();

}  // namespace weft

#endif  // WEFT_DIST_AUTOGRAD_SERVICE_H_
