#ifndef WEFT_DIST_OPTIM_ISOLATION_H_
#define WEFT_DIST_OPTIM_ISOLATION_H_

#include <cstdint>

namespace weft {

// What holds between steps that update the same parameter at the same time, of one trainer's
// optimizer or of several. All optimizers over a parameter should choose the same.
enum class Isolation : uint8_t {  // how steps of several trainers mix
  // No lock: updates of one parameter may mix, as in Recht et al., "Hogwild!" (2011).
  kHogwild = 0,
  // Updates of one parameter run one at a time; those of different ones beside each other.
  kPerParameterLock = 1,
  // As that; a step says which versions of the parameters its gradients were computed on, and is
  // refused as a whole when one has been updated more often since than it allows, or another step
  // is between its two phases there.
  kVersioned = 2,
};

}  // namespace weft

#endif  // WEFT_DIST_OPTIM_ISOLATION_H_
