#include "weft/common/wake_scope.h"

#include <iterator>
#include <utility>

#include "weft/common/internal/ambient.h"

namespace weft {

using internal::ambient;

WakeScope::WakeScope() : outermost_(ambient().wake_scope == nullptr) {
  if (outermost_) ambient().wake_scope = this;
}

WakeScope::~WakeScope() {
  if (!outermost_) return;
  flush();
  ambient().wake_scope = nullptr;
}

void WakeScope::wake(std::vector<std::shared_ptr<Parker>> parkers) {
  WakeScope* const current = ambient().wake_scope;
  if (current == nullptr) {
    for (const std::shared_ptr<Parker>& parker : parkers) parker->unpark();
    return;
  }
  std::move(parkers.begin(), parkers.end(), std::back_inserter(current->held_));
}

void WakeScope::flush() {
  WakeScope* const current = ambient().wake_scope;
  if (current == nullptr) return;
  const std::vector<std::shared_ptr<Parker>> held = std::exchange(current->held_, {});
  for (const std::shared_ptr<Parker>& parker : held) parker->unpark();
}

}  // namespace weft
