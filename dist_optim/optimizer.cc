#include "weft/dist_optim/optimizer.h"

namespace weft {

std::string to_string(StepOutcome outcome) {
  switch (outcome) {
    case StepOutcome::kApplied: return "applied";
    case StepOutcome::kNotApplied: return "not applied";
    case StepOutcome::kPartlyApplied: return "partly applied";
    case StepOutcome::kUnknown: break;
  }
  return "unknown";
}

}  // namespace weft
