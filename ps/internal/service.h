#ifndef WEFT_PS_INTERNAL_SERVICE_H_
#define WEFT_PS_INTERNAL_SERVICE_H_

// PsService: what a worker does for parameter servers: as a server it has the parts of tables, as a
// client the numbers of its handles. Any thread.

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "weft/common/mutex.h"
#include "weft/ps/internal/part.h"
#include "weft/ps/server.h"
#include "weft/rpc/service.h"
#include "weft/rpc/worker.h"

namespace weft::ps::internal {

// What a client has of the service, to be told that the worker leaves.
class ClientPart {
 public:
  virtual ~ClientPart() = default;
  virtual void close(const Status& why) = 0;
};

class WEFT_API PsService final : public Service, public std::enable_shared_from_this<PsService> {
 public:
  explicit PsService(ServiceContext context) : context_(std::move(context)) {}

  // Of the worker; throws, kind state, when it does not list the service.
  static std::shared_ptr<PsService> of(const Worker& worker);
  const ServiceContext& context() const { return context_; }
  const Worker& worker() const { return *context_.worker; }
  // Of a client's handle: never used again.
  uint64_t next_client() { return last_client_.fetch_add(1) + 1; }
  // Forgotten when it is gone. Closed at once after the worker has left.
  void add_client(uint64_t client, const std::shared_ptr<ClientPart>& part);
  void remove_client(uint64_t client);

  Status serve(const ServerOptions& options);
  void stop_serving();
  // By table, for tests and for inspection of the worker.
  std::map<std::string, PartReport> reports() const;

  // ---- Service ----
  std::vector<Method> methods() override;
  void on_worker_gone(const WorkerInfo& worker, const Status& why) override;
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;
  void put_inspection(Inspection* out) const override;

 private:
  using PartRef = std::shared_ptr<Part>;

  void on_open(Payload arguments, ReplyFn reply);
  StatusOr<OpenAnswer> open(const OpenRequest& request);
  void on_call(CallContext& call, Payload arguments, ReplyFn reply);
  std::vector<PartRef> parts() const;
  StatusOr<PartRef> find(const std::string& table) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ServiceContext context_;
  std::atomic<uint64_t> last_client_{0};

  mutable Mutex mutex_;
  std::shared_ptr<ServerLimits> limits_ ABSL_GUARDED_BY(mutex_);  // null: it serves no tables
  std::map<std::string, PartRef> by_name_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, PartRef> by_id_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerKey> gone_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_part_ ABSL_GUARDED_BY(mutex_) = 0;
  Status closed_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::weak_ptr<ClientPart>> clients_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SERVICE_H_
