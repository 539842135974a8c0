#ifndef WEFT_COLLECTIVES_INTERNAL_GROUP_HANDLE_H_
#define WEFT_COLLECTIVES_INTERNAL_GROUP_HANDLE_H_

// GroupHandle: what the handles of a ProcessGroup share. The last one closes the group.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/collectives/internal/group_core.h"
#include "weft/collectives/process_group.h"

namespace weft::internal {

class GroupHandle {
 public:
  // `options` are complete: with store and runtime.
  GroupHandle(std::shared_ptr<GroupCore> core, ProcessGroupOptions options,
              std::vector<int> previous)
      : options_(std::move(options)), previous_(std::move(previous)), core_(std::move(core)) {}
  ~GroupHandle() { core_->close(); }
  GroupHandle(const GroupHandle&) = delete;
  GroupHandle& operator=(const GroupHandle&) = delete;

  GroupCore& core() { return *core_; }
  const std::shared_ptr<GroupCore>& shared_core() const { return core_; }
  std::string_view backend() const { return core_->options().backend; }
  const ProcessGroupOptions& options() const { return options_; }
  // By rank: the rank in the generation before. Empty: there was none.
  const std::vector<int>& previous() const { return previous_; }
  // Lists of members for the next generation that were decided, and from which no group was made.
  uint32_t lists_in_vain() const { return lists_in_vain_.load(std::memory_order_relaxed); }
  void list_was_in_vain() { lists_in_vain_.fetch_add(1, std::memory_order_relaxed); }

 private:
  const ProcessGroupOptions options_;
  const std::vector<int> previous_;
  const std::shared_ptr<GroupCore> core_;  // observers hold it for moments
  std::atomic<uint32_t> lists_in_vain_{0};
};

// Makes one generation of a group; `previous` as above. REQUIRES: not a member of it yet.
StatusOr<std::shared_ptr<GroupHandle>> make_generation(const ProcessGroupOptions& options,
                                                       uint32_t generation,
                                                       std::vector<int> previous);

// The prefix of the keys of a generation of that group.
std::string generation_prefix(const ProcessGroupOptions& options, uint32_t generation);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_GROUP_HANDLE_H_
