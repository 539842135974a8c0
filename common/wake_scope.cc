#include "weft/common/wake_scope.h"

#include <iterator>
#include <utility>

namespace weft {
namespace {

thread_local WakeScope* current = nullptr;

}  // namespace

WakeScope::WakeScope() : outermost_(current == nullptr) {
  if (outermost_) current = this;
}

WakeScope::~WakeScope() {
  if (!outermost_) return;
  flush();
  current = nullptr;
}

void WakeScope::wake(std::vector<std::shared_ptr<Parker>> parkers) {
  if (current == nullptr) {
    for (const std::shared_ptr<Parker>& parker : parkers) parker->unpark();
    return;
  }
  std::move(parkers.begin(), parkers.end(), std::back_inserter(current->held_));
}

void WakeScope::flush() {
  if (current == nullptr) return;
  const std::vector<std::shared_ptr<Parker>> held = std::exchange(current->held_, {});
  for (const std::shared_ptr<Parker>& parker : held) parker->unpark();
}

}  // namespace weft
