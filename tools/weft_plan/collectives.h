#ifndef WEFT_TOOLS_WEFT_PLAN_COLLECTIVES_H_
#define WEFT_TOOLS_WEFT_PLAN_COLLECTIVES_H_

// weft-plan collectives: what the algorithms of process groups cost (weft/collectives/cost_model.h).

#include "weft/tools/weft_plan/arguments.h"

namespace weft::plan_tool {

// Returns the exit code.
int run_collectives(const Arguments& a);

}  // namespace weft::plan_tool

#endif  // WEFT_TOOLS_WEFT_PLAN_COLLECTIVES_H_
