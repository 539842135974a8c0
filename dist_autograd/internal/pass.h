#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_PASS_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_PASS_H_

// BackwardPass: what one worker does in one backward through several workers. First a wave of
// `discover` walks the graph that the gradients will walk, so that every worker knows exactly which
// of its sends are live; then gradients flow, and each worker says when it is done. The wave's end
// is found as Dijkstra and Scholten do it ("Termination detection for diffusing computations",
// 1980): a worker owes one reply to whoever engaged it, until all that it has engaged have replied.
//
// Invariants (cited by tests):
//   LIVE-1  gradients equal those of the same graph on one worker, for any subset of the recorded
//           messages that the losses use.
//   LIVE-2  each live send is fed exactly once, each live recv sends exactly once, and no other
//           send or recv runs.
//   LIVE-3  no node runs before the counts of its worker are final: when all outputs of all
//           recorded sends are named, or the wave has ended.
//   LIVE-4  any order, delay or repetition of any message gives the same gradients; a gradient that
//           overtakes its discover is parked.
//   LIVE-5  every pass ends, with success or one error, by its deadline; then every worker has no
//           state of it but its end.
//   LIVE-6  each live output is named in exactly one discover; one reply per discover; one gradient
//           per live message, one done per participant but the root; no close when all that is
//           recorded is live.
//   LIVE-7  two passes in one context at once, from one or two workers, both end correctly.
//   LIVE-8  workers none of whose sends is live receive nothing.
//
// Threads: all methods from anywhere. No lock is held while a node runs, anything is sent, or a
// callback of ours is called. One thread at a time runs the graph.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "weft/common/future.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/dist_autograd/internal/graph.h"

namespace weft::internal {

struct PassId {
  AutogradContextId context;
  WorkerKey root;
  uint64_t counter = 0;

  friend constexpr auto operator<=>(const PassId&, const PassId&) = default;
};
std::string to_string(const PassId& id);  // "backward 3 of autograd context 0/00ab/1"

using Messages = std::map<uint64_t, PassGraph::Outputs>;
// Who takes part, and whether it knows all that it will have to do.
using Participants = std::map<WorkerKey, bool>;
using OnDiscovered = absl::AnyInvocable<void(StatusOr<Participants>)>;
using OnTold = absl::AnyInvocable<void(Status)>;

// How a pass reaches the other workers. A message is handled once, or its `done` says why not.
class PassLinks {
 public:
  virtual ~PassLinks() = default;
  virtual void discover(const WorkerKey& to, const PassId& pass, absl::Time deadline, bool retain,
                        Messages messages, OnDiscovered done) = 0;
  virtual void gradient(const PassId& pass, absl::Time deadline, PassGraph::Outgoing outgoing,
                        OnTold done) = 0;
  virtual void close(const WorkerKey& to, const PassId& pass, absl::Time deadline, OnTold done) = 0;
  virtual void done(const WorkerKey& to, const PassId& pass, absl::Time deadline, OnTold done) = 0;
  virtual void abort(const WorkerKey& to, const PassId& pass, const Status& why, OnTold done) = 0;
  virtual std::string name_of(const WorkerKey& worker) const = 0;
  virtual Runtime& runtime() const = 0;
  virtual const std::shared_ptr<Executor>& executor() const = 0;
};

class BackwardPass : public std::enable_shared_from_this<BackwardPass> {
 public:
  enum class State : uint8_t { kRunning, kDone, kAborted };

  // `recorded`: how many outputs the context's sends here have now. Every message that can be live
  // was recorded before the loss existed.
  BackwardPass(const PassId& id, const WorkerKey& self, size_t recorded, absl::Time deadline,
               PassGraph::FindSend find_send, std::shared_ptr<PassLinks> links);

  const PassId& id() const { return id_; }
  bool is_root() const { return id_.root == self_; }
  State state() const;
  absl::Time deadline() const { return deadline_; }
  // Not OK: aborted, and why.
  Status error() const;
  // Adds what is there, of a pass that is done here, to `add`.
  void visit_leaves(const std::function<void(const LeafGradient&)>& add) const;
  // Of a pass that is done here.
  void scale_leaves(double factor);
  // The gradients, for good: the pass has succeeded everywhere.
  std::vector<LeafGradient> take_leaves();

  // ---- the root ----
  // With the losses; runs what can be run on this thread.
  void start(torch::autograd::edge_list roots, std::vector<at::Tensor> gradients, bool retain);
  // Completes when the pass has ended everywhere, or with its error as soon as that is known.
  Future<void> ended() const { return ended_.future(); }
  // Completes when everybody who takes part has been told of an error.
  Future<void> told() const { return told_.future(); }

  // ---- from others ----
  void on_discover(const WorkerKey& from, bool retain, const Messages& messages,
                   OnDiscovered reply);
  // These two say `taken` before they run what can be run.
  void on_gradient(const WorkerKey& from, uint64_t message, std::vector<at::Tensor> gradients,
                   OnTold taken);
  void on_close(OnTold taken);
  Status on_done(const WorkerKey& from);
  void on_abort(const Status& why, OnTold reply);
  // Ends the pass here and tells those below. The first error counts.
  void fail(Status why);
  // Forgets its gradients when it is done here: it has failed elsewhere, as all others know.
  void drop();
  // A worker died or left: ends the pass if it has to do with it.
  void on_gone(const WorkerKey& worker, const Status& why);

  // "the gradients of messages 3, 5 from 'ps0'": what a pass that does not end waits for.
  std::string waits_for() const;
  // Whether nothing has happened here since this was asked last.
  bool stands_still();

 private:
  // What is to be done without the mutex.
  using Todo = std::vector<absl::AnyInvocable<void()>>;

  // Sends discovers to those that were reached.
  void spread_locked(PassGraph::Reached reached, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void discovered(const WorkerKey& by, StatusOr<Participants> found);
  // What follows when nothing below owes a reply any more.
  void wave_ended_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Participants report_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True: this thread is to call run_all().
  bool may_run_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run_all();
  void run_elsewhere();
  void part_done_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void finish_if_done_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void fail_locked(Status why, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void one_told();
  OnTold failing_with(std::string what, const WorkerKey& who);
  Status located(const Status& why) const;
  static void perform(Todo todo);

  const PassId id_;
  const WorkerKey self_;
  const size_t recorded_;
  const absl::Time deadline_;
  const std::shared_ptr<PassLinks> links_;
  Promise<void> ended_;
  Promise<void> told_;

  mutable Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kRunning;
  Status error_ ABSL_GUARDED_BY(mutex_);
  // While `running_`, the thread that runs it has it alone.
  std::unique_ptr<PassGraph> graph_;
  bool retain_ ABSL_GUARDED_BY(mutex_) = false;
  bool final_ ABSL_GUARDED_BY(mutex_) = false;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // something has been run
  uint64_t events_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t seen_events_ ABSL_GUARDED_BY(mutex_) = 0;  // by stands_still()
  // The wave.
  int64_t deficit_ ABSL_GUARDED_BY(mutex_) = 0;                 // discovers that are not answered
  std::map<WorkerKey, int64_t> asked_ ABSL_GUARDED_BY(mutex_);  // the same, by worker
  OnDiscovered owed_ ABSL_GUARDED_BY(mutex_);                   // to whoever engaged this worker
  bool wave_over_ ABSL_GUARDED_BY(mutex_) = false;              // of the root
  std::optional<bool> reported_ ABSL_GUARDED_BY(mutex_);
  Participants found_ ABSL_GUARDED_BY(mutex_);  // to be reported, of the root: all
  std::set<WorkerKey> children_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerKey> peers_ ABSL_GUARDED_BY(mutex_);  // whose death ends it
  // Gradients that wait for their turn.
  std::map<uint64_t, std::vector<at::Tensor>> parked_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> fed_ ABSL_GUARDED_BY(mutex_);
  // The end.
  bool part_done_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<WorkerKey> done_ ABSL_GUARDED_BY(mutex_);
  std::vector<LeafGradient> leaves_ ABSL_GUARDED_BY(mutex_);
  int64_t untold_ ABSL_GUARDED_BY(mutex_) = 0;  // aborts that are not answered
  std::vector<OnTold> wait_for_told_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_PASS_H_
