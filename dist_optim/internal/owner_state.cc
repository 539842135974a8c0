// What an owner tells of its parameters and their state.

#include "ATen/core/grad_mode.h"
#include "weft/dist_optim/internal/parameters.h"
#include "weft/dist_optim/spi/owner_part.h"

namespace weft::internal {

std::vector<int64_t> OwnerOptimizer::versions_of(const std::vector<Slot>& slots) const {
  std::vector<int64_t> out;
  out.reserve(slots.size());
  for (const Slot& slot : slots) out.push_back(slot.shared->version());
  return out;
}

void OwnerOptimizer::remove_group(CallContext&, int64_t group) {
  size_t first = 0;
  {
    MutexLock lock(&mutex_);
    first = slots_.size();
    while (first > 0 && slots_[first - 1].group == group) --first;
    if (first == slots_.size()) return;
    slots_.resize(first);
  }
  removed(first);
}

std::vector<int64_t> OwnerOptimizer::versions(CallContext&) { return versions_of(slots()); }

OwnerStateDict OwnerOptimizer::state_dict(CallContext&) {
  const at::AutoGradMode no_grad(false);
  return save(slots());
}

void OwnerOptimizer::load_state_dict(CallContext&, const OwnerStateDict& state, bool commit) {
  const at::AutoGradMode no_grad(false);
  load(slots(), state, commit);
}

}  // namespace weft::internal
