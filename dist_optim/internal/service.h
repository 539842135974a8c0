#ifndef WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_
#define WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_

// DistOptimService: what the optimizers of one worker share. Any thread.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/dist_optim/internal/parameters.h"
#include "weft/rpc/service.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

class DistOptimService final : public Service {
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

  std::vector<Method> methods() override { return {}; }
  void put_debug_info(std::map<std::string, int64_t>* out) const override;

  std::atomic<int64_t> optimizers{0};
  std::atomic<int64_t> steps{0};
  std::atomic<int64_t> refusals{0};
  std::atomic<int64_t> reservations{0};

 private:
  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<const Worker> worker_;
  ParameterTable parameters_;
};

}  // namespace weft::internal

#endif  // WEFT_DIST_OPTIM_INTERNAL_SERVICE_H_
