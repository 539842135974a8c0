#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_PASS_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_PASS_H_

// BackwardPass: what one worker does in one backward through several workers. A wave of names walks
// the graph that the gradients will walk, so that every worker knows exactly which of its sends are
// live; gradients flow behind it, and each worker says when it is done. The wave's end is found as
// Dijkstra and Scholten do it ("Termination detection for diffusing computations", 1980): a worker
// owes one reply to the worker that engaged it, until all that it has engaged have replied.
//
// What goes to one worker at one time goes in one message: names, the gradients that are there
// already, that one's part is done, and the reply that one owes. So a pass in which all that is
// recorded is live takes as many hops as one that assumes so.
//
// Invariants (cited by tests):
//   LIVE-1  gradients equal those of the same graph on one worker, for any subset of the recorded
//           messages that the losses use.
//   LIVE-2  each live send is fed exactly once, each live recv sends exactly once, and no other
//           send or recv runs.
//   LIVE-3  no node runs before its counts are final: when no recorded output that is still unnamed
//           can reach it, or all are named, or the wave has ended.
//   LIVE-4  any order, delay or repetition of any message gives the same gradients; a gradient that
//           overtakes its discover is parked.
//   LIVE-5  every pass ends, with success or one error, by its deadline; then every worker has no
//           state of it but its end, and no node of it begins.
//   LIVE-6  each live output is named exactly once; one reply to each message with names; one
//           gradient per live message, one done per participant but the root; no close when all
//           that is recorded is live.
//   LIVE-7  two passes in one context at once, from one or two workers, both end correctly.
//   LIVE-8  workers none of whose sends is live receive nothing.
//   LIVE-9  what others wait for leaves before a reducer's end of this worker's part is waited for:
//           that may depend on it, over another replica.
//
// Threads: all methods from anywhere. No lock is held while a node runs, anything is sent, or a
// callback of ours is called. One thread at a time runs the graph.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/dist_autograd/internal/graph.h"
#include "weft/dist_autograd/internal/pass_trace.h"
#include "weft/dist_autograd/leaf_effect.h"

namespace weft::internal {

struct PassId {
  AutogradContextId context;
  WorkerKey root;
  uint64_t counter = 0;

  friend constexpr auto operator<=>(const PassId&, const PassId&) = default;
};
std::string to_string(const PassId& id);  // "backward 3 of autograd context 0/00ab/1"

using Messages = std::map<uint64_t, PassGraph::Outputs>;
// The workers that take part, and whether each knows all that it will have to do.
using Participants = std::map<WorkerKey, bool>;
// What is found below a worker that was engaged.
struct Advanced {
  Participants participants{};
  bool done = false;      // its part is done
  bool carried = false;   // it has answered with a message of its own
  std::string outcome{};  // beside `done`: of its effect
};
// What one worker has for another.
struct Advance {
  bool retain = false;
  bool fast = false;
  Messages named{};
  std::vector<MessageGradients> gradients{};
  std::string effect{};              // beside names: what is to be done with gradients of leaves
  bool done = false;                 // to the root: the sender's part is done...
  std::string outcome{};             // ...and what became of its effect
  std::optional<Advanced> answer{};  // to the root: what the sender owes it
};
// How far a worker's part is.
struct PassProgress {
  uint64_t events = 0;      // so many until now
  std::string waits_for{};  // "the gradients of messages 3, 5 from 'ps0'"
};
using OnAdvanced = absl::AnyInvocable<void(StatusOr<Advanced>)>;
using OnTold = absl::AnyInvocable<void(Status)>;

// What a context has recorded at this worker.
struct RecordedSends {
  // Outputs, when the pass comes to this worker: what can be live was recorded before the loss
  // existed.
  size_t outputs = 0;
  PassGraph::FindSend find{};
  std::function<PassGraph::Sends()> all{};
};

// How a pass reaches the other workers. A message is handled once, or its `done` says why not.
class PassLinks {
 public:
  virtual ~PassLinks() = default;
  virtual void advance(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                       Advance advance, OnAdvanced done) = 0;
  virtual void close(const WorkerKey& to, const PassId& pass, absl::Time deadline, OnTold done) = 0;
  virtual void done(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                    const std::string& outcome, OnTold done) = 0;
  virtual void abort(const WorkerKey& to, const PassId& pass, const Status& why, OnTold done) = 0;
  virtual void progress(const WorkerKey& to, const PassId& pass, absl::Time deadline,
                        PassProgress progress, OnTold done) = 0;
  virtual StatusOr<std::unique_ptr<LeafEffect>> make_effect(std::string_view data) = 0;
  virtual std::string name_of(const WorkerKey& worker) const = 0;
  virtual PassTrace* trace() const = 0;  // null: there is none
  virtual Runtime& runtime() const = 0;
  virtual const std::shared_ptr<Executor>& executor() const = 0;
  virtual const std::shared_ptr<WaitDriver>& driver() const = 0;  // may be null
};

// What a pass is asked for.
struct PassOptions {
  bool retain = false;
  bool fast = false;  // every recorded send is assumed to be live, no worker asks
  std::string effect{};
  absl::Duration time{};  // until its deadline, as its error says it
};

class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  enum class State : uint8_t { kRunning, kDone, kAborted };

  BackwardPass(const PassId& id, const WorkerKey& self, RecordedSends recorded, absl::Time deadline,
               std::shared_ptr<PassLinks> links);

  const PassId& id() const { return id_; }
  bool is_root() const { return id_.root == self_; }
  State state() const;
  absl::Time deadline() const { return deadline_; }
  // Not OK: aborted, and why.
  Status error() const;
  // Adds what is there, of a pass that is done here, to `add`.
  void visit_leaves(const std::function<void(const LeafGradient&)>& add) const;
  // Scales the gradients of a pass that is done here.
  void scale_leaves(double factor);
  // The gradients, for good: the pass has succeeded everywhere.
  std::vector<LeafGradient> take_leaves();

  // ---- the root ----
  // With the losses; runs what can be run on this thread.
  void start(torch::autograd::edge_list roots, std::vector<at::Tensor> gradients,
             const PassOptions& options);
  // For the thread that waits for the pass: until it has ended everywhere, its error is known, or
  // `end`. What there is to run at this worker meanwhile, it runs.
  void wait_until(absl::Time end);
  // Completes when every worker that takes part has been told of an error; with an error when some
  // worker could not be told, or perhaps not those that it has engaged.
  Future<void> told() const { return told_.future(); }
  // What the effect returned at the workers whose answers arrived.
  LeafOutcomes outcomes() const;

  // ---- from others ----
  // Answers before it runs what can be run, unless the answer can then say more.
  void on_advance(const WorkerKey& from, Advance advance, OnAdvanced reply);
  // As on_advance(), on the thread that waits for this pass, or on another: at once and without
  // running anything here.
  void leave_advance(const WorkerKey& from, Advance advance, OnAdvanced reply);
  void on_close(OnTold taken);
  Status on_done(const WorkerKey& from, const std::string& outcome);
  void on_abort(const WorkerKey& from, const Status& why, OnTold reply);
  Status on_progress(const WorkerKey& from, const PassProgress& progress);
  // Ends the pass here and tells those below. The first error counts.
  void fail(Status why);
  // fail(), when it runs still: its deadline is over.
  void time_is_over();
  // Forgets its gradients when it is done here: it has failed elsewhere, as all others know.
  void drop();
  // A worker died or left: ends the pass if it has to do with it.
  void on_gone(const WorkerKey& worker, const Status& why);
  // Asks the root once whether it has failed: what would have told this worker may be lost. Of a
  // pass that is done here, when its time is over.
  void ask_root();

  // What a pass that does not end waits for; at the root, also what the others say of theirs.
  std::string waits_for() const;
  // What an observer of this worker is shown.
  struct Sight {
    State state = State::kRunning;
    absl::Duration age{};
    int64_t peers = 0;         // others that it has to do with here
    int64_t gradients = 0;     // messages whose gradients have come...
    int64_t parked_bytes = 0;  // ...and those of them that wait for their turn
    std::string waits_for{};
  };
  Sight sight() const;
  // To be called every half of a stall interval. A participant whose part takes longer tells the
  // root how far it is. True, once in each interval: for so long nothing has happened here nor, as
  // far as a root knows, anywhere.
  bool look();

 private:
  // What is to be done without the mutex.
  using Todo = std::vector<absl::AnyInvocable<void()>>;

  struct Arrived {
    WorkerKey from;
    Advance advance{};
    OnAdvanced reply;
  };

  // ---- the wave ----
  // Others are to be told of what was reached.
  void spread_locked(PassGraph::Reached reached) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // REQUIRES: no other thread has the graph.
  void take_locked(Arrived arrived, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // In the fast mode each worker names all that it has received from another, once.
  bool is_named_already(const Advance& advance) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return advance.fast && options_.fast;
  }
  Status check_locked(const Advance& advance) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status name_locked(const Advance& advance) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status answered_locked(const WorkerKey& by, const Advanced& answer, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void advanced(const WorkerKey& by, StatusOr<Advanced> answer);
  // Ends the wave at the root, when no worker owes a reply any more.
  void end_wave_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Participants report_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Sends what is to be said now, and these gradients.
  void flush_locked(std::vector<PassGraph::Outgoing> gradients, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void send_locked(const WorkerKey& to, Advance advance, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void answer_locked(Advanced answer, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void add_later_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- running ----
  bool has_work_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True: this thread is to call run_all(). Otherwise what is to be said is said.
  bool go_on_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run_all();
  // What can be fed now.
  std::map<uint64_t, MessageGradients> next_locked(Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // All nodes have run, and no more will be found.
  bool is_last_run() const;
  // LIVE-9: all but that this part is done.
  void send_before_end(std::vector<PassGraph::Outgoing> gradients);
  void trace_run(PassTrace* trace, absl::Time start, const std::vector<PassGraph::Outgoing>& out);
  void begin_trace_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status begin_graph();
  Status end_graph();
  Status run_graph(std::map<uint64_t, MessageGradients> fed, std::vector<PassGraph::Outgoing>* out);
  // On the thread that waits, or one of the pool.
  void run_elsewhere();
  bool call_waiter_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void serve();
  void part_done_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fail_any_locked(Status why, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish_if_done_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fail_locked(Status why, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void one_told(const Status& heard);
  std::string waits_for_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Says so; who hears that the pass has failed forgets its gradients.
  void say_done(absl::Time until);
  OnTold failing_with(std::string what, const WorkerKey& who);
  Status located(const Status& why) const;
  Status failed_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status not_root() const;
  static void perform(Todo todo);

  const PassId id_;
  const WorkerKey self_;
  const RecordedSends recorded_;
  const absl::Time deadline_;
  const std::shared_ptr<PassLinks> links_;
  const absl::Time begun_;
  Promise<void> told_;

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kRunning;
  Status error_ ABSL_GUARDED_BY(mutex_);
  // While `running_`, the thread that runs it has it alone.
  std::unique_ptr<PassGraph> graph_;
  bool has_effect_ = false;  // the same holds: the graph has been given its effect, if any
  PassTrace::Messages
      fed_untraced_{};  // the same holds: with a trace, what has set nothing off yet
  PassOptions options_ ABSL_GUARDED_BY(mutex_);
  bool final_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;      // the graph holds what may still be reached...
  bool released_ ABSL_GUARDED_BY(mutex_) = false;  // ...and no more, since it is final
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;  // all nodes have run, reducers have not
  // The thread that waits sleeps until this is set.
  std::optional<Promise<void>> call_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // something has been run
  bool traced_ ABSL_GUARDED_BY(mutex_) = false;
  PassWork work_ ABSL_GUARDED_BY(mutex_);  // with a trace only
  uint64_t events_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t seen_events_ ABSL_GUARDED_BY(mutex_) = 0;  // by look()
  int64_t still_looks_ ABSL_GUARDED_BY(mutex_) = 0;   // in a row
  // At the root: what the others have reported last, and when.
  std::map<WorkerKey, std::pair<absl::Time, PassProgress>> progress_ ABSL_GUARDED_BY(mutex_);
  // The wave.
  PassGraph::Reached unsent_ ABSL_GUARDED_BY(mutex_);           // to be named to others
  std::vector<Arrived> inbox_ ABSL_GUARDED_BY(mutex_);          // for the thread that has the graph
  Todo later_ ABSL_GUARDED_BY(mutex_);                          // answers that no worker waits for
  int64_t deficit_ ABSL_GUARDED_BY(mutex_) = 0;                 // replies that are waited for
  std::map<WorkerKey, int64_t> asked_ ABSL_GUARDED_BY(mutex_);  // the same, by worker
  // Bytes of gradients that have gone along with names which are not answered.
  std::map<WorkerKey, size_t> riding_ ABSL_GUARDED_BY(mutex_);
  OnAdvanced owed_ ABSL_GUARDED_BY(mutex_);  // to the worker that engaged this one:
  WorkerKey owed_to_ ABSL_GUARDED_BY(mutex_);
  bool wave_over_ ABSL_GUARDED_BY(mutex_) = false;  // of the root
  std::optional<bool> reported_ ABSL_GUARDED_BY(mutex_);
  Participants found_ ABSL_GUARDED_BY(mutex_);  // to be reported, of the root: all
  std::set<WorkerKey> children_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerKey> peers_ ABSL_GUARDED_BY(mutex_);  // whose death ends it
  // Gradients that wait for their turn.
  std::map<uint64_t, MessageGradients> parked_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> fed_ ABSL_GUARDED_BY(mutex_);
  // The end.
  bool part_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool unsaid_ ABSL_GUARDED_BY(mutex_) = false;  // that its part is done
  bool has_asked_ ABSL_GUARDED_BY(mutex_) = false;
  std::string outcome_ ABSL_GUARDED_BY(mutex_);  // of this worker's effect
  LeafOutcomes done_ ABSL_GUARDED_BY(mutex_);    // of the others, by those that are done
  std::vector<LeafGradient> leaves_ ABSL_GUARDED_BY(mutex_);
  int64_t untold_ ABSL_GUARDED_BY(mutex_) = 0;                // aborts that are not answered
  Status unheard_ ABSL_GUARDED_BY(mutex_);                    // why one has not arrived
  std::map<WorkerKey, Status> gone_ ABSL_GUARDED_BY(mutex_);  // before they were heard of
  std::vector<OnTold> wait_for_told_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_PASS_H_
