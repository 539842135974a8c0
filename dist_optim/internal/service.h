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

#include "weft/common/executor.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/dist_autograd/leaf_effect.h"
#include "weft/dist_optim/internal/parameters.h"
#include "weft/dist_optim/spi/owner_part.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

// An optimizer, by its trainer and a number of that.
using OptimizerKey = std::pair<WorkerKey, uint64_t>;

class DistOptimService final : public Service,
                               public std::enable_shared_from_this<DistOptimService> {
 public:
  explicit DistOptimService(ServiceContext context)
      : runtime_(std::move(context.runtime)),
        executor_(std::move(context.executor)),
        worker_(std::move(context.worker)),
        parameters_(runtime_) {}

  // The service of the worker; throws, kind state, when the worker does not list it.
  static std::shared_ptr<DistOptimService> of(const Worker& worker);

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  const Worker& worker() const { return *worker_; }
  ParameterTable& parameters() { return parameters_; }

  // A part of an optimizer is at this worker, as long as it lives: passes are to find it.
  void add_part(const OptimizerKey& key, const std::shared_ptr<OwnerOptimizer>& part);
  // Null: there is none.
  std::shared_ptr<OwnerOptimizer> find_part(const OptimizerKey& key) const;

  // drop_expired() of all parts is to be called then.
  void expire_at(absl::Time when);
  // Runs `fn` on the executor when the time has come, or when the worker shuts down.
  void after(absl::Duration wait, Task fn);
  const std::shared_ptr<Executor>& executor() const { return executor_; }

  std::vector<Method> methods() override { return {}; }
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;

  std::atomic<uint64_t> last_optimizer{0};  // made by this worker
  std::atomic<int64_t> optimizers{0};
  std::atomic<int64_t> steps{0};
  std::atomic<int64_t> refusals{0};
  std::atomic<int64_t> reservations{0};

 private:
  StatusOr<std::unique_ptr<LeafEffect>> make_fused(std::string_view data);

  void arm_locked(absl::Time when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void tick();

  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<Executor> executor_;
  const std::shared_ptr<const Worker> worker_;
  ParameterTable parameters_;
  mutable Mutex mutex_;
  std::map<OptimizerKey, std::weak_ptr<OwnerOptimizer>> parts_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Timer> timer_ ABSL_GUARDED_BY(mutex_);
  absl::Time armed_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  absl::Time expiry_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  std::multimap<absl::Time, Task> later_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_
