#ifndef WEFT_PS_INTERNAL_TABLE_CORE_H_
#define WEFT_PS_INTERNAL_TABLE_CORE_H_

// TableCore: a client's side of one table. Any thread.
//
//   CLIENT-1  an operation ends exactly once: when every part has answered, one has refused, or its
//             time is over.
//   CLIENT-2  a request that may have been done is sent again with the numbers that it had.
//   CLIENT-3  an operation that ends a step leaves when all pushes before it have ended; those after it
//             leave when it has ended. A pull of an ASP table leaves at once. Others overtake each other as they
//             like.
//   CLIENT-5  with two copies: a request whose owner has moved, or does not answer, is sent to the
//             owner that is found, with the numbers that it had.
//   CLIENT-4  the floor of a push is not above the number of any push that has not ended.
//   CLIENT-6  of a push to several parts whose values are not all finite nothing is sent: one part would
//             refuse it, and another have it.

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/common/trace.h"
#include "weft/ps/client.h"
#include "weft/ps/internal/copy_wire.h"
#include "weft/ps/internal/definition.h"
#include "weft/ps/internal/service.h"
#include "weft/ps/internal/wire.h"
#include "weft/ps/placement.h"

namespace weft::ps::internal {

// How a call ends whose server has not answered: it is gone, not reached, late, or has no tables.
bool gave_no_answer(ErrorKind kind);

// A part, where it is.
struct PartTarget {
  WorkerInfo server{};
  uint64_t part = 0;
  RangeMap map{};  // two copies
};

struct OpResult {
  at::Tensor values{};  // of a pull
  PushResult push{};
  uint64_t clock = 0;  // of an enter: the greatest
};
using OpDone = absl::AnyInvocable<void(StatusOr<OpResult>)>;

// What a user asks of a table.
struct Ask {
  std::string_view what{};  // for messages: a literal
  PushKind kind = PushKind::kGradient;
  std::optional<at::Tensor> push{};  // sparse: the rows
  at::Tensor push_keys{};
  bool pull = false;
  at::Tensor pull_keys{};
  std::optional<double> rate{};
  std::optional<double> max_norm{};
  at::Tensor then{};  // rules that compensate a delay; undefined: the values that were pulled last
  bool advance = false;
  std::optional<uint64_t> enter{};
  bool leave = false;
  std::string position{};  // with a push; "": as before
  absl::Duration deadline{};
};

class TableCore : public ClientPart,
                  public Requester,
                  public std::enable_shared_from_this<TableCore> {
 public:
  struct Setup {
    std::string name{};
    TableDefinition definition{};
    std::shared_ptr<const UpdateRule> rule{};  // null: not known here
    std::vector<std::string> servers{};
    std::vector<PartTarget> parts{};
    bool observer = false;
    absl::Duration attempt{};
  };
  static std::shared_ptr<TableCore> make(std::shared_ptr<PsService> service, Setup setup);
  TableCore(std::shared_ptr<PsService> service, Setup setup);
  ~TableCore() override { service_->remove_client(client_); }

  const Setup& setup() const { return setup_; }
  const std::shared_ptr<PsService>& service() const { return service_; }
  void submit(Ask ask, OpDone done);
  // The worker leaves: nothing is asked again, nothing waits.
  void close(const Status& why) override;
  void answered(absl::Span<OutgoingCall> calls, StatusOr<Reply> said) override;
  // ---- table_hold.cc ----
  StatusOr<HeldClient> hold(const CutName& cut, absl::Time until) override;
  bool release(const CutName& cut) override;
  void set_clock(uint64_t clock);
  uint64_t clock() const;
  TableStats stats() const;

 private:
  struct Op;
  // What one server is asked, and what it said. Its tensors are the push's, then the keys of a pull.
  struct Piece : BatchedRequest {
    Op* op = nullptr;
    size_t part = 0;
    size_t pushed = 0;  // tensors of the push
    at::Tensor pull_keys{};
    // Sparse pull: of its rows among those that are asked for; empty: it has all, in their order.
    std::vector<int64_t> places{};
    int attempts = 0;
    bool ended = false;
    PushResult push{};
    uint64_t clock = 0;
    at::Tensor values{};
  };
  struct Op {
    Ask ask;
    OpDone done;
    absl::Time deadline;
    absl::InlinedVector<Piece, 1> pieces{};
    at::Tensor values{};  // a dense pull of several parts: each is copied into it when it comes
    size_t left = 0;
    uint64_t number = 0;  // of a push
    bool barrier = false;
    bool ended = false;
    bool begun = false;
    uint64_t order = 0;  // among those that have begun
    absl::Time began{};  // on the timeline
    // What a cut has to have whole, or not at all.
    bool changes() const { return ask.push.has_value() || barrier; }
  };
  using OpRef = std::shared_ptr<Op>;

  using TargetRef = std::shared_ptr<const PartTarget>;
  // Of a part whose owner is looked for.
  struct Search {
    bool running = false;
    std::vector<std::pair<OpRef, size_t>> waiting{};
    size_t next = 0;      // server to be asked
    size_t asked = 0;     // in this round
    bool copies = false;  // one was found in this round, or may be there
    int empty_rounds = 0;
    bool asked_store = false;  // which servers have joined
  };

  bool copied() const { return in_map(setup_.definition); }
  TargetRef target(size_t part) const;
  // ---- table_locate.cc ----
  bool may_have_moved(const Status& why) const;
  void learn(size_t part, const RangeMap& map);
  void locate(const OpRef& op, size_t piece, const RangeMap& map);
  void ask_next(size_t part);
  void found(size_t part, const WorkerInfo& server, const StatusOr<FindAnswer>& answer);
  void search_again(size_t part);
  void note_names(const RangeMap& map) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ask_store(size_t part);

  Status check(const Ask& ask) const;
  // CLIENT-6
  Status check_values(const Op& op) const;
  // Which keys are whose: `whole` says that one part has all.
  struct Slices {
    std::optional<size_t> whole{};
    std::vector<std::vector<int64_t>> places{};  // by part; may be empty when one has all
    bool has(size_t part) const {
      return whole.has_value() ? *whole == part : !places.empty() && !places[part].empty();
    }
  };
  Slices slice(const at::Tensor& keys) const;
  void cut_dense(Op* op);
  void cut_sparse(Op* op) const;
  void pump();
  // REQUIRES: the operation has begun.
  void send_all(const OpRef& op);
  // Whether it leaves at once, whatever runs (CLIENT-3).
  bool passes_queue(const Op& op) const;
  void look_at_queue(absl::Time when);
  // Ends the operations that still wait for a step when their time is over, or the worker leaves (CLIENT-1).
  void end_late();
  bool is_held() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Numbers, clocks and versions, as they are now.
  void begin_locked(const OpRef& op) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void send(const OpRef& op, size_t piece);
  void answered(const OpRef& op, size_t piece, StatusOr<Reply> result);
  // Pushes alone have this answer, without an error: `first`, and answer_after() of those behind it.
  void all_answered(absl::Span<OutgoingCall> calls, const Answer& first);
  static OpRef op_of(const OutgoingCall& call, size_t* piece);
  // True: it was the last that the operation waits for.
  bool note(Piece* piece, const Answer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StatusOr<Answer> read(Op* op, size_t piece, StatusOr<Reply> result) const;
  // The bytes of its request with its answer.
  int64_t bytes_of(const Piece& piece) const;
  // Whether it is worth to ask again.
  bool may_retry(const PartTarget& part, const Status& why) const;
  void end(const OpRef& op, Status why);
  // False: it has ended before.
  bool end_locked(Op* op, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  OpResult result_of(Op* op);
  // Where the worker has a timeline.
  void draw(const Op& op, const Status& end) const;
  std::string label(const Op& op, size_t piece) const;
  void later(absl::Time when, Task task);
  void run_due();

  const std::shared_ptr<PsService> service_;
  const Setup setup_;
  const uint64_t client_;
  const std::optional<HashRing> ring_;        // sparse
  const int64_t elements_;                    // dense
  const std::shared_ptr<TraceWriter> trace_;  // null: no timeline
  mutable std::atomic<uint64_t> drawn_{0};
  const bool compensates_;        // a push has the values that its gradient was computed with
  std::unique_ptr<Timer> timer_;  // made by the first that needs it, then constant

  mutable Mutex mutex_;
  std::deque<OpRef> queue_ ABSL_GUARDED_BY(mutex_);
  // The earliest deadline in the queue, at which end_late() is due.
  absl::Time queue_ends_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool barrier_running_ ABSL_GUARDED_BY(mutex_) = false;
  size_t pushes_running_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  // Those that change something, from when they begin to their end, in this order; null: has ended. The first has not.
  std::deque<OpRef> running_ ABSL_GUARDED_BY(mutex_);
  uint64_t first_order_ ABSL_GUARDED_BY(mutex_) = 1;  // of the first
  std::string position_ ABSL_GUARDED_BY(mutex_);      // of the last push that has begun
  at::Tensor pulled_ ABSL_GUARDED_BY(mutex_);         // last, if `compensates_`
  struct Hold {
    CutName cut{};
    absl::Time until{};
  };
  std::optional<Hold> hold_ ABSL_GUARDED_BY(mutex_);
  uint64_t clock_ ABSL_GUARDED_BY(mutex_) = 0;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<uint64_t> versions_ ABSL_GUARDED_BY(mutex_);  // pulled last, by part
  std::vector<uint64_t> at_least_ ABSL_GUARDED_BY(mutex_);  // batch: to be pulled, by part
  std::vector<TargetRef> targets_ ABSL_GUARDED_BY(mutex_);
  std::vector<Search> searches_ ABSL_GUARDED_BY(mutex_);
  // Who may have a part: the table's servers, and those of which a map or the store has told.
  std::vector<std::string> names_ ABSL_GUARDED_BY(mutex_);
  TableStats stats_ ABSL_GUARDED_BY(mutex_);
  // Each holds this object: a cycle until its time has come, or close().
  std::multimap<absl::Time, Task> due_ ABSL_GUARDED_BY(mutex_);
  Status closed_ ABSL_GUARDED_BY(mutex_);
};

// What copies of a Table share. The last one leaves.
class TableHandle {
 public:
  explicit TableHandle(std::shared_ptr<TableCore> core) : core_(std::move(core)) {}
  TableHandle(const TableHandle&) = delete;
  TableHandle& operator=(const TableHandle&) = delete;
  ~TableHandle();
  TableCore& core() const { return *core_; }

 private:
  const std::shared_ptr<TableCore> core_;
};

}  // namespace weft::ps::internal

#endif  // WEFT_PS_INTERNAL_TABLE_CORE_H_
