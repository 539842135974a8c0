#ifndef WEFT_DIST_AUTOGRAD_INTERNAL_SERVICE_H_
#define WEFT_DIST_AUTOGRAD_INTERNAL_SERVICE_H_

// DistAutogradService: one worker's contexts. As an interceptor it lets contexts ride on calls and
// records what crosses; as a service it carries the messages of passes and of releases.
//
//   CTX-3  a call's outcome does not depend on whether its context was released meanwhile: then
//          its tensors arrive detached, and nothing is recorded.
//   CTX-4  a release ends when every living worker that knew the context has forgotten it.
//   CTX-5  a context whose release is not waited for is forgotten by every living worker, too, even
//          if workers die on the way.

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "weft/common/api.h"
#include "weft/common/future.h"
#include "weft/common/gone_workers.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/dist_autograd/context.h"
#include "weft/dist_autograd/internal/context_state.h"
#include "weft/dist_autograd/internal/peer_names.h"
#include "weft/dist_autograd/internal/released.h"
#include "weft/dist_autograd/internal/wire.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/spi/interceptor.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"

namespace weft::internal {

using ContextRef = std::shared_ptr<ContextState>;

// After the pass's deadline a participant that has heard nothing ends its part, and no message of
// the pass is waited for any more.
inline constexpr absl::Duration kPassMargin = absl::Seconds(1);

Status shut_down_error();

// Messages that are bytes, and their answers.
inline constexpr std::string_view kAdvanceMethod = "@dist_autograd.advance";
inline constexpr std::string_view kAdvanceSignature = "(bytes,list[optional[tensor]])->bytes";
// What kAdvanceMethod carries.
WEFT_API StatusOr<Payload> pack_advance(AdvanceData data);
WEFT_API StatusOr<AdvanceData> unpack_advance(Payload arguments);
inline constexpr std::string_view kBytesSignature = "(bytes)->bytes";
inline constexpr std::string_view kReleaseMethod = "@dist_autograd.release";
inline constexpr std::string_view kNormMethod = "@dist_autograd.norm";
inline constexpr std::string_view kScaleMethod = "@dist_autograd.scale";
Payload bytes_payload(const std::string& bytes);
StatusOr<std::string> take_bytes(Payload arguments);
OnTold replying(ReplyFn reply);

class WEFT_API DistAutogradService final
    : public Service,
      public Interceptor,
      public PassLinks,
      public std::enable_shared_from_this<DistAutogradService> {
 public:
  DistAutogradService(ServiceContext context, const DistAutogradServiceOptions& options);

  const Worker& worker() const { return *context_.worker; }

  // ---- for DistAutogradContext ----
  StatusOr<ContextRef> make_context();
  // The thread's scope with the context in it.
  ScopeRef scope_of(const ContextRef& context);
  // The context of this thread, or null.
  ContextRef current() const;
  ContextRef find(const AutogradContextId& id) const;
  bool was_released(const AutogradContextId& id) const;
  // `effect`: see leaf_effect.h; none when it is empty.
  Status backward(const ContextRef& context, torch::autograd::edge_list roots,
                  std::vector<at::Tensor> gradients, const BackwardOptions& options,
                  std::string effect = "", LeafOutcomes* outcomes = nullptr);
  void set_leaf_effects(MakeLeafEffect make);
  Future<void> release(const ContextRef& context);
  // Does not wait for the release, which may ride on the next call to each worker.
  void release_later(const ContextRef& context);
  // The norm over all workers, and over the contexts of all `trainers` unless null; if it is above
  // `most`, scales so that it is not.
  StatusOr<double> clip(const ContextRef& context, double most, double norm_type,
                        bool refuse_nonfinite, absl::Duration deadline, const ClipRanks* trainers);

  // ---- Service ----
  std::vector<Method> methods() override;
  std::shared_ptr<Interceptor> interceptor() override { return shared_from_this(); }
  void on_worker_gone(const WorkerInfo& worker, const Status& why) override;
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;
  void put_inspection(Inspection* out) const override;
  Load load() const override;

  // ---- Interceptor ----
  std::string_view key() const override { return "@dist_autograd"; }
  bool concerns(const UntypedCall& call) const override;
  StatusOr<AttachmentPtr> attach(const WorkerInfo& to, const UntypedCall& call) override;
  void arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) override;
  StatusOr<AttachmentPtr> attach_answer(IncomingRequest& request, const Payload& result) override;
  void arrive_answer(const WorkerInfo& from, Payload& result, std::string_view metadata,
                     Proceed proceed) override;

  // ---- PassLinks ----
  void advance(const WorkerKey& to, const PassId& pass, absl::Time deadline, Advance advance,
               OnAdvanced done) override;
  void close(const WorkerKey& to, const PassId& pass, absl::Time deadline, OnTold done) override;
  void done(const WorkerKey& to, const PassId& pass, absl::Time deadline,
            const std::string& outcome, OnTold done) override;
  void abort(const WorkerKey& to, const PassId& pass, const Status& why, OnTold done) override;
  void progress(const WorkerKey& to, const PassId& pass, absl::Time deadline, PassProgress progress,
                OnTold done) override;
  StatusOr<std::unique_ptr<LeafEffect>> make_effect(std::string_view data) override;
  std::string name_of(const WorkerKey& worker) const override;
  PassTrace* trace() const override;
  Runtime& runtime() const override { return *context_.runtime; }
  const std::shared_ptr<Executor>& executor() const override { return context_.executor; }
  const std::shared_ptr<WaitDriver>& driver() const override { return context_.driver; }

 private:
  class SendAttachment;
  struct Riders;
  struct Release {
    ReleaseData data;
    int64_t pending = 0;  // workers that have not answered
    std::set<WorkerKey> told{};
    OnTold done;
  };
  using ReleaseRef = std::shared_ptr<Release>;

  WorkerKey self() const { return key_of(worker().info()); }
  // The next message of a context is due when another worker has computed.
  void expect_more() const {
    if (context_.driver != nullptr) context_.driver->expect_computation();
  }
  const void* scope_key() const;

  // ---- service.cc: contexts and what rides on calls ----
  // Null: it has been released. `with`: whom the message is from.
  ContextRef find_or_make(const AutogradContextId& id, const WorkerInfo& with);
  // What a thread that records is in, as its scope's slot has it.
  struct Ambient {
    ContextRef context;
    CallOrder served{};  // the call whose handler it runs
  };
  using AmbientRef = std::shared_ptr<const Ambient>;
  AmbientRef ambient() const;
  // Null: nothing rides on the message.
  AttachmentPtr record(const Ambient& where, const WorkerInfo& to, const Payload& payload,
                       bool grad_mode, bool is_request);

  // ---- service_release.cc ----
  // Nothing: it has been released already.
  std::optional<ReleaseData> begin_release(const ContextRef& context);
  // `rides`: on the next calls, if there are any soon.
  void release_here(const ReleaseData& data, bool rides, OnTold done);
  // As ReleaseData::others says.
  void release_others(const ReleaseData& data);
  // One on whose calls releases rode is gone.
  void tell_what_is_left();
  std::vector<ReleaseRef> take_riding(const WorkerKey& to);
  void flush_riding(absl::Time now);
  void tell_released(const ReleaseRef& release, const WorkerKey& to);
  void tell_everybody_released(const ReleaseRef& release);
  void one_released(const ReleaseRef& release);
  void on_release(CallContext& call, Payload arguments, ReplyFn reply);

  // ---- service_out.cc: gradients wait for their turn and for room ----
  // One gradient, or several, that travel without names.
  struct Outgoing {
    PassId pass;
    absl::Time deadline;
    Advance advance;
    OnAdvanced done;
    uint64_t bytes = 0;
  };
  struct OutQueue {
    std::deque<Outgoing> waiting{};
    int64_t calls = 0;  // that are under way, with so many...
    uint64_t bytes = 0;
    bool serving = false;  // by one thread at a time
  };
  void queue_out(const WorkerKey& to, Outgoing one);
  void serve_out(const WorkerKey& to);
  // Those of a pass that has failed.
  void drop_out(const PassId& pass);
  void send_advance(const WorkerKey& to, const PassId& pass, absl::Time deadline, Advance advance,
                    OnAdvanced done);

  // ---- service_passes.cc ----
  using OnBytes = absl::AnyInvocable<void(StatusOr<std::string>)>;
  void send(const WorkerKey& to, std::string_view method, std::string_view signature,
            Payload arguments, absl::Duration time, OnBytes done);
  void notice(std::string_view method, const WorkerKey& to, NoticeData data, absl::Duration time,
              OnTold done);
  StatusOr<std::shared_ptr<BackwardPass>> find_pass(const PassId& id, absl::Time deadline,
                                                    bool make);
  void on_advance(CallContext& call, Payload arguments, ReplyFn reply);
  void take_advance(const WorkerKey& from, AdvanceData data, ReplyFn reply);
  void count(std::string_view kind, int64_t n = 1);
  using OnNotice = void (*)(BackwardPass& pass, const WorkerKey& from, const NoticeData& data,
                            OnTold reply);
  void on_notice(CallContext& call, Payload arguments, ReplyFn reply, OnNotice handle);
  // ---- service_clip.cc ----
  struct Clip;
  StatusOr<double> sum_at_others(Clip* clip);
  Future<std::string> ask_for_clip(const Clip& clip, const WorkerKey& to, std::string_view method,
                                   const std::string& bytes);
  Status clip_failed(const Clip& clip, const WorkerKey& at, const Status& why,
                     std::string_view what) const;
  void on_norm(CallContext& call, Payload arguments, ReplyFn reply);
  void on_scale(CallContext& call, Payload arguments, ReplyFn reply);
  // ---- service_watch.cc ----
  void watch(absl::Time deadline);
  void watch_locked(absl::Time when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A pass has begun here that is to be looked at then.
  void watch_pass(absl::Time due);
  void look_at_passes(absl::Time now);
  void tick();
  std::vector<ContextRef> contexts() const;

  const ServiceContext context_;
  const absl::Duration report_stall_after_;
  mutable std::atomic<const void*> scope_key_{nullptr};
  // Looked up once, when the worker has joined; null: no trace was requested.
  mutable std::atomic<bool> trace_known_{false};
  mutable std::unique_ptr<PassTrace> trace_;
  std::atomic<uint64_t> last_message_{0};

  mutable Mutex mutex_;
  std::unique_ptr<Timer> timer_ ABSL_GUARDED_BY(mutex_);
  Status closed_ ABSL_GUARDED_BY(mutex_);
  MakeLeafEffect make_effect_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_context_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<AutogradContextId, ContextRef> contexts_ ABSL_GUARDED_BY(mutex_);
  std::map<WorkerKey, Released> released_ ABSL_GUARDED_BY(mutex_);
  GoneWorkers gone_ ABSL_GUARDED_BY(mutex_);
  PeerNames names_ ABSL_GUARDED_BY(mutex_);
  int64_t releases_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::pair<ReleaseRef, WorkerKey>> again_ ABSL_GUARDED_BY(mutex_);
  std::map<WorkerKey, std::vector<ReleaseRef>> riding_ ABSL_GUARDED_BY(mutex_);
  std::set<WorkerKey> ridden_ ABSL_GUARDED_BY(mutex_);  // on whose requests some have left
  absl::Time flush_riding_at_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  absl::Time armed_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  absl::Time next_look_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // for stalls
  int64_t stall_reports_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<WorkerKey, OutQueue> out_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string_view, int64_t> sent_ ABSL_GUARDED_BY(mutex_);  // by what was said
};

}  // namespace weft::internal

#endif  // WEFT_DIST_AUTOGRAD_INTERNAL_SERVICE_H_
