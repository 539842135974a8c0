#ifndef WEFT_RPC_INTERNAL_LAUNCH_CORE_H_
#define WEFT_RPC_INTERNAL_LAUNCH_CORE_H_

// Core: what a Worker handle refers to. Wires the parts together at join and takes them apart at
// shutdown, in the opposite order:
//
//   store -> membership (thread) -> agent (calls) -> transport (threads) -> pool (handlers)
//
// Ownership: Core owns all of them; the agent is shared with what is in flight and holds nothing of
// Core; handlers see a Worker that holds Core weakly. So no cycle keeps a worker alive.

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weft/common/condition.h"
#include "weft/rpc/internal/agent/agent.h"
#include "weft/rpc/internal/agent/call_trace.h"
#include "weft/rpc/internal/membership/membership.h"
#include "weft/rpc/internal/membership/subscribers.h"
#include "weft/rpc/internal/observe/health_http.h"
#include "weft/rpc/internal/observe/metrics_http.h"
#include "weft/rpc/spi/service_worker.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

class Core : public std::enable_shared_from_this<Core> {
 public:
  static StatusOr<std::shared_ptr<Core>> join(JoinOptions options);
  ~Core();

  ShutdownResult shutdown(const ShutdownOptions& options);
  // The handle went without shutdown().
  void abandon();

  Agent& agent() const { return *agent_; }
  Membership& membership() const { return *membership_; }
  const WorkerInfo& self() const { return self_; }
  const Config& config() const { return config_; }
  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  Runtime& runtime() const { return *runtime_; }
  Metrics& metrics() const { return *metrics_; }
  const std::shared_ptr<Metrics>& shared_metrics() const { return metrics_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  const WorkerEndpoint& endpoint() const { return endpoint_; }
  const Logger& log() const { return log_; }
  const std::shared_ptr<Executor>& pool() const { return pool_; }
  const std::shared_ptr<WaitDriver>& wait_driver() const { return wait_driver_; }
  // Null when no trace was requested.
  std::shared_ptr<TraceWriter> trace_writer() const {
    return trace_ == nullptr ? nullptr : std::shared_ptr<TraceWriter>(trace_, trace_->writer());
  }
  const Library* library() const { return library_.get(); }
  int worker_threads() const { return worker_threads_; }
  int world_size() const { return world_size_; }
  const std::vector<std::shared_ptr<Service>>& services() const { return services_; }
  bool is_shut_down() const { return down_.load(); }
  std::map<std::string, int64_t> debug_info() const;
  // What an observer sees (core_inspect.cc).
  void put_inspection(Inspection* out, bool counters) const;
  // See Transport; null also after shutdown.
  std::shared_ptr<char> allocate_shared(size_t bytes) const {
    return down_.load() || transport_ == nullptr ? nullptr : transport_->allocate_shared(bytes);
  }

  Subscribers& subscribers() { return *subscribers_; }

 private:
  Core() = default;

  Status init(JoinOptions options);
  // Overlays the options with what the environment says; WEFT_HEALTH has no field.
  Status read_options(JoinOptions* options, std::string* health_address);
  // The parts of init(), in their order.
  void begin(JoinOptions* options);
  Status open_pages(const JoinOptions& options, const std::string& health_address);
  Status open_transport(const JoinOptions& options);
  void make_pool();
  void make_membership(const JoinOptions& options);
  AgentOptions agent_options();
  Status make_services(const JoinOptions& options, AgentOptions* agent);
  Status open_rendezvous(const JoinOptions& options, absl::Time deadline);
  Status find_job_id(absl::Time deadline);
  // Opens the devices that the options name and checks them; nothing when they name none.
  Status open_devices(const JoinOptions& options);
  Status check_devices(absl::Time deadline);
  void on_change(const MembershipChange& change);
  void log_library_differences(const MemberList& members) const;
  ShutdownResult do_shutdown(const ShutdownOptions& options);
  // Once: fails what waits in the services. Also as soon as the group has declared this worker dead:
  // what a service still holds or counts as its own then belongs to another worker.
  void close_services(const Status& why);
  // Ends everything here; what could not be ended by `deadline` is named in the status.
  // `hard`: not before `deadline`; nothing is waited for after it.
  Status tear_down(const Status& why, absl::Time deadline, absl::Time hard);

  // Constant after join.
  Config config_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<Metrics> metrics_;
  Logger log_;
  std::shared_ptr<const Library> library_;
  WorkerInfo self_;
  std::string job_id_;
  std::string address_;
  std::string metrics_address_;
  int metrics_port_ = 0;
  int health_port_ = 0;
  std::string store_url_;
  std::optional<int> rank_;
  int world_size_ = 0;
  int worker_threads_ = 0;
  std::shared_ptr<Store> store_;
  WorkerEndpoint endpoint_;
  std::shared_ptr<Executor> pool_;
  std::shared_ptr<WaitDriver> wait_driver_;        // may be null
  std::shared_ptr<CallTrace> trace_;               // null: no trace was requested
  std::shared_ptr<DeviceBackend> device_backend_;  // null: the CPU only
  std::shared_ptr<const MemberDevices> devices_;
  std::vector<std::shared_ptr<Service>> services_;
  std::atomic<bool> services_closed_{false};

  std::shared_ptr<Agent> agent_;
  // claim() starts the membership thread before the agent exists.
  std::atomic<bool> agent_ready_{false};
  std::unique_ptr<Subscribers> subscribers_;
  std::unique_ptr<Membership> membership_;
  std::shared_ptr<Transport> transport_;
  // Gone after tear_down(), which runs once.
  std::unique_ptr<MetricsHttp> metrics_http_;
  const std::shared_ptr<HealthState> health_ = std::make_shared<HealthState>();
  std::unique_ptr<HealthHttp> health_http_;

  std::atomic<bool> down_{false};
  mutable Mutex shutdown_mutex_;
  std::unique_ptr<Condition> shutdown_done_;
  bool shutdown_begun_ ABSL_GUARDED_BY(shutdown_mutex_) = false;
  std::optional<ShutdownResult> shutdown_result_ ABSL_GUARDED_BY(shutdown_mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_LAUNCH_CORE_H_
