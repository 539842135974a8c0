#ifndef WEFT_RPC_SPI_SERVICE_WORKER_H_
#define WEFT_RPC_SPI_SERVICE_WORKER_H_

// What a Service may have of its worker besides the ServiceContext. Any thread.

#include <memory>
#include <optional>
#include <string_view>

#include "weft/common/api.h"
#include "weft/common/metrics.h"
#include "weft/store/store.h"
#include "weft/transport/credentials.h"
#include "weft/transport/transport.h"

namespace weft {

class Worker;

// The job's store below "weft/<job>/services/<service>/", as a client of its own: interrupt() ends
// its operations alone. Null: the worker is gone.
WEFT_API std::shared_ptr<Store> service_store(const Worker& worker, std::string_view service);
// How a worker listens and proves who it is: for services with connections of their own.
struct WorkerEndpoint {
  ListenOptions listen;     // as at join
  Credentials credentials;  // as at join
};
// Nothing: the worker is gone.
WEFT_API std::optional<WorkerEndpoint> endpoint_of(const Worker& worker);
// For what may outlive the worker. Null: the worker is gone.
WEFT_API std::shared_ptr<Metrics> metrics_of(const Worker& worker);

}  // namespace weft

#endif  // WEFT_RPC_SPI_SERVICE_WORKER_H_
