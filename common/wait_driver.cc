#include "weft/common/wait_driver.h"

#include "weft/common/internal/ambient.h"

namespace weft {

using internal::ambient;

bool driving() { return ambient().driving != nullptr; }

void note_driving_is_dear() {
  if (DrivingScope* const scope = ambient().driving; scope != nullptr) scope->dear_ = true;
}

DrivingScope::DrivingScope() { ambient().driving = this; }

DrivingScope::~DrivingScope() { ambient().driving = nullptr; }

}  // namespace weft
