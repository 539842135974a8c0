#ifndef WEFT_RPC_INTERNAL_AGENT_AGENT_H_
#define WEFT_RPC_INTERNAL_AGENT_AGENT_H_

// Agent: the calls of one worker, in both directions, and the connections they travel on.
//
// Caller's side: every call is in pending_ from its issue to its completion (CALL-1). It waits for
// room and a connection, is being sent, or is sent; a broken connection moves it back, or completes
// it (CALL-4): call_state.h has the table.
//
// Callee's side: a request runs on the poller when its method is inline_ok, otherwise on the pool,
// in the turn of its object if it has one; it is in serving_ until it has replied.
//
// Peers are known by incarnation. Either side dials when it first needs the other; if both did, the
// connection dialled by the lower (id, incarnation) stays and the other ends when its calls have.
//
// One mutex guards the tables. It is held for a few lines and never while sending, running a
// handler or completing a call.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "weft/common/byte_budget.h"
#include "weft/common/condition.h"
#include "weft/common/log.h"
#include "weft/common/metrics.h"
#include "weft/common/mutex.h"
#include "weft/common/runtime.h"
#include "weft/common/worker_key.h"
#include "weft/rpc/inspection.h"
#include "weft/rpc/internal/agent/access.h"
#include "weft/rpc/internal/agent/attachments.h"
#include "weft/rpc/internal/agent/call_state.h"
#include "weft/rpc/internal/agent/call_trace.h"
#include "weft/rpc/internal/agent/dedup.h"
#include "weft/rpc/internal/agent/link.h"
#include "weft/rpc/internal/agent/message.h"
#include "weft/rpc/internal/agent/object_turns.h"
#include "weft/rpc/internal/device/device_backend.h"
#include "weft/rpc/internal/device/device_copier.h"
#include "weft/rpc/internal/membership/members.h"
#include "weft/rpc/library.h"
#include "weft/rpc/spi/untyped_call.h"
#include "weft/transport/transport.h"

namespace weft::internal {

// Method that a worker calls at its peers when it is about to leave.
inline constexpr std::string_view kLeavingMethod = "@worker.leaving";

struct AgentOptions {
  WorkerInfo self;
  std::string job_id;
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Executor> pool;
  std::shared_ptr<const Worker> handle;  // what handlers see as their worker; owns nothing
  std::shared_ptr<const Library> library;
  std::vector<Method> services;  // names begin with '@'
  Interceptors interceptors;
  // A peer has a connection again. May be null.
  std::function<void(const WorkerInfo&)> on_reconnected;
  Access access;  // who may call which of the two
  // What an observer is told (agent_inspect.cc). May be null: nothing.
  std::function<void(Inspection* out, bool counters)> inspect;
  Config config{};  // budgets, limits and times
  // Both or none.
  std::shared_ptr<DeviceBackend> device_backend;
  std::shared_ptr<const MemberDevices> devices;
  Logger log;
  std::shared_ptr<Metrics> metrics;
  std::shared_ptr<CallTrace> trace;  // null: none
};

class Agent : public Acceptor, public std::enable_shared_from_this<Agent> {
 public:
  explicit Agent(AgentOptions options);
  ~Agent() override;

  // Begins to use `transport`, which calls into the agent and goes before it: release_transport().
  void start(std::shared_ptr<Transport> transport);
  // A tick or a dial that runs on a timer keeps the transport until it returns. After close().
  void release_transport();
  void set_members(MemberListRef members);
  // The group is there: serves what has come before. Until then requests of those who saw it first
  // wait, since their handlers may call any member.
  void open();
  MemberListRef members() const;
  void set_store_healthy(bool healthy) ABSL_LOCKS_EXCLUDED(mutex_);

  CallHandle start_call(const Destination& to, UntypedCall call, CallDone done);
  std::vector<CallHandle> start_calls(const std::vector<Destination>& to, UntypedCall call,
                                      std::function<void(size_t, StatusOr<Payload>)> done);

  // The incarnation is dead or has left: every call to it completes, nothing is sent to it any
  // more.
  void peer_gone(uint64_t incarnation, const Status& why);

  // Refuses new requests of others and new calls of ours; what runs goes on.
  void stop_accepting();
  // This worker is about to leave: as stop_accepting(), with kind state, but what a call under way
  // needs goes on: calls that its handlers make, and those that come back to us for it. Services'
  // messages pass. Every peer with a connection is asked to call us no more, and its answer, which
  // wait_drained() waits for, comes when it has the answers to all that it had called.
  void begin_leaving(absl::Time deadline);
  // Waits until no handler runs. False when `deadline` came first.
  bool wait_idle(absl::Time deadline);
  // Waits until our calls and the handlers here have all ended.
  bool wait_drained(absl::Time deadline);
  // Completes every call of ours with `why`.
  void fail_calls(const Status& why);
  // What the handlers that still run were called for: "'app.f' for 'trainer0'".
  std::string running_handlers() const;
  // Tells every peer that we leave.
  void say_goodbye();
  // Completes every call with `why` and closes every connection. Idempotent.
  void close(const Status& why);

  struct Load {
    uint64_t pending = 0;  // our calls
    uint64_t serving = 0;  // handlers
    uint64_t issued = 0;   // ever
    uint64_t served = 0;
  };
  Load load() const;
  Metrics* metrics() const { return options_.metrics.get(); }
  const std::shared_ptr<CallTrace>& trace() const { return options_.trace; }
  std::map<std::string, int64_t> debug_info() const;
  // Statistics of the peers that are connected, or that calls wait for. In order of id.
  std::vector<PeerStats> peer_stats() const;
  // As "peer/NAME/...": those that are not zero.
  void put_peer_numbers(std::map<std::string, int64_t>* out) const;

  // Saturated: what does not fit 64 bits of nanoseconds is infinite.
  absl::Duration rpc_timeout() const {
    const int64_t ns = rpc_timeout_ns_.load();
    return ns == INT64_MAX ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
  }
  void set_rpc_timeout(absl::Duration d) { rpc_timeout_ns_.store(absl::ToInt64Nanoseconds(d)); }
  const AgentOptions& options() const { return options_; }
  DeviceCopier& copier() { return copier_; }
  const void* scope_key() const { return this; }

  // Calls that run here, calls that we wait for, and peers.
  void put_inspection(Inspection* out) const;

  // Acceptor.
  StatusOr<Hello> check_hello(const Hello& theirs) override;
  std::shared_ptr<ConnectionHandler> on_connection(std::shared_ptr<Connection> connection) override;

  // From Link, on a transport's thread.
  // `arrived`: its first frame.
  void on_request(const std::shared_ptr<Link>& link, std::shared_ptr<const v1::CallHeader> header,
                  StatusOr<Payload> payload, absl::Time arrived);
  // `from`: the incarnation whose connection brought it; an answer to a call of another worker is dropped, since ids
  // of calls can be guessed. `delivery`: what it says of the request. `metadata` may be null.
  void on_answer(uint64_t from, uint64_t call_id, StatusOr<Payload> result, Delivery delivery,
                 std::shared_ptr<Metadata> metadata);
  void on_cancel_frame(const std::shared_ptr<Link>& link, const v1::CancelHeader& header);
  void on_goodbye(const std::shared_ptr<Link>& link, const v1::GoodbyeHeader& header);
  void on_heartbeat(const std::shared_ptr<Link>& link, const v1::HeartbeatHeader& header);
  // Drops what is incomplete on the link and belongs to calls that are over.
  void give_up_arriving(Link* link);
  void on_link_lost(const std::shared_ptr<Link>& link, Lost lost);
  // Handles a request of an observer: answered on this thread, and counted as no call.
  void on_observer_request(const std::shared_ptr<Link>& link, const v1::CallHeader& header,
                           StatusOr<Payload> payload);

  absl::Time now() const { return options_.runtime->now(); }
  const WorkerInfo& self() const { return options_.self; }
  Runtime* runtime() const { return options_.runtime.get(); }

 private:
  // What is sent of a call, shared by the calls of one start_calls().
  struct CallSpec {
    UntypedCall call;  // without its arguments
    uint64_t hash = 0;
    bool grad_mode = false;
    TraceContext trace;  // its span is that of the caller's handler or thread
    std::vector<uint64_t> holding;
    absl::InlinedVector<uint64_t, 4> chain;
    OutMessageRef message;
    std::shared_ptr<const DeviceRoute> route;  // null: this worker has no device maps
    std::shared_ptr<const Unstaged> unstaged;  // null: all is on the host
    AttachmentsRef attachments;                // null: none
  };

  // What the deadline queue points at: one of our calls, or a handler.
  struct DeadlineKey {
    bool serving = false;
    uint64_t incarnation = 0;
    uint64_t call_id = 0;
    bool again = false;  // one of our calls, which its receiver had no room for
  };
  using Deadlines = std::multimap<absl::Time, DeadlineKey>;

  struct Pending {
    std::shared_ptr<const CallSpec> spec;
    WorkerInfo to;
    CallDone done;
    absl::Time issued;
    absl::Time deadline;
    Deadlines::iterator in_deadlines;
    bool has_deadline = false;
    CallState state = CallState::kWaiting;
    // The call's part of the peer's send budget. For a large message it is shared with the frames
    // under way.
    SendCharge small_charge;
    std::shared_ptr<SendCharge> large_charge;
    Status refused;    // for lack of room at its receiver, the last time...
    int refusals = 0;  // ...of so many
    std::optional<Deadlines::iterator> asked_again{};  // when the pause after the last one is over
    uint32_t attempt = 0;
    bool maybe_taken = false;  // though it is here again, for an answer that found no room
    std::shared_ptr<Link> link;
    bool answered = false;                     // and interceptors look at the answer
    CancelToken parent = CancelToken::none();  // of the call in whose handler this one was issued
    uint64_t parent_hook = 0;
    bool notice = false;  // asks a peer to let its calls end

    bool at_most_once() const { return spec->call.options.retry == Retry::kAtMostOnce; }
    CallAction on(CallEvent event) {
      const CallStep step = call_step(state, event, at_most_once());
      state = step.to;
      if (step.action == CallAction::kSendNext) ++attempt;
      return step.action;
    }
  };

  void publish_stats(const std::vector<std::shared_ptr<Link>>& links, const Transport& transport);

  struct Peer {
    WorkerInfo info;
    std::string address;
    std::vector<std::shared_ptr<Link>> links;  // open, in order of opening
    std::shared_ptr<Link> active;
    std::set<uint64_t> waiting;  // calls that need a connection
    bool dialling = false;
    bool dial_counts = false;  // among those of DIAL-2...
    absl::Time dialled_at = absl::InfinitePast();
    bool dial_queued = false;  // ...or waits for one of them to end
    Status gone;               // not OK: dead or left
    // DIAL-1: an attempt that failed, and a connection that ended or refused before anything came
    // through it, are followed by a pause, doubled each time; it ends when something has come.
    absl::Duration backoff = absl::ZeroDuration();
    absl::Time dial_at = absl::InfinitePast();  // not before
    absl::Time unreachable_since = absl::InfiniteFuture();
    Status last_dial_error;
    std::unique_ptr<Timer> redial;
    int64_t connections = 0;
    bool broken = false;  // a connection was lost, and on_reconnected has not been told
    std::unique_ptr<CallWindow> window;
    // Our calls to it that are at most once and not complete; whether it was told of those that
    // are (KEEP-1), and whether there ever was one.
    std::set<uint64_t> once;
    bool owes_ack = false;
    bool any_once = false;
    // Calls whose cancellation came before their last chunk, and those that had been answered: the
    // latest of them.
    std::set<uint64_t> cancelled;
    bool leaving = false;                // it takes no new calls
    std::vector<ReplyFn> when_ended;     // and is to be told when ours have ended
    std::shared_ptr<ByteBudget> budget;  // of what we receive
    std::shared_ptr<SendRoom> send_room;
  };
  using PeerRef = std::shared_ptr<Peer>;

  struct Job;  // a request on its way through the callee's side (agent_job.h)
  struct Serving {
    std::shared_ptr<Job> job;
    std::shared_ptr<Link> link;
    bool at_most_once = false;
    uint32_t attempt = 0;  // the latest one, which came over `link` (CALL-5)
    Deadlines::iterator in_deadlines;
    bool has_deadline = false;
    std::string method;
    absl::Time begun;
    absl::Time deadline = absl::InfiniteFuture();
  };
  using ServingKey = std::pair<uint64_t, uint64_t>;  // caller's incarnation, call id

  class Replier;

  // ---- caller's side (agent_calls.cc) ----
  StatusOr<std::shared_ptr<CallSpec>> make_spec(UntypedCall call, const Destination* to);
  CallHandle issue(const Destination& to, const std::shared_ptr<const CallSpec>& spec,
                   CallDone done);
  void transmit(uint64_t call_id);
  // The parts of transmit(): what goes now (else it is told, dialled or staged), and what came of it.
  struct Outgoing;
  void take_outgoing(uint64_t call_id, Outgoing* out);
  void fill_header(const CallSpec& spec, uint64_t call_id, v1::CallHeader* header) const;
  void after_sending(uint64_t call_id, const Outgoing& out, const Status& sent);
  bool is_foreign(uint64_t from, uint64_t call_id) ABSL_LOCKS_EXCLUDED(mutex_);
  // `delivery`: what an answer said, else what the call's state tells.
  void complete(uint64_t call_id, StatusOr<Payload> result, bool tell_callee,
                std::optional<Delivery> delivery = std::nullopt);
  void arm_locked(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void on_deadline_timer();
  Status closed_error() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- tensors on devices (agent_devices.cc) ----
  // Null: neither the arguments nor device maps say where tensors belong.
  StatusOr<std::shared_ptr<const DeviceRoute>> find_route(const Destination& to,
                                                          const Payload& payload) const;
  void stage_call(uint64_t call_id, const std::shared_ptr<const Unstaged>& unstaged);
  // The transport's, for as long as it is there.
  HostMemory shared_memory();
  void land_answer(uint64_t call_id, Payload payload, std::shared_ptr<Metadata> metadata);
  void land_request(const std::shared_ptr<Job>& job);

  // ---- room for what is sent (agent_room.cc) ----
  // Takes the message's bytes of the worker's send budget, unless it has them.
  Status charge_worker_locked(const OutMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The call's bytes of the worker's budget and of its peer's, or nothing. `*worker_full`: it was
  // the worker's that had no room.
  Status take_room_locked(Pending* p, const Peer& peer, bool* worker_full)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes room for a new call, or lets it wait for some if it wants to and may.
  Status claim_room_locked(Pending* p, const Peer& peer, uint64_t call_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void leave_room_queue_locked(uint64_t call_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void serve_room_queue();
  // Sends a call that waits for room (Backpressure::kWait) again in a moment, when its receiver has
  // had none. False: it is not such a call.
  bool ask_again_later(uint64_t call_id, const Status& refused, Delivery delivery);
  // For an answer; the result is to be held until it has left.
  StatusOr<std::shared_ptr<SendCharge>> charge_answer_locked(const OutMessage& message,
                                                             const Peer* peer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for an answer that is kept (KEEP-2): charged while this reference to it is held, and
  // not as long as it exists.
  Status charge_kept_locked(OutMessageRef* message, const Peer* peer,
                            std::shared_ptr<SendCharge>* held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Every call to the peer that is at most once and has a smaller number is complete.
  uint64_t acked_below_locked(const Peer& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- peers (peer.cc) ----
  PeerRef peer_locked(const WorkerInfo& info, std::string_view address)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void drop_impostor_locked(PeerRef impostor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status check_incarnation_locked(const Hello& theirs) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status check_observer_locked(const Hello& theirs) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where both have dialled this worker's connection stays, not that of the peer.
  bool is_lower(const WorkerInfo& peer) const {
    const WorkerKey me = key_of(options_.self);
    return std::min(me, key_of(peer)) == me;
  }
  // True when the caller must dial() after letting go of the mutex.
  bool want_dial_locked(const PeerRef& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // DIAL-2: this worker dials kMostDials peers at a time. Of the others those come first whose connection stays if both
  // dial; one whose own dial has connected it meanwhile is not dialled. So where all call all, a pair seldom dials both ways.
  void dial_ended_locked(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void dial_queued() ABSL_LOCKS_EXCLUDED(mutex_);
  // SILENT-1: membership decides whether a peer lives (MEM-4). One that it lists and that says nothing, or does not answer
  // a dial, may be starved of processor time, as we may be: the connection or the dial ends after kPatience leases. Where
  // membership says nothing, of observers or while its store is out of reach, a connection ends sooner.
  static constexpr int kPatience = 4;
  static constexpr int kPatienceWithoutMembership = 2;
  // DIAL-1.
  void back_off_locked(Peer* peer, const Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void came_through_locked(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void arm_redial_locked(const PeerRef& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The connection is lost, or refuses what is sent.
  void failed_locked(Peer* peer, Link* link, const Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Hello own_hello() const;
  void dial(const PeerRef& peer);
  void on_dialled(const PeerRef& peer, const std::shared_ptr<Link>& link,
                  StatusOr<std::shared_ptr<Connection>> connection);
  void adopt(const PeerRef& peer, const std::shared_ptr<Link>& link);
  // Nothing new goes over `link` from here on. The goodbye follows the last request that is being
  // written: at once by the caller for those in `goodbyes`, else by done_sending().
  void retire_locked(Link* link, std::vector<std::shared_ptr<Link>>* goodbyes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void done_sending(const std::shared_ptr<Link>& link);
  void send_goodbye(const std::shared_ptr<Link>& link);
  bool may_close_locked(const Link& link) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void close_if_drained(const std::shared_ptr<Link>& link);
  // Those that went first, but for MemberList::kMostGone; not to be destroyed under the mutex, for
  // which the timer of a peer may wait.
  std::vector<PeerRef> forget_gone_peers_locked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Link> new_link(const PeerRef& peer);
  std::shared_ptr<ByteBudget> part_of_budget(uint64_t limit, std::string name) const;
  void tick();

  // ---- observers (agent_inspect.cc) ----
  std::shared_ptr<ConnectionHandler> admit_observer(std::shared_ptr<Connection> connection);
  void on_observer_lost(const std::shared_ptr<Link>& link, const Lost& lost);
  StatusOr<std::string> look(const std::string& observer, const v1::CallHeader& header,
                             StatusOr<Payload> payload) const;

  // ---- what rides on calls (agent_intercept.cc) ----
  bool concerns_interceptors(const UntypedCall& call) const;
  StatusOr<AttachmentsRef> attach(const WorkerInfo& to, const UntypedCall& call) const;
  CallHandle start_intercepted(const Destination& to, UntypedCall&& call, CallDone done);
  // References to which no interceptor has attached anything cannot be sent.
  Status check_carried(const Payload& payload) const;
  void receive_answer(uint64_t call_id, Payload payload, std::shared_ptr<Metadata> metadata);
  void next_answer_step(uint64_t call_id, const WorkerInfo& from,
                        const std::shared_ptr<Payload>& payload,
                        const std::shared_ptr<Metadata>& metadata, size_t step);
  void intercept(const std::shared_ptr<Job>& job);
  class RequestStep;
  void next_step(const std::shared_ptr<Job>& job);
  // The object of a method that interceptors have named, or find_instance().
  Status find_target(Job* job) const;
  Status attach_to_answer(Job* job, const Payload& result) const;
  void run_kept(const std::shared_ptr<Job>& job);

  // ---- leaving (agent_leave.cc) ----
  Method leaving_method();
  void on_leaving(const WorkerInfo& peer, ReplyFn reply);
  // Those to tell that no call of ours to the peer is under way any more, if that is so.
  std::vector<ReplyFn> ended_with_locked(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status check_leaving_locked(const Pending& call, const CallScope* scope, const Peer& peer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status check_leaving_locked(const v1::CallHeader& header, uint64_t caller) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- what arrives (agent_admit.cc) ----
  struct Arrival;  // what becomes of a request
  // Whose connection it is. Null: what still comes by it counts for nothing, as the peer is gone,
  // the connection is lost, or it is that of an impostor.
  Peer* peer_of_locked(const Link& link) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void admit_locked(const std::shared_ptr<Job>& job, Arrival* arrival,
                    std::vector<Answer>* acknowledged) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers a request that was here before.
  void answer_repeated(const Job& job, const Arrival& arrival);
  // `error`: what it is answered with, whatever its method is.
  void begin(const std::shared_ptr<Job>& job, Status error);

  // ---- callee's side (agent_dispatch.cc) ----
  Status find_instance(Job* job) const;
  void take_place(Job* job, ObjectTurns* turns) const;
  void look_at(const std::shared_ptr<Job>& job);
  // Charges the bytes of a waiting job to the receive budget, unless they are charged already.
  Status charge_waiting(Job* job) const;
  void serve(std::shared_ptr<Job> job);
  void run(const std::shared_ptr<Job>& job);
  // Tells the handler, or sees to it that it never starts.
  void cancel_job(const std::shared_ptr<Job>& job, CancelReason why);
  // Ends a job that waits: it is not to run any more.
  void give_up(const std::shared_ptr<Job>& job);
  Status never_started(const Job& job) const;
  // The method has returned, or its coroutine has ended. Once; later calls do nothing.
  Status end_turn(const std::shared_ptr<Job>& job);
  void reply(const std::shared_ptr<Job>& job, StatusOr<Payload> result);
  // `message`: on the host.
  void finish_reply(const std::shared_ptr<Job>& job, StatusOr<OutMessageRef> message);
  // The handler's error as others are told it.
  Status told_by_handler(const Job& job, Status error) const;
  Answer error_answer(const Job& job, const Status& error) const;
  void send_answer(const std::shared_ptr<Link>& link, uint64_t call_id, const Answer& answer,
                   std::shared_ptr<const void> held = nullptr);
  StatusOr<const Method*> find_method(const v1::CallHeader& header) const;
  template <class T>
  StatusOr<T> annotate_at_self(StatusOr<T> result) const;
  ObjectTurns* turns_of(const std::string& object) const;

  const AgentOptions options_;
  DeviceCopier copier_;
  // Shared with what was received and waits.
  const std::shared_ptr<ByteBudget> receive_budget_;
  // Shared with the messages under way, which may outlive the agent.
  const std::shared_ptr<RoomBell> bell_;
  const std::shared_ptr<SendRoom> send_room_;
  const std::shared_ptr<ReceiveMemory> receive_memory_;
  std::map<std::string, Method> services_;
  std::atomic<int64_t> rpc_timeout_ns_;
  absl::Time store_lost_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // since when; or never

  struct Counters;
  const std::unique_ptr<Counters> counters_;

  mutable Mutex mutex_;
  KeptAnswers kept_ ABSL_GUARDED_BY(mutex_);
  Condition idle_changed_;
  std::shared_ptr<Transport> transport_ ABSL_GUARDED_BY(mutex_);  // null after release_transport()
  MemberListRef members_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, PeerRef> peers_ ABSL_GUARDED_BY(mutex_);  // by incarnation
  std::deque<uint64_t> gone_peers_ ABSL_GUARDED_BY(mutex_);    // incarnations, oldest first
  int dials_ ABSL_GUARDED_BY(mutex_) = 0;                      // DIAL-2
  std::deque<std::weak_ptr<Peer>> dials_that_stay_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::weak_ptr<Peer>> other_dials_ ABSL_GUARDED_BY(mutex_);
  bool dials_queued_ ABSL_GUARDED_BY(mutex_) = false;  // a thread is in dial_queued()
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> room_queue_ ABSL_GUARDED_BY(mutex_);  // calls that wait for room, in order
  std::map<ServingKey, Serving> serving_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<Link>> observers_ ABSL_GUARDED_BY(mutex_);
  Deadlines deadlines_ ABSL_GUARDED_BY(mutex_);
  absl::Time armed_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  uint64_t last_call_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> open_{false};
  std::vector<std::shared_ptr<Job>> early_ ABSL_GUARDED_BY(mutex_);  // until open()
  bool accepting_ ABSL_GUARDED_BY(mutex_) = true;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  Status closed_why_ ABSL_GUARDED_BY(mutex_);
  int waiters_ ABSL_GUARDED_BY(mutex_) = 0;  // threads in wait_idle or wait_drained

  mutable Mutex turns_mutex_;
  mutable std::map<std::string, std::unique_ptr<ObjectTurns>> turns_ ABSL_GUARDED_BY(turns_mutex_);

  std::unique_ptr<Timer> deadline_timer_;
  std::unique_ptr<Timer> tick_timer_;
  absl::Time last_sweep_;  // this and the next: touched by tick() only
  absl::Time last_trim_;
  std::map<std::string, int64_t> published_;  // the transport's, as far as the metrics have them
};

}  // namespace weft::internal

#endif  // WEFT_RPC_INTERNAL_AGENT_AGENT_H_
