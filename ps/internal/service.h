#ifndef WEFT_PS_INTERNAL_SERVICE_H_
#define WEFT_PS_INTERNAL_SERVICE_H_

// PsService: what a worker does for parameter servers: as a server it has the parts of tables, as a
// client the numbers of its handles. Any thread.

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "weft/common/mutex.h"
#include "weft/ps/internal/batch_wire.h"
#include "weft/ps/internal/cut.h"
#include "weft/ps/internal/keeper.h"
#include "weft/ps/internal/move_wire.h"
#include "weft/ps/internal/part.h"
#include "weft/ps/internal/shared_memory.h"
#include "weft/ps/internal/snapshot_files.h"
#include "weft/ps/server.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"

namespace weft::v1 {
class PsCut;
class PsRestore;
}  // namespace weft::v1

namespace weft::ps::internal {

// What a client has of the service, to be told that the worker leaves, and to be held at a cut.
class ClientPart {
 public:
  virtual ~ClientPart() = default;
  virtual void close(const Status& why) = 0;
  // CUT-2, until the release or that time. Kind unavailable: another cut holds it.
  virtual StatusOr<HeldClient> hold(const CutName& cut, absl::Time until) = 0;
  // Whether this cut has held it until now.
  virtual bool release(const CutName& cut) = 0;
};

struct OutgoingCall;
// Sends requests, and hears what was said of each.
class Requester {
 public:
  virtual ~Requester() = default;
  // Once for each request, possibly before send() returns. Of several: of the first, and answer_after() of those behind it.
  virtual void answered(absl::Span<OutgoingCall> calls, StatusOr<Reply> said) = 0;
};

// A request that leaves.
struct OutgoingCall {
  std::shared_ptr<const BatchedRequest> what{};  // not changed until it is answered
  std::shared_ptr<Requester> by{};
  absl::Time deadline{};     // of the operation
  absl::Duration attempt{};  // from when it leaves
  int64_t bytes = 0;         // with its answer
  // It may travel with others: it and its answer are short, and it waits for no client.
  bool small = false;
  bool copied = false;  // its answer waits for a backup

  absl::Time ends(absl::Time now) const { return std::min(deadline, now + attempt); }
  void end(StatusOr<Reply> said) { by->answered(absl::MakeSpan(this, 1), std::move(said)); }
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
  // For a cut or a restore of this worker: never used again.
  uint64_t next_cut() { return last_cut_.fetch_add(1) + 1; }
  // Forgotten when it is gone. Closed at once after the worker has left.
  void add_client(uint64_t client, const std::shared_ptr<ClientPart>& part);
  void remove_client(uint64_t client);

  Status serve(const ServerOptions& options);
  void stop_serving();
  // Until no copy is here; kind deadline, naming what is; then it goes on serving.
  Status drain(absl::Duration deadline);
  // ---- service_moves.cc ----
  // Until `to` owns the part, whichever of these servers, or of those that have joined, owns it now.
  Status move(const std::string& table, uint32_t index, const CopyPlace& to,
              const std::vector<std::string>& servers, absl::Time end);
  // Takes over its share of what these servers have; gives how many parts it owns then.
  StatusOr<int64_t> join(const std::vector<std::string>& servers, absl::Duration deadline);
  // These, and those that have joined since, as far as the store tells.
  std::vector<std::string> with_joined(std::vector<std::string> servers, absl::Duration at_most);
  // The latter alone, from a thread of its own; not at all when the worker leaves.
  void read_joined(std::function<void(const std::vector<std::string>&)> done);
  // By table, of the part that it made; for tests and for inspection of the worker.
  std::map<std::string, PartReport> reports() const;
  // By table and index.
  using PartName = std::pair<std::string, uint32_t>;
  std::map<PartName, std::shared_ptr<Part>> parts_by_name() const;
  // Parameters in memory of this host.
  SharedMemories& shared() { return shared_; }

  // ---- client ----
  // A small call joins those that wait while a message of
  // small ones is on its way to the server, unless it has to end before that message does, or too many
  // bytes wait. A message without an answer in their time takes those that wait behind it along: they end
  // as not delivered.
  void send(const WorkerInfo& to, OutgoingCall call);

  // ---- CopyHost ----
  void write_map(const std::shared_ptr<Part>& part, const WriteMap& write) override;
  void read_map(const std::shared_ptr<Part>& part) override;
  void send_copy(const CopyPlace& to, CopyRequest request, std::vector<at::Tensor> tensors,
                 absl::Duration deadline, std::function<void(StatusOr<CopyAnswer>)> done) override;
  void later(absl::Time when, Task task) override;
  std::vector<WorkerKey> gone_workers() const override;
  std::vector<CopyPlace> others(const PartIdentity& identity) const override;
  void look_for_others(const std::shared_ptr<Part>& part) override;
  bool others_are_gone(const PartIdentity& identity) const override;
  bool drains() const override { return draining_.load(); }

  // ---- Service ----
  std::vector<Method> methods() override;
  void on_worker_gone(const WorkerInfo& worker, const Status& why) override;
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;
  void put_inspection(Inspection* out) const override;

 private:
  using PartRef = std::shared_ptr<Part>;

  static void put_ranges(const std::vector<PartRef>& parts, Inspection* out);
  void put_clients(const std::vector<PartRef>& parts, Inspection* out) const;

  void on_open(Payload arguments, ReplyFn reply);
  StatusOr<OpenAnswer> open(const OpenRequest& request);
  // Kind invalid_argument, saying what differs: it is another table than the request has.
  Status check_same(const OpenRequest& request, const Part& part) const;
  StatusOr<OpenAnswer> answer_open(const OpenRequest& request, const Part& part) const;
  StatusOr<PartRef> make_part(const OpenRequest& request, std::shared_ptr<ServerLimits> limits,
                              uint64_t id, const std::optional<RangeMap>& map);
  void on_find(Payload arguments, ReplyFn reply);
  void on_copy(Payload arguments, ReplyFn reply);
  void on_move(Payload arguments, ReplyFn reply);
  void on_list(ReplyFn reply);
  void on_share(CallContext& call, Payload arguments, ReplyFn reply);  // shared_memory.cc
  // The names of those that have joined, with this server among them or not.
  Status write_joined(bool with_self);
  StatusOr<std::vector<std::string>> read_joined(absl::Duration at_most);
  std::vector<std::string> joined() const {
    MutexLock lock(&mutex_);
    return joined_;
  }
  StatusOr<std::vector<OwnedPart>> list_parts(const std::vector<std::string>& servers,
                                              absl::Time end);
  StatusOr<PartRef> follow(const CopyRequest& request, std::vector<at::Tensor> tensors);
  // ---- service_cut.cc ----
  void on_cut(CallContext& call, Payload arguments, ReplyFn reply);
  void on_hold(CallContext& call, Payload arguments, ReplyFn reply);
  void begin_cut(const CutName& cut, const v1::PsCut& request, ReplyFn reply);
  void take_cut(const CutName& cut, const v1::PsCut& request, ReplyFn reply);
  void write_cut(const CutName& cut, const std::string& path, ReplyFn reply);
  void drop_cut(const CutName& cut);
  // ---- service_restore.cc ----
  void on_restore(CallContext& call, Payload arguments, ReplyFn reply);
  Status load_snapshot(const CutName& name, const v1::PsRestore& request);
  Status load_table(const TableReader& reader, const std::string& table,
                    const v1::PsRestore& request, const std::shared_ptr<const RestoredTable>& from,
                    std::vector<PartRef>* out);
  Status commit_restore(const CutName& name);
  Status install(const PartRef& part, const std::shared_ptr<const RestoredTable>& from);
  // Parts here that a restore has replaced, at other servers, learn of it.
  void look_again(const v1::PsRestore& request);
  // A request for a part that a restore has replaced.
  Status say_restored(uint64_t part, const ClientKey& client) const;
  // What reads or writes files, on a thread of its own. It is done once, and what it says is said to each who
  // asks for this step again.
  using FilesWork = absl::AnyInvocable<StatusOr<std::string>()>;
  void start_files(const CutName& name, uint32_t step, FilesWork work, ReplyFn reply);
  // False: this is not under way, and was not done last.
  bool asked_again(const CutName& name, uint32_t step, ReplyFn* reply);
  // Whether this server makes the part: it is the part's own server, or the next in the list after
  // servers that have all died or left.
  bool makes(const OpenRequest& request) const;
  bool is_gone(const std::string& server) const;
  // The owner of a part that this server may make: itself, if there is no map yet.
  StatusOr<RangeMap> claim(const OpenRequest& request);
  // This server owns the part from now on, alone, whatever the map says.
  StatusOr<RangeMap> claim_anew(const PartIdentity& identity);
  CopyPlace self() const { return {worker().name(), worker().info().incarnation}; }
  StatusOr<Keeper*> keeper();
  // From when it is seen that the server does not drain until the part is there.
  std::shared_ptr<void> making() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    making_.fetch_add(1);
    return {nullptr, [this](void*) { making_.fetch_sub(1); }};
  }
  void tick();
  // ---- service_calls.cc ----
  void on_call(CallContext& call, Payload arguments, ReplyFn reply);
  // Tables of two copies have lanes of their own: what waits for a backup holds up no others.
  using LaneKey = std::pair<WorkerInfo, bool>;
  enum class Place : uint8_t { kHoldsLane, kAlone };
  void do_requests(CallContext& call, uint64_t part, std::vector<PartCall> requests);
  void start(const LaneKey& to, std::vector<OutgoingCall> calls, absl::Duration time, Place place);
  void start_alone(const LaneKey& to, OutgoingCall call);
  // `unanswered`: for so long nothing was said to the message.
  void lane_is_free(const LaneKey& to, absl::Duration unanswered);
  std::vector<PartRef> parts() const;
  StatusOr<PartRef> find(const OpenRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ServiceContext context_;
  std::atomic<uint64_t> last_client_{0};
  std::atomic<uint64_t> last_cut_{0};
  SharedMemories shared_;

  // Small calls to one server: one message at a time, and those that wait for it. There is one while a
  // message is on its way.
  struct Lane {
    std::deque<OutgoingCall> waiting{};
    int64_t bytes = 0;
    absl::Time until{};  // when the message ends at the latest; none that waits has to end before
  };
  mutable Mutex lanes_mutex_;
  std::map<LaneKey, Lane> lanes_ ABSL_GUARDED_BY(lanes_mutex_);
  // As a server: requests, and the messages that have brought them.
  std::atomic<int64_t> requests_{0};
  std::atomic<int64_t> messages_{0};
  std::atomic<bool> draining_{false};
  // Parts that are being made, and are in no map yet: a drain waits for them.
  std::atomic<int> making_{0};
  std::atomic<int> loads_{0};  // images that are being taken up

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
  // Servers that are in no table's list, as far as this one has looked.
  std::vector<std::string> joined_ ABSL_GUARDED_BY(mutex_);
  Status closed_ ABSL_GUARDED_BY(mutex_);
  // The cut that is open here, or taken and not written.
  struct ServerCut {
    CutName name{};
    absl::Time until{};
    std::vector<PartRef> parts{};
    std::vector<NamedCut> taken{};
  };
  std::shared_ptr<ServerCut> cut_ ABSL_GUARDED_BY(mutex_);
  // Parts that were loaded, and wait for the commit.
  struct Loaded {
    CutName name{};
    std::vector<PartRef> parts{};
    std::map<std::string, std::shared_ptr<const RestoredTable>> tables{};
  };
  std::shared_ptr<Loaded> loaded_ ABSL_GUARDED_BY(mutex_);
  // By the number of a part that a restore has replaced.
  std::map<uint64_t, std::shared_ptr<const RestoredTable>> replaced_ ABSL_GUARDED_BY(mutex_);
  struct FilesJob {
    CutName name{};
    uint32_t step = 0;
    std::optional<StatusOr<std::string>> result{};
    std::vector<ReplyFn> waiting{};
  };
  std::shared_ptr<FilesJob> files_job_ ABSL_GUARDED_BY(mutex_);  // the last
  std::unique_ptr<Thread> files_thread_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, std::weak_ptr<ClientPart>> clients_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_SERVICE_H_
