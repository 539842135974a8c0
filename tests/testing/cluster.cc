#include "weft/tests/testing/cluster.h"

#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "weft/rpc/group.h"
#include "weft/tests/testing/sanitizers.h"
#include "weft/transport/grpc_transport.h"

namespace weft::testing {

std::vector<Net> nets() {
  if (kThreadSanitizer) return {Net::kInproc};
  return {Net::kInproc, Net::kGrpc};
}

std::string net_name(const ::testing::TestParamInfo<Net>& info) {
  return info.param == Net::kInproc ? "inproc" : "grpc";
}

Cluster::Cluster(ClusterOptions options)
    : options_(std::move(options)),
      runtime_(options_.runtime != nullptr ? options_.runtime : make_system_runtime()),
      network_(std::make_shared<InprocNetwork>()),
      store_(std::make_shared<HashStore>(runtime_)) {
  const size_t n = static_cast<size_t>(options_.size);
  std::vector<StatusOr<Worker>> joined;
  for (size_t i = 0; i < n; ++i)
    joined.emplace_back(make_error(ErrorKind::kInternal, "not joined"));
  {
    std::vector<std::unique_ptr<Thread>> threads;
    for (size_t i = 0; i < n; ++i) {
      const std::string name =
          i < options_.names.size() ? options_.names[i] : "worker" + std::to_string(i);
      threads.push_back(runtime_->spawn("join", [this, i, name, &joined] {
        joined[i] = Worker::try_join(join_options(static_cast<int>(i), name));
      }));
    }
  }
  for (StatusOr<Worker>& w : joined) {
    if (!w.ok()) {
      ADD_FAILURE() << "join failed: " << w.status();
      workers_.emplace_back();
    } else {
      workers_.push_back(*std::move(w));
    }
  }
}

Cluster::~Cluster() {
  if (!ended_) shutdown();
}

JoinOptions Cluster::join_options(int index, const std::string& name) const {
  JoinOptions o;
  o.name = name;
  if (options_.dynamic) {
    o.dynamic = true;
  } else {
    o.rank = index;
    o.world_size = options_.size;
  }
  o.library = options_.library;
  o.store = store_->new_client();
  o.transport = options_.net == Net::kInproc ? inproc_transport(network_) : grpc_transport();
  o.services = {group_service()};
  o.worker_threads = options_.worker_threads;
  o.rpc_timeout = options_.rpc_timeout;
  o.heartbeat_interval = options_.heartbeat;
  o.lease = options_.lease;
  o.join_timeout = options_.join_timeout;
  o.shutdown_timeout = options_.shutdown_timeout;
  o.runtime = runtime_;
  o.log_level = Severity::kWarning;
  o.environment = Environment{};
  if (options_.adjust) options_.adjust(index, &o);
  return o;
}

Worker& Cluster::add(const std::string& name) {
  const int index = static_cast<int>(workers_.size());
  workers_.push_back(Worker::join(join_options(index, name)));
  return workers_.back();
}

std::vector<ShutdownResult> Cluster::shutdown_all(ShutdownOptions options) {
  ended_ = true;
  std::vector<ShutdownResult> results(workers_.size());
  std::vector<std::unique_ptr<Thread>> threads;
  for (size_t i = 0; i < workers_.size(); ++i) {
    threads.push_back(runtime_->spawn(
        "shutdown", [this, i, options, &results] { results[i] = workers_[i].shutdown(options); }));
  }
  threads.clear();
  return results;
}

void Cluster::shutdown() {
  if (ended_) return;
  for (const ShutdownResult& result : shutdown_all())
    EXPECT_TRUE(result.status.ok()) << result.status;
  for (const Worker& worker : workers_) {
    const std::map<std::string, int64_t> info = worker.debug_info();
    EXPECT_EQ(info.at("calls_pending"), 0) << worker.name();
    EXPECT_EQ(info.at("handlers_running"), 0) << worker.name();
    EXPECT_EQ(info.at("deadlines"), 0) << worker.name();
    EXPECT_EQ(info.at("receive_bytes"), 0) << worker.name();
  }
}

int64_t counter(const Worker& worker, const std::string& name) {
  const std::map<std::string, int64_t> info = worker.debug_info();
  const auto it = info.find(name);
  return it == info.end() ? 0 : it->second;
}

}  // namespace weft::testing
