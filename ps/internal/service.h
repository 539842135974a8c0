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
#include "weft/ps/internal/keeper.h"
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

class WEFT_API PsService final : public Service,
                                 public CopyHost,
                                 public std::enable_shared_from_this<PsService> {
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
  // By table, of the part that it made; for tests and for inspection of the worker.
  std::map<std::string, PartReport> reports() const;
  // By table and index.
  using PartName = std::pair<std::string, uint32_t>;
  std::map<PartName, std::shared_ptr<Part>> parts_by_name() const;

  // ---- CopyHost ----
  void write_map(const std::shared_ptr<Part>& part, const WriteMap& write) override;
  void read_map(const std::shared_ptr<Part>& part) override;
  void send_copy(const CopyPlace& to, CopyRequest request, std::vector<at::Tensor> tensors,
                 absl::Duration deadline, std::function<void(StatusOr<CopyAnswer>)> done) override;
  void later(absl::Time when, Task task) override;
  std::vector<WorkerKey> gone_workers() const override;
  std::vector<CopyPlace> others(const PartIdentity& identity) const override;
  bool others_are_gone(const PartIdentity& identity) const override;

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
  StatusOr<OpenAnswer> answer_open(const OpenRequest& request, const Part& part) const;
  StatusOr<PartRef> make_part(const OpenRequest& request, std::shared_ptr<ServerLimits> limits,
                              uint64_t id, const std::optional<RangeMap>& map);
  void on_find(Payload arguments, ReplyFn reply);
  void on_copy(Payload arguments, ReplyFn reply);
  StatusOr<PartRef> follow(const CopyRequest& request, std::vector<at::Tensor> tensors);
  // Whether this server makes the part: it is the part's own server, or the next in the list after
  // servers that have all died or left.
  bool makes(const OpenRequest& request) const;
  bool is_gone(const std::string& server) const;
  // The owner of a part that this server may make: itself, if there is no map yet.
  StatusOr<RangeMap> claim(const OpenRequest& request);
  CopyPlace self() const { return {worker().name(), worker().info().incarnation}; }
  StatusOr<Keeper*> keeper();
  void tick();
  void on_call(CallContext& call, Payload arguments, ReplyFn reply);
  std::vector<PartRef> parts() const;
  StatusOr<PartRef> find(const OpenRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ServiceContext context_;
  std::atomic<uint64_t> last_client_{0};

  mutable Mutex mutex_;
  std::shared_ptr<ServerLimits> limits_ ABSL_GUARDED_BY(mutex_);  // null: it serves no tables
  std::map<PartName, PartRef> by_name_ ABSL_GUARDED_BY(mutex_);
  // The greatest epoch of a part that this worker has had, also when it has it no more: it never
  // takes up an older image again, nor makes the part anew.
  std::map<PartName, uint64_t> epochs_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Keeper> keeper_ ABSL_GUARDED_BY(mutex_);  // made by the first that needs it
  std::map<uint64_t, PartRef> by_id_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerKey> gone_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_part_ ABSL_GUARDED_BY(mutex_) = 0;
  Status closed_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::weak_ptr<ClientPart>> clients_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SERVICE_H_
