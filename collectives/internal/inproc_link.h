#ifndef WEFT_COLLECTIVES_INTERNAL_INPROC_LINK_H_
#define WEFT_COLLECTIVES_INTERNAL_INPROC_LINK_H_

// Links within one process: a queue of messages per pair of members. Threads: see link.h;
// InprocFabricCore from any.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "weft/collectives/inproc_fabric.h"
#include "weft/collectives/internal/link.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"

namespace weft::internal {

class InprocRoom;

class InprocFabricCore : public std::enable_shared_from_this<InprocFabricCore> {
 public:
  InprocFabricCore(std::shared_ptr<Runtime> runtime, const InprocFabricOptions& options);

  std::unique_ptr<Link> join(const Membership& member);
  void kill(int rank);
  void set_held(int from, int to, bool held);
  int members() const;

  Runtime* runtime() const { return runtime_.get(); }
  // When a message that is sent now arrives at the earliest.
  absl::Time arrival();
  bool held(int from, int to) const;

 private:
  std::vector<std::shared_ptr<InprocRoom>> rooms() const;

  const std::shared_ptr<Runtime> runtime_;
  const absl::Duration delay_max_;
  mutable Mutex mutex_;
  std::map<std::pair<uint64_t, uint32_t>, std::weak_ptr<InprocRoom>> rooms_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<int, int>> held_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_INPROC_LINK_H_
