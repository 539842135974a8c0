#include "weft/collectives/internal/group_registry.h"

#include <algorithm>

namespace weft::internal {

void GroupRegistry::add(const std::shared_ptr<GroupCore>& core) {
  MutexLock lock(&mutex_);
  groups_.erase(std::remove_if(groups_.begin(), groups_.end(),
                               [](const std::weak_ptr<GroupCore>& one) { return one.expired(); }),
                groups_.end());
  groups_.push_back(core);
}

std::vector<std::shared_ptr<GroupCore>> GroupRegistry::groups() const {
  std::vector<std::shared_ptr<GroupCore>> out;
  MutexLock lock(&mutex_);
  for (const std::weak_ptr<GroupCore>& one : groups_) {
    if (auto core = one.lock(); core != nullptr) out.push_back(std::move(core));
  }
  return out;
}

}  // namespace weft::internal
