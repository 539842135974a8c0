#include "weft/rpc/spi/service_worker.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/launch/core.h"
#include "weft/store/prefix_store.h"

namespace weft {

std::shared_ptr<Store> service_store(const Worker& worker, std::string_view service) {
  const auto core = lock_core(worker);
  if (core == nullptr) return nullptr;
  const std::string prefix =
      absl::StrCat("weft/", core->agent().options().job_id, "/services/", std::string(service));
  return std::make_shared<PrefixStore>(prefix, core->store());
}

std::optional<WorkerEndpoint> endpoint_of(const Worker& worker) {
  const auto core = lock_core(worker);
  if (core == nullptr) return std::nullopt;
  return core->endpoint();
}

std::shared_ptr<Metrics> metrics_of(const Worker& worker) {
  const auto core = lock_core(worker);
  return core == nullptr ? nullptr : core->shared_metrics();
}

}  // namespace weft
