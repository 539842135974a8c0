#ifndef WEFT_PIPELINE_INTERNAL_PLANTED_H_
#define WEFT_PIPELINE_INTERNAL_PLANTED_H_

// Bugs that tests plant, one at a time, to see that each is found, and how soon (docs/pipeline.md).
// Programs have no way to ask for one.

#include <cstdint>
#include <string_view>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"

namespace weft::pipeline::internal {

// In generators.
enum class ScheduleBug : uint8_t {
  kNone,
  kShortWarmUp,     // 1f1b warms up with one forward less
  kExtraOnTheLast,  // 1f1b+k warms up longer on the last worker, too
  kOneMorePending,  // zb-h1 keeps one more weights' gradient waiting
  kStepsEarly,      // a stage steps before its last gradient
  kPaddingRuns,     // interleaved runs the micro-batches that fill its last round
};
inline constexpr int kScheduleBugs = 5;

// In the runtime.
enum class RunnerBug : uint8_t {
  kNone,
  kSlotWithoutStep,      // RUN-1: slots of two steps have one name
  kSlotsStay,            // RUN-3: an error leaves the slots as they are
  kReceivesWait,         // RUN-4: a receive waits for its message
  kScaleOfTheFirst,      // every micro-batch's loss counts as the first one's
  kGradientOverwritten,  // of two gradients of one output the later one stays
};
inline constexpr int kRunnerBugs = 5;

// make_schedule() with a bug.
WEFT_API StatusOr<Plan> make_schedule_with(ScheduleBug bug, std::string_view name, int workers,
                                           int micro_batches);

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_PLANTED_H_
