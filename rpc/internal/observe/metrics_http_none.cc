// In the place of metrics_http.cc where weft is built without prometheus-cpp (WEFT_PROMETHEUS=OFF).

#include "absl/strings/str_cat.h"
#include "weft/rpc/internal/observe/metrics_http.h"

namespace weft::internal {

StatusOr<std::unique_ptr<MetricsHttp>> MetricsHttp::start(std::string_view address, bool,
                                                          std::shared_ptr<const Metrics>,
                                                          std::shared_ptr<Runtime>) {
  return make_error(ErrorKind::kUnimplemented,
                    absl::StrCat("metrics_address '", std::string(address),
                                 "': this weft was built without prometheus-cpp "
                                 "(-DWEFT_PROMETHEUS=OFF); Worker::metrics().text() has the page"));
}

}  // namespace weft::internal
