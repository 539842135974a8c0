#ifndef WEFT_RREF_INTERNAL_SERVICE_H_
#define WEFT_RREF_INTERNAL_SERVICE_H_

// RRefService: one worker's remote references. It owns an RRefProtocol and the values, and performs
// the protocol's effects: sends control items, starts handlers whose RRefs are confirmed, answers
// uses of values that are there. As an interceptor it lets creations, uses and carriers ride on
// calls.
//
//   SRV-1  a carrier is handed to the protocol at most once, however often its message comes.
//   SRV-2  of what waits here (arrivals, uses, fetches) each ends exactly once: when it is ready,
//          fails, its call is given up, or the worker shuts down.
//   SRV-3  no lock is held while anything is sent, continued, or destroyed.
//   SRV-4  to one peer, items that no thread waits for go at most once in 1 ms, but for many.
//
// One mutex guards all. Control items go in batches, one batch to a peer at a time: what comes up
// meanwhile goes with the next. A batch that fails is sent again, after 20 ms to 1 s, until it is
// answered or the peer's incarnation is gone.

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/rpc/spi/interceptor.h"
#include "weft/rpc/spi/service.h"
#include "weft/rpc/worker.h"
#include "weft/rref/internal/handle.h"
#include "weft/rref/internal/protocol.h"
#include "weft/rref/internal/wire.h"
#include "weft/rref/service.h"

namespace weft::internal {

inline constexpr std::string_view kRRefKey = "@rref";
inline constexpr std::string_view kControlMethod = "@rref.control";
inline constexpr std::string_view kControlSignature = "(bytes)->bytes";
inline constexpr std::string_view kFetchMethod = "@rref.fetch";
inline constexpr std::string_view kFetchSignature = "()->value";
inline constexpr std::string_view kCreationMethod = "@rref.creation";
inline constexpr std::string_view kCreationSignature = "()->none";

// An object of this worker.
struct RRefValue {
  KeptObject kept;
  std::shared_ptr<ObjectTurns> turns;  // null: its class locks for itself
  std::string class_name;              // "" when its class is not registered: no method fits
};
using RRefValueRef = std::shared_ptr<const RRefValue>;

// What a call is told besides its arguments. It holds the handles until the call has ended.
struct RRefRider : CallRider {
  RRefHandleRef created{};  // by this call
  std::optional<Creation> creation{};
  RRefHandleRef target{};    // used by this call
  std::optional<Use> use{};  // what that says
  std::string use_bytes{};   // the same, encoded; empty where it has to be
  std::string signature{};   // of a constructor: UntypedCall only refers to it
};

class RRefService final : public Service,
                          public Interceptor,
                          public std::enable_shared_from_this<RRefService> {
 public:
  RRefService(ServiceContext context, RRefOptions options);
  ~RRefService() override;

  const Worker& worker() const { return *context_.worker; }
  const ServiceContext& context() const { return context_; }

  // ---- for RRef<T> ----
  // `rider` has what is used, if anything. Never fails late: what goes wrong with the call is the
  // handle's failure.
  StatusOr<RRefHandleRef> remote(const Destination& to, UntypedCall call,
                                 std::shared_ptr<RRefRider> rider, CreationSite site);
  StatusOr<RRefHandleRef> make_local(KeptObject value, CreationSite site);
  // A call over the handle, to its owner.
  CallHandle start_use(const RRefHandleRef& handle, const Destination& owner, UntypedCall&& call,
                       CallDone done);
  // The object, of an RRef whose owner is this worker; `done` once, now or later.
  using LocalDone = absl::AnyInvocable<void(StatusOr<KeptObject>)>;
  CallHandle start_local_use(const RRefHandleRef& handle, const std::type_info& type,
                             Timeout deadline, LocalDone done);
  Status check(const RRefHandle& handle);
  bool confirmed(const RRefHandle& handle);
  void drop(const RRefHandle& handle);

  RRefProtocol::Counts counts() const;
  std::vector<LiveRRef> live() const;

  // ---- Service ----
  std::vector<Method> methods() override;
  std::shared_ptr<Interceptor> interceptor() override { return shared_from_this(); }
  void on_reconnected(const WorkerInfo& worker) override;
  void on_worker_gone(const WorkerInfo& worker, const Status& why) override;
  void on_shutdown(const Status& why) override;
  void put_debug_info(std::map<std::string, int64_t>* out) const override;
  void put_inspection(Inspection* out) const override;
  Load load() const override;
  void sweep() override;
  Status drained() override;

  // ---- Interceptor ----
  std::string_view key() const override { return kRRefKey; }
  bool concerns(const UntypedCall& call) const override;
  StatusOr<AttachmentPtr> attach(const WorkerInfo& to, const UntypedCall& call) override;
  void arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) override;
  StatusOr<AttachmentPtr> attach_answer(IncomingRequest& request, const Payload& result) override;
  void arrive_answer(const WorkerInfo& from, Payload& result, std::string_view metadata,
                     Proceed proceed) override;

 private:
  class RequestAttachment;
  class UseAttachment;
  class AnswerAttachment;
  class OnItsWay;
  struct LocalUse;
  struct Request;  // one with metadata, until its handler starts (service_arrivals.cc)
  using ArrivalKey = std::pair<WorkerKey, uint64_t>;
  using OnArrival = absl::AnyInvocable<void(Status)>;
  using OnUse = absl::AnyInvocable<void(Status)>;

  struct ParkedUse {
    RRefId rref;
    bool local = false;  // local_value(), not a request
    OnUse done;
  };

  struct SentAnswer {
    absl::Time since;    // made, or the transport has let go of it
    int on_its_way = 0;  // so often
    bool ended = false;  // it is not sent again
  };
  // Control items for one peer.
  struct Outbox {
    std::deque<Message> queue;
    std::vector<Message> in_flight;
    bool posted = false;  // a task will send
    absl::Duration backoff = absl::ZeroDuration();
    absl::Time not_before = absl::InfinitePast();
    bool urgent = false;                                // a thread waits for an item of the queue
    absl::Time paced_until = absl::InfinitePast();      // the next of the items that none waits for
    absl::Time unknown_since = absl::InfiniteFuture();  // no member of this id
    // Carriers in answers that are on their way or may be sent again: asking about them would void
    // them.
    std::map<uint64_t, SentAnswer> answers;
    bool ask_again = false;      // a connection was lost while there were such answers
    uint64_t answers_below = 0;  // carriers below were there at the last look for old answers

    // When the queue may leave.
    absl::Time due() const;
  };
  // Something to be said when it has lasted for long: that a creation is known, or RRefs accepted.
  struct Flush {
    absl::Time due;
    RRefId known;  // zero: an accept
    WorkerKey from;
    uint64_t carrier = 0;
  };

  // ---- service.cc ----
  RRefProtocol& protocol() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status closed_error() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Under the mutex `change(protocol, effects)`, then without it what follows. Nothing happens
  // after the shutdown.
  template <class Change>
  void with(Change change);
  void request_ended(const WorkerKey& from, uint64_t carrier);
  RRefValueRef find_value_locked(const RRefId& rref) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for a use by another worker. Errors: kind peer_lost, the service has ended; kind
  // state, the object is gone.
  StatusOr<RRefValueRef> value_for_use(const RRefId& rref) const;
  // What others are told then: as their call would have been a moment later.
  Status leaving_error() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  struct Todo;  // what effects ask for, to be done without the mutex
  void sort_out_locked(Effects effects, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void perform(Todo todo);
  std::shared_ptr<RRefHandle> make_handle(const Handle& handle, bool is_creator, CreationSite site);
  WorkerInfo info_of(const WorkerKey& key) const { return weft::info_of(worker(), key); }
  std::string name_of(const WorkerKey& key) const;
  RRefValueRef make_value(KeptObject kept) const;
  void destroy_later(std::vector<RRefValueRef> values);

  // ---- service_report.cc ----
  std::vector<LiveRRef> live_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- service_local.cc ----
  void end_local_use(const std::shared_ptr<LocalUse>& use, StatusOr<KeptObject> result);
  void cancel_local_use(const std::shared_ptr<LocalUse>& use, const Status& why);

  // ---- service_requests.cc ----
  // Returns what a call over the handle carries: the handle and the use; an error when the handle
  // cannot be used.
  StatusOr<std::shared_ptr<RRefRider>> rider_for(const RRefHandleRef& handle)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The error names the first that cannot be sent.
  StatusOr<Carrier> share(const WorkerInfo& to, const Payload& payload, bool is_answer);
  // The answers to `peer` with lower numbers than the result may be asked about now.
  uint64_t answers_to_ask_locked(const WorkerKey& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void local_creation_ended(const RRefId& rref, const Status& why);

  // ---- service_arrivals.cc ----
  // `done` once: with OK the handles are in `payload`.
  void receive(const WorkerKey& from, Carrier carrier, Payload* payload, OnArrival done);
  void begin(const std::shared_ptr<Request>& request);
  void use_target(const std::shared_ptr<Request>& request);
  // The target of a request whose object is there and may be used.
  std::optional<Status> use_now(IncomingRequest& request, const WorkerKey& from, const Use& use);
  void end(const std::shared_ptr<Request>& request, Status status);
  void give_up(const std::shared_ptr<Request>& request);
  void answer_ended(const WorkerKey& to, uint64_t carrier, Delivery delivery);
  void answer_leaves(const WorkerKey& to, uint64_t carrier);
  void answer_left(const WorkerKey& to, uint64_t carrier);
  // Nothing of it is on its way, and it is not sent again.
  void forget_answer_locked(RRefProtocol& p, const WorkerKey& to, uint64_t carrier, Effects& out)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void function_ended(const RRefId& rref, StatusOr<KeptObject> result);

  // ---- service_control.cc ----
  void enqueue_locked(const WorkerKey& to, Message message, Todo* todo)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void send_batch(const WorkerKey& to);
  void batch_ended(const WorkerKey& to, StatusOr<Payload> result);
  void on_control(CallContext& context, Payload arguments, ReplyFn reply);
  void lose(const WorkerKey& worker, std::string_view why);
  void arm_locked(absl::Time when, Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void arm_for_waiting_locked(Todo* todo) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool unknown_for_long(const WorkerKey& to);
  void tick();
  void on_fetch(const std::shared_ptr<void>& object, ReplyFn reply);

  const ServiceContext context_;
  const RRefOptions options_;
  std::unique_ptr<Timer> timer_;

  mutable Mutex mutex_;
  std::optional<RRefProtocol> protocol_ ABSL_GUARDED_BY(mutex_);  // since the id is known
  Status closed_ ABSL_GUARDED_BY(mutex_);                         // not OK: shut down
  absl::flat_hash_map<RRefId, RRefValueRef> values_ ABSL_GUARDED_BY(mutex_);
  // Creations by this worker for itself whose call has not arrived.
  std::set<RRefId> local_creations_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<ForkId, std::weak_ptr<const RRefHandle>> handles_ ABSL_GUARDED_BY(mutex_);
  std::map<ArrivalKey, OnArrival> arrivals_ ABSL_GUARDED_BY(mutex_);
  // SRV-1: requests with RRefs that have not ended.
  std::set<ArrivalKey> carriers_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, ParkedUse> uses_ ABSL_GUARDED_BY(mutex_);  // by token
  uint64_t last_token_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<WorkerKey, Outbox> outboxes_ ABSL_GUARDED_BY(mutex_);
  std::deque<Flush> flushes_ ABSL_GUARDED_BY(mutex_);  // in order of time
  absl::Time next_audit_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  absl::Time armed_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  int64_t batches_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t items_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t resent_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t looks_ ABSL_GUARDED_BY(mutex_) = 0;  // for what is due by time
  int sweeps_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<LiveRRef> leaks_ ABSL_GUARDED_BY(mutex_);  // what the second sweep() found
};

// What effects ask for, in order: continuations and the like.
struct RRefService::Todo {
  std::vector<absl::AnyInvocable<void()>> run;
  std::vector<RRefValueRef> released;
  std::vector<WorkerKey> send_now;
  std::vector<WorkerKey> send_soon;
  std::optional<absl::Time> arm;

  bool empty() const {
    return run.empty() && released.empty() && send_now.empty() && send_soon.empty() &&
           !arm.has_value();
  }
};

template <class Change>
void RRefService::with(Change change) {
  Todo todo;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    Effects effects;
    change(protocol(), effects);
    sort_out_locked(std::move(effects), &todo);
  }
  perform(std::move(todo));
}

}  // namespace weft::internal

#endif  // WEFT_RREF_INTERNAL_SERVICE_H_
