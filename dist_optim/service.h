#ifndef WEFT_DIST_OPTIM_SERVICE_H_
#define WEFT_DIST_OPTIM_SERVICE_H_

// What a worker lists at join so that optimizers can update its parameters, and so that it can make
// optimizers over those of others:
//
//   weft::Library library = app();
//   library.merge(weft::dist_optim_library());
//   weft::Worker::join({.library = library,
//                       .services = {weft::rref_service(), weft::dist_autograd_service(),
//                                    weft::dist_optim_service()}});
//
// weft::join (weft/weft.h) does all of that. debug_info() then has "optimizers" (living at this
// worker), "optimizer_parameters", "optimizer_steps" (applied), "optimizer_refusals" (steps that
// did not pass their first phase), "optimizer_reservations" (steps between their phases) and
// "optimizer_lock_waits" (how often a step has waited for a parameter that another one updates).

#include "weft/common/api.h"
#include "weft/rpc/library.h"
#include "weft/rpc/spi/service.h"

namespace weft {

WEFT_API ServiceFactory dist_optim_service();
// The class behind weft::optim, "weft_optim.Functional". One for all.
WEFT_API Library dist_optim_library();

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_SERVICE_H_
