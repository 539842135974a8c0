#ifndef WEFT_PS_INTERNAL_PART_H_
#define WEFT_PS_INTERNAL_PART_H_

// Part: one server's part of one table: a PartProtocol, its data, and the calls that wait. Any
// thread.
//
// What comes is done one after the other, in turns: a thread that brings something while no other
// works does it, and then what other threads have brought. So no lock is held over an operation of
// LibTorch, and no thread waits for another.
//
// Of a table with two copies a Part is one of them: a ReplicaProtocol says what it may do. What an owner
// does goes into its log in the order of the turns, and from there to the backup, one message at a time
// (part_log.cc); the backup does the same in the same order, and nothing else (part_copies.cc). An answer
// leaves when its position is released.

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "weft/common/executor.h"
#include "weft/common/metrics.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/ps/internal/batch_wire.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/ps/internal/cut.h"
#include "weft/ps/internal/hot_keys.h"
#include "weft/ps/internal/part_data.h"
#include "weft/ps/internal/part_protocol.h"
#include "weft/ps/internal/replica_protocol.h"
#include "weft/ps/internal/wire.h"
#include "weft/rpc/call_context.h"

namespace weft::ps::internal {

// Of one server, shared by its parts.
struct ServerLimits {
  int64_t queue_bytes = 0;  // pushes that wait for their step to end
  int64_t table_bytes = 0;
  int64_t log_bytes = 0;  // of each part: what its backup has not confirmed
  UserRules rules{};
  std::atomic<int64_t> queued{0};
};

struct PartMetrics {
  PartMetrics(std::shared_ptr<Metrics> metrics, const std::string& table);
  std::shared_ptr<Metrics> keep;  // a part may outlive its worker
  Counter* pushes;
  Counter* copies;
  Counter* dropped;
  Counter* refused;
  Counter* pulls;
  Gauge* waiting;
  Gauge* held_bytes;
  Counter* evicted;
  Counter* not_admitted;
  Gauge* rows;
  Gauge* bytes;
  Gauge* clients;
  Histogram* lag;
  Histogram* behind;
  Counter* takeovers;
  Counter* images;
  Gauge* log_bytes;
};

// A snapshot for debug_info, inspection and tests.
struct PartReport {
  uint64_t version = 0;
  uint64_t clients = 0;
  uint64_t held = 0;
  uint64_t parked = 0;
  uint64_t remembered = 0;
  int64_t rows = 0;
  int64_t bytes = 0;
  // Two copies.
  ReplicaProtocol::Role role = ReplicaProtocol::Role::kOwner;
  RangeMap map{};
  uint64_t position = 0;
  uint64_t confirmed = 0;
  bool joins = false;  // it is, or was, to be the backup
  bool formed = true;  // it has had a backup, or no other server is left to be one
};

struct PartIdentity {
  uint64_t id = 0;
  CopyPlace self{};
  std::string table{};
  TableDefinition definition{};
  std::vector<std::string> servers{};
  uint32_t index = 0;
  size_t parts() const { return part_count(definition, servers.size()); }
  const std::string& home() const { return servers[home_of(index, parts(), servers.size())]; }
};

class Part;

// What a part says to a request, once. One that is dropped uncalled is an error for its sender.
using PartReply = absl::AnyInvocable<void(StatusOr<Reply>)>;
// A request, or a run of pushes: `reply` is told of each, by its place in the run, what the part says; or of one for
// several that follow it.
struct PartCall {
  BatchedRequest what{};
  std::function<void(size_t place, BatchedResult said)> reply{};
};

// What a part with two copies needs of its server. Any thread; nothing is called back from within.
class CopyHost {
 public:
  virtual ~CopyHost() = default;
  // compare_set until the store answers; then Part::map_written().
  virtual void write_map(const std::shared_ptr<Part>& part, const WriteMap& write) = 0;
  // Once; then Part::map_read().
  virtual void read_map(const std::shared_ptr<Part>& part) = 0;
  virtual void send_copy(const CopyPlace& to, CopyRequest request, std::vector<at::Tensor> tensors,
                         absl::Duration deadline,
                         std::function<void(StatusOr<CopyAnswer>)> done) = 0;
  virtual void later(absl::Time when, Task task) = 0;
  virtual std::vector<WorkerKey> gone_workers() const = 0;
  // Those of the table's servers that are there, beginning after this one.
  virtual std::vector<CopyPlace> others(const PartIdentity& identity) const = 0;
  // Asks the store which servers have joined; then Part::others_known(), also without an answer.
  virtual void look_for_others(const std::shared_ptr<Part>& part) = 0;
  // All other servers of the table were members, and have died or left.
  virtual bool others_are_gone(const PartIdentity& identity) const = 0;
  // The server hands its copies to others, and takes up none.
  virtual bool drains() const = 0;
};

class WEFT_API Part : public std::enable_shared_from_this<Part> {
 public:
  Part(PartIdentity identity, std::unique_ptr<PartData> data, std::shared_ptr<ServerLimits> limits,
       std::shared_ptr<Metrics> metrics, std::shared_ptr<Runtime> runtime);
  ~Part();

  const PartIdentity& identity() const { return identity_; }
  // In this order, in one turn.
  void call(const WorkerKey& caller, std::vector<PartCall> calls, ScopeRef scope);
  void worker_gone(const WorkerKey& worker);
  // Pulls that wait end with this, as does everything that comes later.
  void close(const Status& why);
  PartReport report() const;
  // As of now, or, while a turn is under way, as of the question before.
  std::vector<PartProtocol::ClientView> client_views();
  // Counts the keys of pushes that this part has accepted, or followed as a backup. Any thread.
  const HotKeys& hot_keys() const { return hot_keys_; }

  // ---- two copies (part_copies.cc, part_log.cc) ----
  // Before anything else.
  void own(const RangeMap& map, std::weak_ptr<CopyHost> host);
  // A backup, from an image; `between`: see PartData::load(). On an error it is nothing.
  Status follow(const CopyRequest& image, std::vector<at::Tensor> tensors,
                std::weak_ptr<CopyHost> host, const std::function<void()>& between);
  using CopyReply = std::function<void(CopyAnswer)>;
  void copy(CopyRequest request, CopyReply reply);
  void map_written(const RangeMap& now);
  void map_read(const RangeMap& then);
  // A client gets no answer from the owner.
  void suspected();
  void server_gone(const CopyPlace& server);
  void tick();
  // This server drains: one attempt to have its copy at another server. report() says whether it is.
  void drain();
  // ---- part_move.cc ----
  // MOVE-1: the owner has its part at `to`, by the steps by which a lost copy is made again. `reply` says what
  // has become of it up to now; this is asked again until another server owns the part, or for the error.
  using MoveReply = std::function<void(StatusOr<CopyAnswer>)>;
  void move(const CopyPlace& to, uint64_t number, MoveReply reply);
  void others_known();
  // ---- cuts (part_cut.cc) ----
  template <class T>
  using CutReply = absl::AnyInvocable<void(StatusOr<T>)>;
  // CUT-1: no client enters until the cut is taken or dropped, or that time. Replies with those that have.
  void begin_cut(const CutName& cut, absl::Time until, CutReply<std::vector<ClientKey>> reply);
  // CUT-3. Kind unavailable: the cut is not open here any more.
  void take_cut(const CutName& cut, std::vector<CutNeed> needs, CutReply<PartCut> reply);
  void drop_cut(const CutName& cut);
  std::vector<std::string> buffer_names() const { return data_->buffer_names(); }  // constant
  // From a snapshot. REQUIRES: nothing has been done yet. On an error it is nothing. Clients of before
  // are told what it was restored from.
  Status restore(const PartImage& image, std::vector<at::Tensor> tensors,
                 std::shared_ptr<const RestoredTable> from);
  // Of protocol, values and the rule's state, bit by bit, with the log's position; at once when no turn
  // is under way.
  void digest(std::function<void(uint64_t position, uint64_t hash)> done);

 private:
  // A pull until it may be answered.
  struct Waiting {
    std::vector<at::Tensor> keys;
    Answer answer;
    PartReply reply;
  };

  // An answer that leaves when its position is released.
  struct Gated {
    uint64_t position = 0;
    PartReply reply;
    StatusOr<Reply> what;
  };
  struct OpenCut {
    CutName name{};
    absl::Time until{};
    std::vector<CutNeed> needs{};
    CutReply<PartCut> reply{};  // once it is to be taken
  };
  // At an owner: its backup, as far as it has come, or the one that is to be the backup.
  struct Stream {
    std::deque<LogEntry> log{};  // not confirmed
    uint64_t first = 0;          // position of its first
    int64_t bytes = 0;
    std::optional<std::pair<CopyRequest, std::vector<at::Tensor>>> image{};
    bool sending = false;
    std::optional<absl::Time> failing_since{};
    void put(uint64_t position, LogEntry entry);
    void confirmed(bool of_image, uint64_t position);
  };
  using StreamRef = std::shared_ptr<Stream>;
  // An image until all of it is copied.
  struct Making {
    CopyRequest request{};
    std::weak_ptr<CopyHost> host{};
    std::vector<at::Tensor> held{};  // of pushes that wait
    std::shared_ptr<const FrozenData> data{};
    std::vector<at::Tensor> tensors{};
    size_t done = 0;
    absl::Duration rested{};
  };

  void take_turn(Task task);
  // ---- in a turn ----
  void handle(const WorkerKey& caller, const Request& request, std::vector<at::Tensor> tensors,
              const ScopeRef& scope, PartReply reply);
  // ---- part_run.cc ----
  void handle_run(const WorkerKey& caller, const PartCall& run, const ScopeRef& scope);
  void handle_alone(const WorkerKey& caller, const PartCall& run, size_t place, int64_t key,
                    const ScopeRef& scope);
  // The end of those that can be applied as one with the first.
  size_t joinable(const BatchedRequest& run, size_t first, int64_t key) const;
  bool handle_joined(const WorkerKey& caller, const PartCall& run, size_t first, size_t end,
                     int64_t key);
  // What is said of a push that is judged the first time, for the log.
  struct Judged {
    Status accepted{};
    std::vector<uint64_t> evicted{};
    std::vector<at::Tensor> instead{};  // of what came: only some of its keys were admitted
  };
  // `said`: what the owner said of it; null: this is the owner.
  Status handle_push(const ClientKey& client, const PushHeader& header,
                     std::vector<at::Tensor> tensors, const Status* said, Answer* answer,
                     Judged* outcome, PartEffects* effects);
  Status execute(const ClientKey& client, const Request& request, std::vector<at::Tensor> tensors,
                 const Status* said, Answer* answer, Judged* outcome, PartEffects* effects);
  void perform(PartEffects effects);
  void apply(const ApplyStep& step);
  void answer_pull(uint64_t token, uint64_t lag);
  void cancel(uint64_t token);
  // To be said at the end of the turn, when report() has what it did.
  void answer(PartReply reply, StatusOr<Reply> what);
  void publish();
  void show(const PartReport& now);
  void fail_all(const Status& why);
  std::string label() const;
  Status take_up(const PartImage& image, std::vector<at::Tensor> tensors,
                 const std::function<void()>& between = {});
  // For a client that has not entered since the table was restored.
  Status check_restored(const ClientKey& client, const Request& request) const;
  bool keeps_out(const ClientKey& client, const Request& request) const;
  void settle_cut();
  void end_cut(const Status& why);
  PartCut freeze();
  // ---- in a turn, two copies ----
  bool owns() const {
    return !replica_.has_value() || replica_->role() == ReplicaProtocol::Role::kOwner;
  }
  bool takes_requests() const { return !replica_.has_value() || replica_->takes_requests(); }
  Reply moved() const;
  void append(LogEntry entry);
  void perform(const ReplicaEffects& effects);
  void take_image(bool for_next);
  void copy_piece(const StreamRef& stream, const std::shared_ptr<Making>& making);
  void image_made(const StreamRef& stream, Making* making, const Status& made);
  void serve();
  void retire();
  void pump();
  void pump(const StreamRef& stream, const CopyPlace& to);
  void sent(const StreamRef& stream, uint64_t epoch, bool image,
            const StatusOr<CopyAnswer>& answer);
  void follow_successor();
  void tell_successor();
  void tell_again(uint64_t epoch);
  void look_at_map();
  void ask_whether_joins();
  void note_given_up(uint64_t heard, const CopyAnswer& answer, ReplicaEffects* effects);
  void later_map(const RangeMap& said);
  void replay(LogEntry entry);
  CopyAnswer said(bool refused) const;
  void let_go();
  void note_gone(const WorkerKey& worker);
  CopyAnswer grant(const CopyRequest& wish);
  void let_backup_go();
  // One copy: what a move has left of it elsewhere.
  void drop_second_copy();
  void go_elsewhere();
  bool wants_backup() const { return identity_.definition.copies > 1; }
  void ask_other_copy(CopyWish wish);
  void go_on_moving();
  void end_move(const CopyPlace& to, const Status& why);
  void look_later();

  const PartIdentity identity_;
  const std::shared_ptr<ServerLimits> limits_;
  PartMetrics metrics_;
  const std::shared_ptr<Runtime> runtime_;

  mutable Mutex mutex_;
  std::deque<Task> turns_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  PartReport report_ ABSL_GUARDED_BY(mutex_);
  std::vector<PartProtocol::ClientView> views_ ABSL_GUARDED_BY(mutex_);

  // Used by the thread that has the turn.
  PartProtocol protocol_;
  std::unique_ptr<PartData> data_;
  std::map<uint64_t, Push> pushes_;  // accepted and not applied, by token
  std::map<uint64_t, Waiting> waiting_;
  uint64_t last_token_ = 0;
  HotKeys hot_keys_;
  std::vector<std::pair<PartReply, StatusOr<Reply>>> answers_;
  Status closed_;
  int64_t seen_log_bytes_ = 0;
  std::optional<OpenCut> cut_;
  std::shared_ptr<const RestoredTable> restored_;

  // Two copies.
  std::optional<ReplicaProtocol> replica_;
  std::weak_ptr<CopyHost> host_;
  StreamRef stream_ = std::make_shared<Stream>();
  StreamRef next_stream_ = std::make_shared<Stream>();
  bool doubts_owner_ = false;  // looks at the map before it takes over
  uint64_t heard_times_ = 0;
  std::vector<WorkerKey> gone_later_;  // while the part is handed over
  std::deque<Gated> gated_;
  bool formed_ = true;
  bool asking_owner_ = false;
  uint64_t offers_ = 0;
  CopyPlace unwilling_{};  // the last backup that would not be one
  uint64_t passed_over_ = 0;
  absl::Time heard_;
  struct Move {
    CopyPlace to{};
    uint64_t number = 0;
    Status failed{};           // kept until another is asked for
    bool waits = false;        // for a moment
    bool keeps_owner = false;  // it is the backup that goes
  };
  std::optional<Move> move_;
  // A backup that drains, and what is done to have another in its place.
  struct LetGo {
    CopyPlace backup{};
    absl::Time asked{};     // by it, the last time
    size_t candidates = 0;  // that were to take its place
    bool looks = false;     // which servers have joined
    bool knows = false;
  };
  LetGo let_go_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_PART_H_
