#ifndef WEFT_COLLECTIVES_INTERNAL_GROUP_CORE_H_
#define WEFT_COLLECTIVES_INTERNAL_GROUP_CORE_H_

// GroupCore: the order of a group's operations, and its end.
//
// COLL-1: every operation ends exactly once.
// COLL-3: the first failure of a group is that of every operation under way and to come.
// COLL-5: after close() there is no thread.
// ORDER-1: operations take numbers as they are issued and run in the order of the numbers, one at
//          a time: synchronous ones on the thread of their caller, others on one of the group's.
//
// Threads: all methods from anywhere; close() not from the group's own thread, which runs no code
// of the user.

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "weft/collectives/internal/device_staging.h"
#include "weft/collectives/internal/engine.h"
#include "weft/collectives/internal/flight_record.h"
#include "weft/collectives/internal/group_metrics.h"
#include "weft/common/condition.h"
#include "weft/common/future.h"
#include "weft/common/log.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/common/value_guard.h"
#include "weft/common/worker_info.h"

namespace weft {
class FlightRecorder;
class TraceWriter;
}  // namespace weft

namespace weft::internal {

class DeviceEngine;

struct GroupCoreOptions {
  std::string name;
  absl::Duration timeout = absl::Minutes(10);
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Executor> executor;  // of continuations; null: one of the group's own
  Logger log;
  std::string_view backend;         // a literal
  std::vector<WorkerInfo> workers;  // by rank; empty: the group was made without a Worker
  // Each may be null.
  std::shared_ptr<Metrics> metrics;
  std::shared_ptr<TraceWriter> trace;
  std::shared_ptr<FlightRecorder> recorder;
};

// What an observer sees of a group.
struct GroupState {
  uint64_t sequence = 0;  // collective operations begun so far
  Status failure;
  bool left = false;
  uint64_t pending = 0;        // operations that have begun or wait for their turn
  std::string_view op;         // the one under way; empty: there is none
  uint64_t op_sequence = 0;    // 0: send or recv
  std::string_view algorithm;  // may be empty
  absl::Duration op_age;
  std::vector<int> waits_for;  // ranks
};

// What works by a group's operations, and is shown with it: a DistributedDataParallel.
class GroupUser {
 public:
  struct Row {
    std::string name{};
    int64_t done = 0;         // reductions that have succeeded
    int64_t forward = 0;      // that is reduced now, or was last
    std::string waits_for{};  // "": nothing
    absl::Duration age{};     // for so long
  };
  virtual ~GroupUser() = default;
  // Any thread.
  virtual Row row() const = 0;
};

class GroupCore {
 public:
  // `device`: null, or what performs the operations on tensors; `engine` is then what the ranks
  // compare and tell each other by.
  GroupCore(GroupCoreOptions options, std::unique_ptr<Engine> engine,
            std::unique_ptr<DeviceEngine> device = nullptr);
  ~GroupCore();

  using Body = absl::FunctionRef<Status(const Turn&)>;
  // An operation that does not count takes no number: only some of the ranks take part in it.
  Status run(std::string_view op, Timeout timeout, bool counts, Body body);
  Future<void> start(std::string_view op, Timeout timeout, bool counts,
                     absl::AnyInvocable<Status(const Turn&)> body);

  // As a body, for a body that uses engine() in a group with a device().
  Status on_host(absl::FunctionRef<Status()> body);
  // The result of an operation whose work goes on in the background.
  Future<void> queued(std::string_view op, const std::shared_ptr<ValueGuard>& guard);

  void fail(const Status& cause);
  // Runs when no operation does. REQUIRES: the group has failed.
  std::vector<bool> gone();
  // OK while the group works.
  Status failure();
  GroupState state();
  // The worker of that rank died, by the membership of this rank's worker: fails the group.
  void member_died(int rank, const Status& why);
  // Until it is gone.
  void add_user(const std::weak_ptr<GroupUser>& user);
  std::vector<std::shared_ptr<GroupUser>> users();
  // The last operations, as a JSON object.
  std::string flight_record();
  void close();

  Engine& engine() { return *engine_; }
  DeviceStaging& staging() { return staging_; }
  DeviceEngine* device() { return device_.get(); }
  const GroupCoreOptions& options() const { return options_; }
  const Membership& member() const { return engine_->member(); }
  Runtime& runtime() { return *options_.runtime; }
  uint64_t sequence();

 private:
  struct Queued {
    std::string_view op;
    uint64_t ticket = 0;
    Turn turn;
    absl::AnyInvocable<Status(const Turn&)> body;
    Promise<void> promise;
  };

  Status take_turn_locked(std::string_view op, Timeout timeout, bool counts, Turn* turn,
                          uint64_t* ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns when it is this ticket's turn, or the group has failed.
  Status await_turn_locked(std::string_view op, uint64_t ticket, const Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The operation is over: what its caller is told.
  Status settle(std::string_view op, const Turn& turn, Status done);
  // The operation that is over, into metrics and timeline.
  void show_ended(std::string_view op, const Turn& turn, const Status& done);
  // The next one may begin.
  void end_turn();
  Status failed_locked(std::string_view op) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void work();
  const std::shared_ptr<Executor>& executor_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status look(uint64_t sequence);

  const GroupCoreOptions options_;
  const std::unique_ptr<Engine> engine_;
  DeviceStaging staging_;
  const std::unique_ptr<DeviceEngine> device_;
  GroupMetrics metrics_;  // of the thread whose turn it is

  // For a group with a device: a body or a look may use the link, never both.
  Mutex host_mutex_;
  bool on_host_ ABSL_GUARDED_BY(host_mutex_) = false;

  Mutex mutex_;
  Condition changed_;
  Status failure_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t next_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t serving_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t finished_ ABSL_GUARDED_BY(mutex_) = 0;  // the last operation without an error
  uint64_t settled_ ABSL_GUARDED_BY(mutex_) = 0;   // of those that had their turn
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;         // an operation runs
  std::string_view running_ ABSL_GUARDED_BY(mutex_);  // while busy_
  uint64_t running_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time running_since_ ABSL_GUARDED_BY(mutex_);
  FlightRecord record_ ABSL_GUARDED_BY(mutex_);
  uint64_t recorded_ ABSL_GUARDED_BY(mutex_) = 0;  // the entry of the one that runs
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Thread> thread_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Executor> executor_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> died_ ABSL_GUARDED_BY(mutex_);  // ranks, by the membership
  std::vector<std::weak_ptr<GroupUser>> users_ ABSL_GUARDED_BY(mutex_);
};

// "rank 1 ('ps0'), rank 2": what the operation under way waits for; "": for no rank.
std::string awaited_text(const GroupCore& core, const GroupState& state);

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_GROUP_CORE_H_
