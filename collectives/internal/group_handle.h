#ifndef WEFT_COLLECTIVES_INTERNAL_GROUP_HANDLE_H_
#define WEFT_COLLECTIVES_INTERNAL_GROUP_HANDLE_H_

// GroupHandle: what the handles of a ProcessGroup share. The last one closes the group.

#include <memory>
#include <string_view>
#include <utility>

#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/internal/group_core.h"
#include "weft/store/store.h"

namespace weft::internal {

class GroupHandle {
 public:
  GroupHandle(std::unique_ptr<GroupCore> core, std::string_view backend,
              std::shared_ptr<Store> store, std::shared_ptr<InprocFabric> fabric)
      : backend_(backend),
        store_(std::move(store)),
        fabric_(std::move(fabric)),
        core_(std::move(core)) {}
  ~GroupHandle() { core_->close(); }
  GroupHandle(const GroupHandle&) = delete;
  GroupHandle& operator=(const GroupHandle&) = delete;

  GroupCore& core() { return *core_; }
  std::string_view backend() const { return backend_; }

 private:
  const std::string_view backend_;  // a literal
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<InprocFabric> fabric_;
  const std::unique_ptr<GroupCore> core_;
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_GROUP_HANDLE_H_
