#ifndef WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_
#define WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_

// DistOptimService: what the optimizers of one worker share. Any thread.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/dist_autograd/leaf_effect.h"
#include "weft/dist_optim/internal/parameters.h"
#include "weft/dist_optim/owner_part.h"
#include "weft/rpc/service.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

// An optimizer, by its trainer and a number of that.
using OptimizerKey = std::pair<WorkerKey, uint64_t>;

class DistOptimService final : public Service,
                               public std::enable_shared_from_this<DistOptimService> {
 public:
  explicit DistOptimService(ServiceContext context)
      : runtime_(std::move(context.runtime)),
        worker_(std::move(context.worker)),
        parameters_(runtime_) {}

  // Of the worker; throws, kind state, when it does not list the service.
  static std::shared_ptr<DistOptimService> of(const Worker& worker);

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  const Worker& worker() const { return *worker_; }
  ParameterTable& parameters() { return parameters_; }

  // A part of an optimizer is at this worker, as long as it lives: passes are to find it.
  void add_part(const OptimizerKey& key, const std::shared_ptr<OwnerOptimizer>& part);
  // Null: there is none.
  std::shared_ptr<OwnerOptimizer> find_part(const OptimizerKey& key) const;

  std::vector<Method> methods() override { return {}; }
  void put_debug_info(std::map<std::string, int64_t>* out) const override;

  std::atomic<uint64_t> last_optimizer{0};  // made by this worker
  std::atomic<int64_t> optimizers{0};
  std::atomic<int64_t> steps{0};
  std::atomic<int64_t> refusals{0};
  std::atomic<int64_t> reservations{0};

 private:
  StatusOr<std::unique_ptr<LeafEffect>> make_fused(std::string_view data);

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<const Worker> worker_;
  ParameterTable parameters_;
  mutable Mutex mutex_;
  std::map<OptimizerKey, std::weak_ptr<OwnerOptimizer>> parts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_
