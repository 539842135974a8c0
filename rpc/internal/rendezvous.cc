#include "weft/rpc/internal/rendezvous.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/common/launch_info.h"

namespace weft::internal {

StatusOr<std::shared_ptr<Store>> open_rendezvous_store(const RendezvousOptions& options,
                                                       std::shared_ptr<Runtime> runtime) {
  StoreOptions store;
  store.timeout = options.timeout;
  store.run_id = options.config.job_id;
  if (!options.url.empty() && options.url != "env://") {
    store.is_server = options.is_first;
    return open_store(options.url, store, std::move(runtime));
  }
  WEFT_ASSIGN_OR_RETURN(const LaunchInfo launch, launch_info(options.config, options.environment));
  if (launch.master_addr.empty() || launch.master_port == 0) {
    if (options.alone && options.url.empty()) return open_store("hash://", store, std::move(runtime));
    return make_error(
        ErrorKind::kInvalidArgument,
        absl::StrCat("no store to meet at: ",
                     launch.master_addr.empty() ? "MASTER_ADDR" : "MASTER_PORT",
                     " is not set; start the program with weftrun, or set WEFT_STORE (tcp://host:port, "
                     "file:///path, etcd://host:port/prefix)"));
  }
  store.is_server = options.is_first;
  return open_store(absl::StrCat("tcp://", launch.master_addr, ":", launch.master_port), store,
                    std::move(runtime));
}

}  // namespace weft::internal
