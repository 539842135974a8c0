#ifndef WEFT_PIPELINE_TIMELINE_H_
#define WEFT_PIPELINE_TIMELINE_H_

// timeline_svg(), timeline_trace(): a step of a plan as a picture: a row per worker, actions coloured by kind and idle
// time by its reason; and as a trace for chrome://tracing or Perfetto. With the times of a step that ran (StepResult::times of a pipeline made with
// `record`) each worker has a second row, on the same scale, under what was predicted; in the trace the predicted
// and the measured step are two processes. measured_step() says why workers idled in it.
//
// Pure; any thread.

#include <cstdint>
#include <string>
#include <vector>

#include "weft/common/api.h"
#include "weft/pipeline/plan.h"
#include "weft/pipeline/simulator.h"

namespace weft::pipeline {

// A step that ran, as if it were a simulation: its actions, counted from the start of the first one that took
// time, and idle time by its reason, so that a worker's busy and idle time are the makespan. What was
// made when the worker was free is transport, the runtime's own time included; a reduction is one action, with its
// waits. What was held in memory is not in it. Throws kind invalid_argument for times of other numbers of
// workers or actions.
WEFT_API Simulation measured_step(const Plan& plan, const std::vector<std::vector<int64_t>>& times);

// Throws kind invalid_argument when the simulation is not of this plan, or `measured` has other
// numbers of workers or actions than it.
WEFT_API std::string timeline_svg(const Plan& plan, const Simulation& predicted,
                                  const std::vector<std::vector<int64_t>>& measured = {});
WEFT_API std::string timeline_trace(const Plan& plan, const Simulation& predicted,
                                    const std::vector<std::vector<int64_t>>& measured = {});

}  // namespace weft::pipeline

#endif  // WEFT_PIPELINE_TIMELINE_H_
