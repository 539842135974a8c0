#ifndef WEFT_RPC_WORKER_H_
#define WEFT_RPC_WORKER_H_

// Worker: one member of a job. It owns everything that it needs (threads, connections, tables);
// there is nothing process-wide, so several workers may live in one process.
//
//   auto worker = weft::join({.library = library()});     // name, rank and store from the launcher
//   ... rpc_sync(worker, "ps0", &forward, x) ...
//   worker.shutdown();
//
// Worker is a move-only handle; calls take `const Worker&`. Threads: all const methods and
// shutdown() from anywhere, but shutdown() not from a handler of the same worker (there it returns
// an error). Destroying it without shutdown() leaves at once: peers get "peer left", and nothing
// waits for them.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/config.h"
#include "weft/common/log.h"
#include "weft/common/metrics.h"
#include "weft/common/runtime.h"
#include "weft/common/time.h"
#include "weft/common/worker_info.h"
#include "weft/common/worker_key.h"
#include "weft/rpc/access_rule.h"
#include "weft/rpc/device_map.h"
#include "weft/rpc/library.h"
#include "weft/rpc/spi/destination.h"
#include "weft/rpc/spi/service.h"
#include "weft/store/store.h"
#include "weft/transport/connection_stats.h"
#include "weft/transport/credentials.h"
#include "weft/transport/transport.h"

namespace weft {

namespace internal {
class Core;
class DeviceBackend;
}  // namespace internal

// Every field has a default, and what is unset comes from the environment of the launcher (weftrun,
// torchrun, mpirun, srun) or the default named there; see Config.
struct JoinOptions {
  // 1 to 127 characters of [A-Za-z0-9-_:.], unique in the job. Default: WEFT_NAME, else
  // "worker<rank>".
  std::string name{};
  // A static group has a world size, and a worker for each rank; join returns when all have joined.
  std::optional<int> rank{};
  std::optional<int> world_size{};
  // A dynamic group: no world size, workers join and leave at any time. `rank` must not be given.
  bool dynamic = false;
  Library library{};
  // Where workers meet: an open store, or a URL (hash, file, tcp, etcd, env). Default: WEFT_STORE,
  // else env:// when MASTER_ADDR is set, else a store of this process alone.
  std::shared_ptr<Store> store{};
  std::string rendezvous{};
  // Default: gRPC.
  TransportFactory transport{};
  ListenOptions listen{};
  // TLS between workers, and to a tcp store that is opened here. Default: WEFT_TLS_CA and so on,
  // else none.
  Credentials credentials{};
  // Which workers may call which methods. Default: every worker of the job may call every method.
  std::vector<AccessRule> access{};
  std::vector<ServiceFactory> services{};
  // By the callee's name: where the tensors of calls to it belong (device_map.h). Checked at join:
  // here without asking other workers, then by every worker of a static group, which all fail if
  // one map is wrong. In a dynamic group a map may name a worker that comes later; if it then has
  // no such device, that is logged, and calls to it that would need the map fail.
  std::map<std::string, DeviceMap> device_maps{};
  // The devices that this worker uses, in its own maps and in those of others. Default: all of them
  // when it has maps of its own, else none, and others cannot map to it.
  std::vector<c10::Device> devices{};
  // "host:port" that serves GET /metrics to Prometheus over HTTP, without encryption or
  // authentication; port 0: any free one, see Worker::metrics_address(). Beyond loopback only with
  // listen.allow_insecure. Default: WEFT_METRICS, else none.
  std::string metrics_address{};
  // File for a timeline of this worker's calls, written when it leaves, to be opened in Perfetto or
  // chrome://tracing; "%r" stands for the rank or id. Costs a small call a few microseconds.
  // Default: WEFT_TRACE_FILE, else none.
  std::string trace_file{};
  // Threads that run handlers (not those that wait in one). Default: one per core, at least 4.
  int worker_threads = 0;
  Timeout rpc_timeout{};               // default of CallOptions::deadline: 60 s
  Timeout join_timeout{};              // 60 s
  Timeout shutdown_timeout{};          // bound of shutdown's later phases: 60 s
  Timeout heartbeat_interval{};        // 1 s
  Timeout lease{};                     // 15 s
  std::shared_ptr<Runtime> runtime{};  // default: the system
  // Default: weft::cuda, opened when device_maps or devices are given. For tests.
  std::shared_ptr<internal::DeviceBackend> device_backend{};
  std::shared_ptr<LogSink> log_sink{};  // default: stderr
  std::optional<Severity> log_level{};  // default: WEFT_LOG_LEVEL
  // Replaces this process's environment variables, for tests and embedding.
  std::optional<Environment> environment{};
};

struct MembershipChange {                     // what subscribe() reports
  enum class Kind { kJoined, kLeft, kDied };  // kDied: without leaving
  Kind kind = Kind::kJoined;                  // what happened
  WorkerInfo worker{};
  uint64_t version = 0;  // membership_version() after the change
  std::string reason{};  // cause of a death
};

struct ShutdownOptions {  // how a worker leaves
  // True: drains, that is, waits until all workers have called shutdown() and no call is under way
  // anywhere. False: leaves immediately.
  bool graceful = true;
  // Deadline of the whole shutdown. Default: the wait for the other workers has no bound while
  // their leases are renewed, and the later phases have JoinOptions::shutdown_timeout.
  Timeout deadline{};
};

struct ShutdownResult {                                 // what shutdown() returns
  enum class Outcome { kDrained, kMissing, kAborted };  // of one worker
  struct Entry {                                        // one worker
    WorkerInfo worker{};
    Outcome outcome = Outcome::kDrained;  // as known here
    std::string reason{};                 // empty for kDrained
  };
  // OK: every worker has drained. Otherwise the first error; it names the worker.
  Status status{};
  std::vector<Entry> workers{};  // in order of id, this one included
};

class WEFT_API Worker {
 public:
  // Joins the job, and blocks until the group is ready: on return every member can be called.
  // Throws weft::Error: invalid options (all mistakes in one error), a name or port that is taken,
  // a store that cannot be reached, or, after join_timeout, the missing workers by rank.
  static Worker join(JoinOptions options);
  static StatusOr<Worker> try_join(JoinOptions options);

  // An empty handle: every use is an error of kind state.
  Worker() = default;
  Worker(Worker&&) noexcept = default;
  Worker& operator=(Worker&& other) noexcept;
  ~Worker();

  const std::string& name() const;
  // Rank in a static group, otherwise a number drawn at join. Never reused within a job.
  uint32_t id() const;
  int rank() const { return static_cast<int>(id()); }
  // World size of a static group; 0 in a dynamic group.
  int world_size() const;
  const WorkerInfo& info() const;
  const std::string& job_id() const;
  const std::string& address() const;

  // Returns the living members in order of id, this one included.
  std::vector<WorkerInfo> worker_infos() const;
  // Looks up a worker by name, id or info. Throws weft::Error: not_found, with the nearest names;
  // peer_lost for a worker that died or left.
  WorkerInfo get_worker_info(const Destination& who) const;
  StatusOr<WorkerInfo> try_get_worker_info(const Destination& who) const;
  // A counter that every join, leave and death raises.
  uint64_t membership_version() const;
  // Calls `on_change` for every change from now on, in order, on a thread of the worker; short. The
  // subscription ends with the returned object, whose destructor waits for a call that is running.
  using Subscription = std::shared_ptr<void>;
  Subscription subscribe(std::function<void(const MembershipChange&)> on_change) const;

  // Returns the default deadline of calls. A change affects later calls only.
  absl::Duration rpc_timeout() const;
  void set_rpc_timeout(Timeout timeout) const;
  int worker_threads() const;

  // Leaves the group. Does not throw; idempotent: later calls return the first result.
  ShutdownResult shutdown(ShutdownOptions options = {}) const;
  bool is_shut_down() const;

  // Returns counters and sizes by name ("calls_pending", "reconnects", "lane0_frames_sent",
  // "peer/ps0/lane1/bytes_sent", ...).
  std::map<std::string, int64_t> debug_info() const;
  // Returns, in order of id, each peer's statistics, and why memory is not shared with it.
  std::vector<PeerStats> peer_stats() const;
  Metrics& metrics() const;
  // Returns the address that serves /metrics, such as "127.0.0.1:40123"; "" when there is none.
  const std::string& metrics_address() const;
  const Logger& log() const;
  Runtime& runtime() const;
  // Returns the time on the worker's clock.
  absl::Time now() const;
  // Returns the service of type S that was listed at join, or null.
  template <class S>
  std::shared_ptr<S> service() const {
    for (const std::shared_ptr<Service>& s : services()) {
      if (auto typed = std::dynamic_pointer_cast<S>(s)) return typed;
    }
    return nullptr;
  }

 private:
  friend class internal::Core;
  friend std::shared_ptr<internal::Core> lock_core(const Worker& worker);

  explicit Worker(std::shared_ptr<internal::Core> owned);
  static std::shared_ptr<const Worker> make_handle(std::weak_ptr<internal::Core> core);
  std::vector<std::shared_ptr<Service>> services() const;
  std::shared_ptr<internal::Core> core() const;  // throws kind state when it is gone

  std::shared_ptr<internal::Core> owned_;
  std::weak_ptr<internal::Core> core_;
};

// Returns the info of the worker with that key, as a destination of calls. A worker that is no
// longer a member gets its key, as text, for a name.
WEFT_API WorkerInfo info_of(const Worker& worker, const WorkerKey& key);

}  // namespace weft

#endif  // WEFT_RPC_WORKER_H_
