#ifndef WEFT_COLLECTIVES_INTERNAL_DDP_REDUCER_H_
#define WEFT_COLLECTIVES_INTERNAL_DDP_REDUCER_H_

// Reducer: averages gradients over the ranks of a group while a backward runs. It stands on
// GradAccessor alone: of a local backward the gradients are in `.grad`, in a DistAutogradContext
// they are the pass's.
//
// A Reduction begins when a backward comes through the outputs of a forward (sink.h), takes in the
// parameters as they get ready, reduces a bucket as soon as it is full, in the order of the
// buckets, and ends at the backward's end, where all ranks agree on what became of it in one small
// operation. One is in flight at a time; one of another backward waits for its turn, and its
// ready parameters are recorded until then.
//
// Invariants (cited by tests):
//   DDP-1  all ranks issue the same operations in the same order: each reduction is one operation
//          per bucket, and one to agree; what fails on one rank before its end takes part with
//          zeros.
//   DDP-2  a reduction succeeds on all ranks, with the same gradients, or fails on all with an
//          error that names ranks and parameters; some gradients of one that fails may be means.
//   DDP-3  gradients of two backwards are never in one bucket: a hook of another backward only
//          notes that its parameter is ready.
//   DDP-4  a reduction that fails leaves nothing behind: the next one of the same group works.
//   DDP-5  hooks are gone with their owner.
//
// Threads: all methods from anywhere. The mutex is held while a gradient is copied into its bucket,
// not during a wait.

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "weft/collectives/ddp/comm_hooks.h"
#include "weft/collectives/grad_accessor.h"
#include "weft/collectives/internal/ddp/join_session.h"
#include "weft/collectives/internal/ddp/model.h"
#include "weft/collectives/internal/ddp/reduction_watch.h"
#include "weft/collectives/internal/ddp/sink.h"
#include "weft/collectives/process_group.h"
#include "weft/collectives/work.h"
#include "weft/common/condition.h"
#include "weft/common/mutex.h"
#include "weft/common/time.h"
#include "weft/rpc/spi/device_order.h"

namespace weft::internal {

struct ReducerOptions {
  int64_t first_bucket_bytes = 0;
  int64_t bucket_bytes = 0;
  bool find_unused = false;
  bool static_graph = false;  // instead: the first reduction shows which parameters are used
  bool bucket_view = false;
  Timeout timeout{};     // of each operation, and of waiting for one's turn
  std::string module{};  // its name, for observers
};

// What a forward is that takes part.
struct ForwardTicket {
  int64_t number = 0;
  bool given = false;  // by the driver of the ranks; otherwise counted here
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Of parameters that are the same on all ranks.
  Reducer(std::vector<ModelTensor> parameters, const ProcessGroup& group,
          const ReducerOptions& options);
  // DDP-5.
  ~Reducer();

  // Puts the hooks on.
  void attach();
  // Throws, state: a parameter is not what it was when this was made.
  void check_parameters() const;
  // Once, before the first reduction. Throws, state, later.
  void set_hook(CommHook hook);
  // For a forward; 0: counted here.
  ForwardTicket next_ticket(int64_t number);
  void watch(const ForwardTicket& ticket, const std::vector<at::Tensor*>& outputs);
  // Belongs to this Join from now on; null: to none. Throws, state: a backward is under way.
  void set_join(std::shared_ptr<JoinSession> join, size_t part);
  // Takes part in a reduction of the others, with zeros. Throws what failed on all ranks.
  void shadow(const JoinActive& active);
  // No backward is under way.
  bool is_idle() const;
  // In place where gradients lie in buckets.
  void zero_grad(bool set_to_none);

  struct Sight {
    std::vector<std::vector<std::string>> buckets{};  // the names in each
    int64_t reductions = 0;                           // that have succeeded
    int64_t launched_early = 0;                       // buckets, before the last gradient was ready
    int64_t written_early = 0;                        // means, while the last bucket was reduced
    bool rebuilt = false;
    std::vector<int64_t> first_bytes{};   // of the buckets, before they were made again...
    std::vector<int64_t> bucket_bytes{};  // ...and now; 0: sparse
    std::vector<std::string> unused{};    // parameters that no rank used in the last reduction
    int64_t unused_bytes = 0;
    std::vector<int64_t> order{};  // in which parameters arrived, once that is known
    bool hooked = false;
  };
  Sight sight() const;
  ReductionWatch& watch_of() const { return *watch_; }

 private:
  struct Parameter {
    ModelTensor model{};
    at::TensorOptions options{};
    std::vector<int64_t> sizes{};
    std::vector<int64_t> strides{};
    size_t bucket = 0;
    at::Tensor view{};  // of its part of the bucket; undefined: sparse
  };
  struct Bucket {
    std::vector<size_t> parameters{};
    at::Tensor buffer{};  // undefined: sparse, which is reduced at the end
    size_t pending = 0;
    StreamsUsed streams{};  // on which its gradients were put in
    Work work{};
    std::optional<Future<at::Tensor>> hooked{};  // instead, with a hook

    bool is_under_way() const {
      return (work.valid() && !work.is_completed()) || (hooked.has_value() && !hooked->done());
    }
  };
  // One backward; see above.
  struct Reduction {
    GradAccessor::BackwardId id{};
    std::shared_ptr<GradAccessor> accessor{};  // until it ends
    ForwardTicket ticket{};
    std::vector<size_t> arrived{};  // in this order...
    size_t taken = 0;               // ...and so many of them are in their buckets
    std::vector<bool> ready{};
    std::vector<int64_t> fired{};  // how often each parameter has arrived
    bool asks_used = false;        // `agreed` says which parameters are used
    bool abandoned = false;
    bool shadow = false;                       // of the others: this rank has no batches left
    JoinSession::AnnouncementRef announced{};  // under a Join
    JoinActive active{};                       // the ranks that have batches
    Status failed{};
    std::vector<bool> written{};  // parameters whose gradient is the mean already; empty: none
    at::Tensor agreed{};          // what the ranks agree on
    Work agreeing{};
    // What its end does, for show_wait(), which may outlive it.
    enum class AtEnd { kNotYet, kWaitsForTurn, kReduces };
    std::shared_ptr<std::atomic<AtEnd>> at_end =
        std::make_shared<std::atomic<AtEnd>>(AtEnd::kNotYet);

    bool gives_zeros() const { return abandoned || shadow; }
  };
  using ReductionRef = std::shared_ptr<Reduction>;
  // Parameters that were ready before that: they are used outside of the forward alone.
  struct Early {
    GradAccessor::BackwardId id{};
    std::weak_ptr<GradAccessor> accessor{};  // so that its id stays its own
    std::vector<size_t> arrived{};
  };
  class End;

  // ---- reducer.cc ----
  // By `order_`. `keep`: gradients that lie in the old ones move along; otherwise they become zero.
  void build_buckets_locked(bool keep) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<int64_t> bucket_bytes_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- reducer_ready.cc: while a backward runs ----
  void on_begin(const ForwardTicket& ticket, const std::shared_ptr<GradAccessor>& accessor);
  void on_ready(size_t parameter, const std::shared_ptr<GradAccessor>& accessor);
  bool is_next_locked(const Reduction& reduction) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the next reduction active if it can begin.
  void activate_next_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The backward that a parameter is ready in; null: it has not come through an output.
  ReductionRef reduction_of_locked(const GradAccessor::BackwardId& id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void take_arrived_locked(Reduction* reduction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // One arrival of a parameter of a static graph. True: it was the last one.
  bool is_complete_locked(Reduction* reduction, size_t parameter) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void mark_ready_locked(Reduction* reduction, size_t parameter, bool zeros)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void copy_in_locked(Reduction* reduction, const Parameter& parameter, bool zeros)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void launch_locked(size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void launch_ready_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Says which buckets have been reduced since it was asked last.
  void note_reduced_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void forget_locked(const ReductionRef& reduction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- reducer_join.cc: under a Join ----
  class OwnGrads;
  ReductionRef make_reduction(const std::shared_ptr<GradAccessor>& accessor) const;
  void settle_join(Reduction* reduction);
  // The ranks that are not there count as zeros, or do not count.
  double share_of_absent(const Reduction& reduction) const;

  // ---- reducer_end.cc: at its end ----
  void finalize(const ReductionRef& reduction);
  // Of a backward that failed before its end. Does not throw.
  void abandon(const ReductionRef& reduction);
  void wait_turn(const ReductionRef& reduction);
  // All buckets and what the ranks are to agree on are under way when it returns.
  void complete_locked(Reduction* reduction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void give_up_locked(const ReductionRef& reduction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void wait_buckets(Reduction* reduction);
  // The means of a bucket, if the last one is still under way.
  void write_early(Reduction* reduction, size_t bucket);
  // Throws what any rank has to say. DDP-2.
  void agree(Reduction* reduction);
  std::vector<int64_t> agree_on_order(Reduction* reduction);
  void write_back(Reduction* reduction);
  void write_mean(const Reduction& reduction, const Parameter& parameter);
  void reduce_sparse(Reduction* reduction, Parameter* parameter);
  bool is_used(const Reduction& reduction, size_t parameter) const;
  Status missing_arrivals_locked(const Reduction& reduction) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After a reduction that has succeeded everywhere.
  void learn_graph_locked(const Reduction& reduction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration time_for(const Reduction& reduction) const;
  Status missing_locked(const Reduction& reduction) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ProcessGroup group_;
  const ReducerOptions options_;
  const int64_t world_;
  size_t gradient_bytes_ = 0;          // of all parameters
  std::vector<Parameter> parameters_;  // buckets and views: while nothing is reduced
  std::vector<LeafHook> hooks_;
  const std::shared_ptr<ReductionWatch> watch_;

  mutable Mutex mutex_;
  Condition changed_;
  CommHook hook_ ABSL_GUARDED_BY(mutex_);
  std::vector<Bucket> buckets_ ABSL_GUARDED_BY(mutex_);
  size_t next_bucket_ ABSL_GUARDED_BY(mutex_) = 0;
  ReductionRef active_ ABSL_GUARDED_BY(mutex_);
  std::deque<ReductionRef> waiting_ ABSL_GUARDED_BY(mutex_);  // `active_` among them
  // The last few backwards that have not come through an output yet, or do not.
  std::deque<Early> early_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> used_ ABSL_GUARDED_BY(mutex_);  // since the last reduction, also without one
  int64_t forwards_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;     // of those that are given
  std::vector<int64_t> order_ ABSL_GUARDED_BY(mutex_);  // empty: the module's, backwards
  bool rebuilt_ ABSL_GUARDED_BY(mutex_) = false;
  // In a static graph, since its first reduction: which parameters some rank uses...
  std::vector<bool> static_used_{};  // while nothing is reduced
  // ...and how often each arrives in a backward of this rank.
  std::vector<int64_t> arrivals_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<JoinSession> join_ ABSL_GUARDED_BY(mutex_);
  size_t join_part_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t reductions_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t launched_early_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t written_early_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t early_before_ ABSL_GUARDED_BY(mutex_) = 0;  // `launched_early_` at the last beginning
  std::vector<int64_t> first_bytes_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> unused_ ABSL_GUARDED_BY(mutex_);  // by all ranks, in the last reduction
};

}  // namespace weft::internal

#endif  // WEFT_COLLECTIVES_INTERNAL_DDP_REDUCER_H_
