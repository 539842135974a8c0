#ifndef WEFT_COLLECTIVES_INTERNAL_GROUP_REGISTRY_H_
#define WEFT_COLLECTIVES_INTERNAL_GROUP_REGISTRY_H_

// GroupRegistry: the groups of one owner (a worker, a flight recorder), in the order in which they
// were made. It keeps no group alive beyond a call of groups().
//
// Threads: all methods from anywhere.

#include <memory>
#include <vector>

#include "weft/common/mutex.h"

namespace weft::internal {

class GroupCore;

class GroupRegistry {
 public:
  void add(const std::shared_ptr<GroupCore>& core);
  // Those that some handle still refers to.
  std::vector<std::shared_ptr<GroupCore>> groups() const;

 private:
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<GroupCore>> groups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_GROUP_REGISTRY_H_
