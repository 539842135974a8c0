#ifndef WEFT_RPC_INTERNAL_OBSERVE_METRICS_HTTP_H_
#define WEFT_RPC_INTERNAL_OBSERVE_METRICS_HTTP_H_

// MetricsHttp: serves one worker's metrics to Prometheus, as GET /metrics over HTTP. The server is
// prometheus-cpp's; this translates our families into its own. Nothing but /metrics is there.
//
//   WEFT_ASSIGN_OR_RETURN(auto http, MetricsHttp::start("127.0.0.1:0", false, metrics, runtime));
//   http->address()       // "127.0.0.1:40123"
//
// Threads: the server has three of its own from start() to the destructor, which waits for them.
// Outside of simulation: real sockets, real threads. The server makes the process ignore SIGPIPE.

#include <memory>
#include <string>
#include <string_view>

#include "weft/common/error.h"
#include "weft/common/metrics.h"
#include "weft/common/runtime.h"

namespace weft::internal {

class MetricsHttp {
 public:
  virtual ~MetricsHttp() = default;
  virtual const std::string& address() const = 0;
  virtual int port() const = 0;

  // `address` is "host:port", port 0 for any free one. Errors name it: kind invalid_argument (not
  // such an address), permission (beyond loopback without `allow_insecure`), resource (the port is
  // taken), unimplemented (this weft was built without it).
  static StatusOr<std::unique_ptr<MetricsHttp>> start(std::string_view address, bool allow_insecure,
                                                      std::shared_ptr<const Metrics> metrics,
                                                      std::shared_ptr<Runtime> runtime);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_OBSERVE_METRICS_HTTP_H_
