#ifndef WEFT_PIPELINE_INTERNAL_RUNNER_H_
#define WEFT_PIPELINE_INTERNAL_RUNNER_H_

// Runner: one worker's part in one pipeline. A thread of its own runs the worker's list of actions
// for one step after the other; what other workers send waits in slots until an action takes it.
//
//   RUN-1  a slot is named (step, edge, micro-batch, direction), filled once and emptied once.
//   RUN-2  every begun step is answered exactly once: with its result, or with the error that ended
//          the pipeline.
//   RUN-3  the first error wins. It is told to all other workers, ends every wait and empties every
//          slot; what comes later is dropped.
//   RUN-4  nothing waits in a receive: an action waits for what it takes.
//   RUN-5  no lock is held while an action runs, or anything is sent or answered.
//   RUN-6  a part that waits for long asks the pipeline's other workers, one question at a time each: a process
//          that has ended, or a part that has failed without being heard, ends the wait; silence does
//          not (the lease and the step's deadline do). All of them, because that a process has ended is
//          known at its own host first, and none that waits for it may be there.
//   RUN-7  what an action queues on a device comes after the copies of what it takes, and after what was
//          published before its step (rpc/spi/device_order.h); what is done with its stages after the step
//          comes after the step's kernels. The thread itself waits for no device.
//   RUN-8  with a norm over all stages, no stage steps before all workers have their last gradient: each
//          gives its part of the norm to the plan's first worker, which gives the whole to all. Steps
//          then come at the end of every list.
//   RUN-9  small messages are answered together, by the thread: when it has waited for long (60 ms), when
//          the step has ended, and when there are some, whichever is first. They are copies, so that a sender
//          lends nothing meanwhile. An answer costs about as much as such a message, and takes the core, at
//          either worker, from the action that waited for the message.
//   RUN-10 what the next action takes is there: then a second thread writes the message, so that the action
//          begins without waiting for that. Else the thread writes it itself, which saves a wake-up. Either
//          way in the list's order. Tensors on a device are marked (RUN-7) by the thread that computed them,
//          which writes these, too.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/pipeline/internal/copies.h"
#include "weft/pipeline/internal/messages.h"
#include "weft/pipeline/internal/pipeline_metrics.h"
#include "weft/pipeline/internal/planted.h"
#include "weft/pipeline/plan.h"
#include "weft/pipeline/stage_compute.h"
#include "weft/rpc/spi/device_order.h"
#include "weft/rpc/worker.h"

namespace weft::pipeline::internal {

struct RunnerSetup {
  uint64_t pipeline = 0;
  Plan plan{};
  size_t self = 0;
  std::vector<WorkerInfo> workers{};
  WorkerInfo maker{};
  std::map<int, std::shared_ptr<StageCompute>> stages{};  // of this worker
  absl::Duration deadline = absl::InfiniteDuration();
  bool record = false;
  int64_t first_step = 0;
  RunnerBug bug = RunnerBug::kNone;
  PartDigest digest{};
  // Either puts a barrier before the steps of all stages (RUN-8).
  double clip_norm = 0;
  bool skip_not_finite = false;
  // Copies of states, and what its stages are now; null: none are kept.
  std::shared_ptr<StateCopies> copies{};
  std::function<std::vector<StageState>()> snapshot{};
  // RUN-7: publishes what the thread has queued for its stages; null: they have no devices.
  std::function<void()> publish{};
  std::shared_ptr<PipelineMetrics> metrics{};  // null: its own
  // A process has ended, as the transport knows for certain; and: the part has failed. Any thread; may be
  // null.
  std::function<void(const WorkerInfo& worker, const Status& why)> on_ended{};
  std::function<void()> on_failed{};
};

class Runner : public std::enable_shared_from_this<Runner> {
 public:
  Runner(std::shared_ptr<const Worker> worker, std::shared_ptr<Runtime> runtime, RunnerSetup setup);
  ~Runner();

  const RunnerSetup& setup() const { return setup_; }
  void start();
  void begin(BeginMessage message, ReplyFn reply);
  // From worker `sender`. Answered once, perhaps later by the thread (RUN-9).
  void put(PutMessage message, std::string_view sender, ReplyFn reply);
  // From another worker (`tell_others` false), or found here.
  void fail(const Status& why, bool tell_others);
  // The same for the loss of a worker: what was being done here is added to it.
  void lost(const Status& why, bool tell_others);
  // Ends the thread, after the action that it runs now.
  void close(const Status& why);
  // After close(), once, not by its own thread. The last reference may be dropped by that thread
  // (an answer that comes immediately), so the owner joins before it drops its own.
  void join();
  bool thread_has_ended() const;
  bool concerns(const WorkerInfo& worker) const;
  // So many steps are done: for a state that was loaded. Kind state while a step is under way.
  Status set_steps(int64_t steps);
  // Its stages' state becomes a copy, here and at a neighbour; between steps. `done` once; without
  // copies at once.
  void keep(absl::AnyInvocable<void(Status)> done);
  // OK, or the error that ended the pipeline.
  Status status() const;

  struct Counts {
    int64_t slots = 0;
    int64_t begun = 0;
    int64_t steps = 0;
    int64_t sends = 0;
  };
  Counts counts() const;
  // What it does: "F1.3 of step 12, waits for the result of stage 0, ...", "waits for a step"; or what
  // ended it.
  std::string doing() const;

 private:
  // Where the worker's list is.
  struct Place {
    Action action{};
    int64_t step = -1;  // -1: between steps
  };
  // Step, edge, micro-batch, backward.
  using SlotName = std::tuple<int64_t, int, int, bool>;
  struct Begun {
    BeginMessage message;
    weft::internal::GuardRef ready;  // of its tensors (RUN-7)
    ReplyFn reply;
  };
  struct Slot {
    Tensors tensors;
    weft::internal::GuardRef ready;
  };
  struct Posted {  // a message that is to be written
    Action action{};
    PutMessage message{};
    // What of it is borrowed until the answer, and which version that was.
    std::vector<std::pair<at::Tensor, uint32_t>> lent{};
  };
  struct Current;  // what a step that runs keeps (runner_step.h)
  // Tied weights travel in slots, too: edge -1-g is group g of the plan, and its "micro-batch" the worker
  // that gives its gradients to the first stage's (backward), or is given the sum (forward).
  static int group_of(int edge) { return -1 - edge; }
  // The norm of all gradients travels as that of one more group would, of all workers.
  int norm_edge() const { return -1 - static_cast<int>(setup_.plan.tied.size()); }
  bool has_barrier() const { return setup_.clip_norm > 0 || setup_.skip_not_finite; }

  void run();
  std::optional<Begun> next();
  StatusOr<EndMessage> run_step(Begun* begun);
  Status run_actions(Begun* begun, Current* now);
  Status keep_and_wait();
  Status run_action(const Action& action, Current* now);
  // How many weights' gradients the list has from `first` on that are taken together: the last ones of a
  // stage that is reduced; 1 for any other action.
  size_t together_from(size_t first) const;
  // `at`: the one that it is about, also when it fails.
  Status weight_grads(size_t first, size_t count, Current* now, Action* at);
  Status forward(const Action& action, Current* now);
  Status backward(const Action& action, Current* now);
  Status send(const Action& action, Current* now);
  Status reduce(const Action& action, Current* now);
  Status sum_tied(const Action& action, int group, Current* now);
  // Whether the action behind the one at `place` of the list has to wait for what it takes.
  bool next_waits(size_t place, int64_t step) const;
  // runner_barrier.cc: the steps that run_step() has put off.
  Status step_together(Current* now);
  StatusOr<double> norm_of_all(const Action& action, Current* now);
  // To a worker of the plan, whose answer may come later. `later`: the second thread may write it (RUN-10).
  Status post(const Action& action, PutMessage message, bool later = false);
  void write(Posted posted);
  void write_posted();           // the second thread
  int root_of(int group) const;  // the worker of its first stage
  // `keep`: they stay in their slot.
  StatusOr<Tensors> take(const Action& action, SlotName name, absl::Time deadline,
                         bool keep = false);
  void probe(const WorkerInfo& peer, std::string_view method, const std::string& context);
  void on_probed(const WorkerInfo& peer, const std::string& context,
                 const StatusOr<Payload>& answer);
  const WorkerInfo& giver(const SlotName& name) const;
  std::string at_text(const Place& place) const;
  // The slot that a message is for.
  StatusOr<SlotName> slot_of(const PutMessage& message) const;
  // `reply`: of a message, kept until answer_held(); null for what another stage of this worker gives, and
  // for a message that is answered immediately.
  Status fill(SlotName name, Tensors tensors, ReplyFn* reply = nullptr);
  // RUN-9.
  static constexpr size_t kSmallBytes = size_t{4} << 10;
  static bool is_small(const Tensors& tensors);
  void answer_held(size_t more_than = 0);
  // OK, or the error that has ended this part: the other worker's part is of something else.
  Status check_same(const PartDigest& other, std::string_view worker, int64_t step);
  std::string slot_text(const SlotName& name) const;
  std::string where(const Action& action, int64_t step) const;
  bool local(int edge) const;

  const std::shared_ptr<const Worker> worker_;
  const std::shared_ptr<Runtime> runtime_;
  const RunnerSetup setup_;
  const std::shared_ptr<PipelineMetrics> metrics_;
  const std::vector<std::vector<int>> from_;
  const std::vector<std::vector<int>> to_;
  std::set<std::pair<int, int>> recomputed_;  // stage, micro-batch
  Condition changed_;
  Condition posted_changed_;
  Condition written_;  // the second thread has nothing to write

  mutable Mutex mutex_;
  std::unique_ptr<Thread> thread_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Thread> writer_ ABSL_GUARDED_BY(mutex_);
  std::deque<Posted> posted_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // the second thread, one of them
  std::map<SlotName, Slot> slots_ ABSL_GUARDED_BY(mutex_);
  std::vector<ReplyFn> held_ ABSL_GUARDED_BY(mutex_);  // answers (RUN-9)
  // By step: after a connection has broken, a later one may come before an earlier one.
  std::map<int64_t, Begun> begun_ ABSL_GUARDED_BY(mutex_);
  Status error_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool thread_ended_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t last_begun_ ABSL_GUARDED_BY(mutex_) = -1;  // that the thread has taken
  int64_t done_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t sends_ ABSL_GUARDED_BY(mutex_) = 0;
  Place place_ ABSL_GUARDED_BY(mutex_);
  std::optional<SlotName> waits_ ABSL_GUARDED_BY(mutex_);  // what the thread waits for now
  std::set<WorkerInfo> probing_ ABSL_GUARDED_BY(mutex_);   // workers that have not answered
  std::optional<Status> kept_ ABSL_GUARDED_BY(mutex_);     // how keep_and_wait() ended
};

}  // namespace weft::pipeline::internal

#endif  // WEFT_PIPELINE_INTERNAL_RUNNER_H_
