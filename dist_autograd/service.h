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
// (under way), "autograd_stall_reports" (lines of the log about passes that stood still), and how
// often each kind of message was sent: "autograd_discovers_sent" and so on.

#include "weft/common/api.h"
#include "weft/common/time.h"
#include "weft/rpc/spi/service.h"

namespace weft {

struct DistAutogradServiceOptions {  // bounds of contexts and passes
  // A pass in which nothing has happened at this worker for so long is a line of the log that says
  // which worker and message it waits for; again after each such time. A participant whose part
  // takes longer than half of it says so to the root, whose line has it, too. Default: 10 s.
  Timeout report_stall_after{};
};

WEFT_API ServiceFactory dist_autograd_service(DistAutogradServiceOptions options = {});

}  // namespace weft

#endif  // WEFT_DIST_AUTOGRAD_SERVICE_H_
