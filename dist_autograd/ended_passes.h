#ifndef WEFT_DIST_AUTOGRAD_ENDED_PASSES_H_
#define WEFT_DIST_AUTOGRAD_ENDED_PASSES_H_

// EndedPasses: which passes of one root have ended, so that a worker can give the gradients of just
// those, whatever it has heard of them and whatever runs beside. For optimizers: what a step uses
// is decided where it begins. Any thread.

#include <cstdint>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/worker_key.h"
#include "weft/dist_autograd/context.h"

namespace weft::internal {

struct EndedPasses {
  WorkerKey root{};
  uint64_t below = 0;               // all below this counter have ended...
  uint64_t last = 0;                // ...and up to this one all...
  std::vector<uint64_t> running{};  // ...but for these
  std::vector<uint64_t> aborted{};  // with an error, which some worker may not know yet
};

// The passes that have ended with this worker as their root, now.
WEFT_API EndedPasses ended_passes(const DistAutogradContext& context);
// As autograd_gradients(), of these and of all passes of other roots. Kind state, too: later passes
// of the root have been added to them already.
WEFT_API StatusOr<std::vector<AutogradGradient>> gradients_of_ended(const Worker& worker,
                                                                    const AutogradContextId& id,
                                                                    const EndedPasses& ended);

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_ENDED_PASSES_H_
