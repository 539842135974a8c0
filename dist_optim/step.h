#ifndef WEFT_DIST_OPTIM_STEP_H_
#define WEFT_DIST_OPTIM_STEP_H_

// What is asked of a step, and what it has done.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/error.h"
#include "weft/common/time.h"
#include "weft/common/worker_info.h"
#include "weft/dist_optim/isolation.h"

namespace weft {

struct OptimizerOptions {                              // how owners serve the optimizer
  Isolation isolation = Isolation::kPerParameterLock;  // of steps
  // Deadline of making the optimizer, and of all its calls but steps. Default: the worker's
  // rpc_timeout.
  Timeout deadline{};
};

struct StepOptions {  // of one step
  // Deadline of both phases together, and of asking owners that have not answered. Default: the
  // worker's rpc_timeout; ten minutes at most, because what is prepared is held for so long.
  Timeout deadline{};
  // Refuse the step when a gradient has an infinite or undefined entry.
  bool require_finite = false;
  // Isolation::kVersioned: what versions() gave before the forward, and how many updates of a
  // parameter may have come between. Those within the bound are counted in StepReport::stale.
  std::vector<int64_t> versions{};
  int64_t max_staleness = 0;
};

// What became of a step at one owner.
enum class StepOutcome : uint8_t {
  kApplied,
  kNotApplied,
  kPartlyApplied,  // it failed between two parameters
  kUnknown,        // it was told to, and has not answered, also when it was asked again
};
WEFT_API std::string to_string(StepOutcome outcome);

struct OwnerReport {                               // a step at one owner
  WorkerInfo owner{};                              // the worker
  StepOutcome outcome = StepOutcome::kNotApplied;  // as far as it is known
  Status error{};                                  // of this owner
  int64_t updated = 0;
  std::vector<int64_t> versions{};  // of its parameters, after the step
};

struct StepReport {  // a step at all owners
  Status status{};   // OK: applied everywhere
  std::vector<OwnerReport> owners{};
  int64_t updated = 0;  // parameters
  int64_t stale = 0;
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_STEP_H_
