#include "weft/rpc/internal/observe/metrics_http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "prometheus/collectable.h"
#include "prometheus/exposer.h"
#include "prometheus/metric_family.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/transport/address.h"

namespace weft::internal {
namespace {

prometheus::MetricType type_of(MetricFamily::Kind kind) {
  switch (kind) {
    case MetricFamily::Kind::kCounter: return prometheus::MetricType::Counter;
    case MetricFamily::Kind::kGauge: return prometheus::MetricType::Gauge;
    case MetricFamily::Kind::kHistogram: return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

prometheus::ClientMetric translate(MetricFamily::Kind kind, MetricSample sample) {
  prometheus::ClientMetric out;
  for (auto& [name, value] : sample.labels) {
    out.label.push_back({std::move(name), std::move(value)});
  }
  switch (kind) {
    case MetricFamily::Kind::kCounter: out.counter.value = sample.value; break;
    case MetricFamily::Kind::kGauge: out.gauge.value = sample.value; break;
    case MetricFamily::Kind::kHistogram:
      out.histogram.sample_count = sample.count;
      out.histogram.sample_sum = sample.sum;
      for (size_t i = 0; i < sample.bounds.size(); ++i) {
        out.histogram.bucket.push_back({sample.cumulative[i], sample.bounds[i]});
      }
      break;
  }
  return out;
}

class Source : public prometheus::Collectable {
 public:
  explicit Source(std::shared_ptr<const Metrics> metrics) : metrics_(std::move(metrics)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> out;
    for (MetricFamily& family : metrics_->families()) {
      prometheus::MetricFamily& to = out.emplace_back();
      to.name = std::move(family.name);
      to.help = std::move(family.help);
      to.type = type_of(family.kind);
      for (MetricSample& sample : family.samples) {
        to.metric.push_back(translate(family.kind, std::move(sample)));
      }
    }
    return out;
  }

 private:
  const std::shared_ptr<const Metrics> metrics_;
};

// Connects to a listener of ours and goes away again. Whether it worked does not matter.
void touch(const BindHost& host, int port) {
  const int fd = ::socket(host.ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  const auto in_port = htons(static_cast<uint16_t>(port));
  if (host.ipv6) {
    sockaddr_in6 to = {};
    to.sin6_family = AF_INET6;
    to.sin6_port = in_port;
    ::inet_pton(AF_INET6, host.host.c_str(), &to.sin6_addr);
    static_cast<void>(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to));
  } else {
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = in_port;
    ::inet_pton(AF_INET, host.host.c_str(), &to.sin_addr);
    static_cast<void>(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to));
  }
  ::close(fd);
}

class ExposerHttp : public MetricsHttp {
 public:
  // Throws what the exposer throws when it cannot bind.
  ExposerHttp(BindHost host, int port, std::shared_ptr<const Metrics> metrics,
              std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)),
        host_(std::move(host)),
        source_(std::make_shared<Source>(std::move(metrics))),
        exposer_(std::make_unique<prometheus::Exposer>(std::vector<std::string>{
            "listening_ports", join_host_port(host_.host, port), "num_threads", "2",
            // A client that says nothing does not hold a thread.
            "request_timeout_ms", "5000"})) {
    exposer_->RegisterCollectable(source_);
    const std::vector<int> ports = exposer_->GetListeningPorts();
    port_ = ports.empty() ? 0 : ports.front();
    address_ = join_host_port(host_.host, port_);
  }

  // The server's accepting thread sees that it shall end only when it wakes: at a connection, or
  // every two seconds. So another thread ends it, and this one connects until it is over.
  ~ExposerHttp() override {
    if (runtime_->simulated()) return;  // there a thread that waits outside would hold all others
    Mutex mutex;
    Condition changed(runtime_.get());
    bool over = false;
    const auto ending = runtime_->spawn("weft-metrics", [&] {
      exposer_.reset();
      MutexLock lock(&mutex);
      over = true;
      changed.notify_all();
    });
    MutexLock lock(&mutex);
    while (!over) {
      lock.unlock();
      touch(host_, port_);
      lock.lock();
      if (over) break;
      changed.wait_until(&mutex, runtime_->now() + absl::Milliseconds(5)).IgnoreError();
    }
  }

  const std::string& address() const override { return address_; }
  int port() const override { return port_; }

 private:
  const std::shared_ptr<Runtime> runtime_;
  const BindHost host_;
  const std::shared_ptr<Source> source_;  // the exposer holds it weakly
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;
  std::string address_;
};

}  // namespace

StatusOr<std::unique_ptr<MetricsHttp>> MetricsHttp::start(std::string_view address,
                                                          bool allow_insecure,
                                                          std::shared_ptr<const Metrics> metrics,
                                                          std::shared_ptr<Runtime> runtime) {
  const std::string what = absl::StrCat("metrics_address '", std::string(address), "'");
  const StatusOr<HostPort> at = parse_host_port(address, /*any_port=*/true);
  if (!at.ok()) return annotate(at.status(), what);
  const StatusOr<BindHost> host = resolve_bind_host(at->host);
  if (!host.ok()) return annotate(host.status(), what);
  if (!host->loopback && !allow_insecure) {
    return make_error(
        ErrorKind::kPermission,
        absl::StrCat(what, ": refusing to listen on ", host->host,
                     ": it can be reached from other machines, and whoever reaches it "
                     "may read the metrics. Set allow_insecure if the network is "
                     "trusted"));
  }
  // Asked of the system first: the server would only say that it could not.
  if (at->port != 0) {
    const Status free = port_is_free(*host, at->port);
    if (!free.ok()) return annotate(free, what);
  }
  try {
    return std::unique_ptr<MetricsHttp>(
        std::make_unique<ExposerHttp>(*host, at->port, std::move(metrics), std::move(runtime)));
  } catch (const std::exception& e) {
    return make_error(ErrorKind::kResource,
                      absl::StrCat(what, ": the HTTP server did not start: ", e.what()));
  }
}

}  // namespace weft::internal
