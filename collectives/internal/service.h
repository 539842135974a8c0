#ifndef WEFT_COLLECTIVES_INTERNAL_SERVICE_H_
#define WEFT_COLLECTIVES_INTERNAL_SERVICE_H_

// CollectivesService: the groups of one worker. It tells them of members that died, shows them to
// observers, and leaves them when the worker shuts down. A group holds the service, and the service
// holds no group: GroupRegistry.
//
// Threads: all methods from anywhere.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/collectives/internal/group_registry.h"
#include "weft/collectives/process_group.h"
#include "weft/common/mutex.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

class CollectivesService;

// The members of a group that was made from a Worker, by rank.
struct GroupWorkers {
  std::shared_ptr<CollectivesService> service;
  std::vector<WorkerInfo> by_rank;
};
// Equal for equal sets of members, in whatever order.
uint64_t members_hash(const GroupWorkers& workers);
// Those of some ranks, which become ranks 0, 1, ...; null of null.
std::shared_ptr<const GroupWorkers> workers_of_ranks(const std::shared_ptr<const GroupWorkers>& all,
                                                     const std::vector<int>& ranks);

// While a group of these members is being made: the death of one ends its waits at the store.
class MakingWatch {
 public:
  MakingWatch(std::vector<WorkerInfo> members, std::shared_ptr<Store> store)
      : members_(std::move(members)), store_(std::move(store)) {}

  const std::vector<WorkerInfo>& members() const { return members_; }
  // A client of its own, which is interrupted at a death.
  Store& store() { return *store_; }
  // Rank -1: the worker shuts down.
  void end(int rank, const Status& why);
  // The first rank that end() was told, and why; OK: none was.
  Status cause(int* rank) const;

 private:
  const std::vector<WorkerInfo> members_;
  const std::shared_ptr<Store> store_;
  mutable Mutex mutex_;
  int rank_ ABSL_GUARDED_BY(mutex_) = -1;
  Status cause_ ABSL_GUARDED_BY(mutex_);
};

class WEFT_API CollectivesService final : public Service,
                                          public std::enable_shared_from_this<CollectivesService> {
 public:
  explicit CollectivesService(const ServiceContext& context) : context_(context) {}

  std::vector<Method> methods() override { return {}; }
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;
  void put_inspection(Inspection* out) const override;
  Load load() const override;

  // Completes what the worker knows: see service.h.
  StatusOr<ProcessGroupOptions> complete(const Worker& worker, const ProcessGroupOptions& options,
                                         const std::vector<std::string>& names);
  // Error, kind peer_lost: a member is gone already. kState: the worker has shut down.
  StatusOr<std::shared_ptr<MakingWatch>> watch(const std::vector<WorkerInfo>& members,
                                               const std::shared_ptr<Store>& store);
  // The group of that watch is made: from now on it hears of deaths itself, and of one that has
  // happened meanwhile.
  void add(const std::shared_ptr<GroupCore>& core, const MakingWatch& watch);

 private:
  StatusOr<std::vector<WorkerInfo>> members(const Worker& worker,
                                            const std::vector<std::string>& names) const;
  void on_died(const WorkerInfo& worker, const std::string& reason);
  std::vector<std::shared_ptr<MakingWatch>> watches() const;

  const ServiceContext context_;
  GroupRegistry groups_;
  mutable Mutex mutex_;
  Worker::Subscription subscription_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<MakingWatch>> making_ ABSL_GUARDED_BY(mutex_);
  Status down_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_SERVICE_H_
