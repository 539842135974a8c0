// The agent's callee side: from a request that becomes a call (agent_admit.cc) to the answer that
// leaves.

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/common/wait_driver.h"
#include "weft/common/wake_scope.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/agent/arena_message.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {

// User objects are not destroyed on a thread that serves other calls: an object of which this is
// the last reference, and callbacks for a cancellation that never came.
Agent::Job::~Job() {
  const bool holds = (object != nullptr && object.use_count() <= 2) || cancel.watched();
  if (pool == nullptr || !holds || on_pool_thread()) return;
  (void)pool->post([o = std::move(object), t = std::move(target), c = std::move(call),
                    s = std::move(scope), token = std::move(cancel)] {});
}

// Given to the handler as its ReplyFn. Replies once; when it is dropped unused, with an error, so
// that no caller waits for a handler that forgot it.
class Agent::Replier {
 public:
  Replier(std::shared_ptr<Agent> agent, std::shared_ptr<Job> job)
      : agent_(std::move(agent)), job_(std::move(job)) {}
  Replier(Replier&&) = default;
  Replier& operator=(Replier&&) = delete;
  ~Replier() {
    if (job_ == nullptr) return;
    agent_->reply(job_, make_error(ErrorKind::kInternal,
                                   absl::StrCat("the handler of '", job_->header->method(),
                                                "' ended without a result")));
  }
  void operator()(StatusOr<Payload> result) {
    const std::shared_ptr<Job> job = std::move(job_);
    if (job != nullptr) agent_->reply(job, std::move(result));
  }

 private:
  std::shared_ptr<Agent> agent_;
  std::shared_ptr<Job> job_;
};

namespace {

// What a call that waits takes besides the bytes of its arguments.
constexpr uint64_t kWaitingBytes = 512;

// On the thread that found the request: the poller's, or a waiting application thread (DRIVE-1).
bool may_run_here(const Method& method, const Payload& arguments) {
  if (method.inline_ok && !method.waiting_ok && driving()) {
    note_driving_is_dear();
    return false;
  }
  if (method.inline_ok || method.inline_elements == 0) return method.inline_ok;
  int64_t left = method.inline_elements;
  for (const at::Tensor& tensor : arguments.tensors) {
    if (!tensor.defined()) continue;
    if (tensor.layout() != at::kStrided || tensor.numel() > left) return false;
    left -= tensor.numel();
  }
  return true;
}

}  // namespace

StatusOr<const Method*> Agent::find_method(const v1::CallHeader& header) const {
  const std::string& name = header.method();
  if (name.empty() || name[0] != '@') {
    return annotate_at_self(options_.library->find(name, header.signature_hash()));
  }
  auto it = services_.find(name);
  if (it == services_.end()) {
    return make_error(
        ErrorKind::kUnimplemented,
        absl::StrCat("worker '", options_.self.name, "' does not run the service of '",
                     absl::CHexEscape(name), "'; list it among the services at join"));
  }
  if (signature_hash(it->second.signature) == header.signature_hash()) return &it->second;
  return make_error(ErrorKind::kSignature, absl::StrCat("worker '", options_.self.name, "' has ",
                                                        name, it->second.signature));
}

template <class T>
StatusOr<T> Agent::annotate_at_self(StatusOr<T> result) const {
  if (result.ok()) return result;
  return annotate(result.status(), absl::StrCat("worker '", options_.self.name, "'"));
}

ObjectTurns* Agent::turns_of(const std::string& object) const {
  MutexLock lock(&turns_mutex_);
  std::unique_ptr<ObjectTurns>& turns = turns_[object];
  if (turns == nullptr) turns = std::make_unique<ObjectTurns>();
  return turns.get();
}

Status Agent::find_instance(Job* job) const {
  if (job->callee->class_name.empty() && job->header->object().empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const Instance* instance, annotate_at_self(options_.library->find_instance(
                                                      job->header->object(), *job->callee)));
  job->object = instance->object;
  if (!instance->concurrent) take_place(job, turns_of(job->header->object()));
  return absl::OkStatus();
}

void Agent::take_place(Job* job, ObjectTurns* turns) const {
  job->turns = turns;
  job->turn = runtime()->random().next();
  job->scope->holding.push_back(job->turn);
}

void Agent::open() {
  std::vector<std::shared_ptr<Job>> early;
  {
    MutexLock lock(&mutex_);
    open_.store(true);
    early.swap(early_);
  }
  for (const auto& job : early) look_at(job);
}

Status Agent::charge_waiting(Job* job) const {
  if (job->charge != nullptr) return absl::OkStatus();
  uint64_t bytes = job->payload.body.size() + kWaitingBytes;
  for (const at::Tensor& t : job->payload.tensors) {
    if (t.defined() && t.layout() == at::kStrided) bytes += t.nbytes();
  }
  struct Charge {
    Charge(std::shared_ptr<ByteBudget> from, uint64_t n) : budget(std::move(from)), bytes(n) {}
    ~Charge() { budget->release(bytes); }
    const std::shared_ptr<ByteBudget> budget;
    const uint64_t bytes;
  };
  WEFT_RETURN_IF_ERROR(job->link->budget()->charge(bytes));
  job->charge = std::make_shared<Charge>(job->link->budget(), bytes);
  return absl::OkStatus();
}

void Agent::look_at(const std::shared_ptr<Job>& job) {
  const bool at_once = open_.load(std::memory_order_acquire) && job->turns == nullptr &&
                       job->header->metadata_size() == 0 &&
                       may_run_here(*job->callee, job->payload);
  if (!at_once && !is_service(*job->callee)) {
    if (Status charged = charge_waiting(job.get()); !charged.ok()) {
      return reply(job, annotate(charged, "there is no room for calls that wait for a handler"));
    }
  }
  if (!open_.load(std::memory_order_acquire)) {
    MutexLock lock(&mutex_);
    if (!open_.load()) {
      early_.push_back(job);
      return;
    }
  }
  if (job->header->metadata_size() > 0) return intercept(job);
  job->reach = v1::ErrorHeader::PASSED;
  serve(job);
}

Status Agent::never_started(const Job& job) const {
  const std::string waited =
      absl::StrCat("it never started, ", absl::FormatDuration(now() - job.arrived),
                   " after its first frame came: it waited for ",
                   job.has_turn.load()                         ? "the turn of its object"
                   : job.phase.load() == Job::Phase::kArriving ? "the rest of its arguments"
                                                               : "a thread");
  if (job.cancel.reason() == CancelReason::kGivenUp) {
    return make_error(ErrorKind::kCancelled, absl::StrCat("given up by its caller; ", waited));
  }
  return make_error(ErrorKind::kDeadline,
                    absl::StrCat("deadline of ", absl::FormatDuration(job.deadline - job.arrived),
                                 " exceeded on worker '", options_.self.name, "': ", waited));
}

void Agent::cancel_job(const std::shared_ptr<Job>& job, CancelReason why) {
  job->cancel.cancel(why);
  give_up(job);
}

void Agent::give_up(const std::shared_ptr<Job>& job) {
  if (job->phase.load() != Job::Phase::kWaiting || is_service(*job->callee)) return;
  Job::Phase waiting = Job::Phase::kWaiting;
  if (!job->phase.compare_exchange_strong(waiting, Job::Phase::kOver)) return;
  counters_->given_up->add();
  // Its arguments go with it, which is no work for the timer or a poller.
  post_or_run(options_.pool.get(), [self = shared_from_this(), job] {
    job->payload = Payload();
    self->reply(job, self->never_started(*job));
  });
}

Status Agent::end_turn(const std::shared_ptr<Job>& job) {
  if (job->turns == nullptr || job->turn_over.exchange(true)) return absl::OkStatus();
  Status ordered;
  if (job->phase.load() == Job::Phase::kRunning) {
    ordered = copier_.end(job->call->scope(), job->streams(), job->callee->is_const);
  }
  job->turns->release(job->turn);
  return ordered;
}

void Agent::serve(std::shared_ptr<Job> job) {
  job->has_turn.store(job->turns != nullptr);
  job->phase.store(Job::Phase::kWaiting);
  // One that was cancelled before could not be given up yet.
  if (job->cancel.cancelled()) give_up(job);
  const auto start = [self = shared_from_this(), job] {
    job->has_turn.store(false);
    if (job->phase.load() == Job::Phase::kOver) {
      if (job->turns != nullptr) job->turns->release(job->turn);
      return;
    }
    if (may_run_here(*job->callee, job->payload)) {
      WakeScope::flush();  // WAKE-1
      self->counters_->inline_runs->add();
      self->run(job);
      return;
    }
    self->counters_->pool_posts->add();
    Task task = [self, job] { self->run(job); };
    if (!self->options_.pool->post(std::move(task))) {
      self->reply(
          job, make_error(ErrorKind::kPeerLost,
                          absl::StrCat("worker '", self->options_.self.name, "' has shut down")));
    }
  };
  if (job->turns == nullptr) return start();
  const std::vector<uint64_t>& held = job->call->scope()->holding;
  // Without the call's own turn, which it does not hold yet.
  const std::vector<uint64_t> holding(held.begin(), held.end() - 1);
  job->turns->acquire(job->turn, job->callee->is_const, holding, start);
}

void Agent::run(const std::shared_ptr<Job>& job) {
  Job::Phase waiting = Job::Phase::kWaiting;
  if (!job->phase.compare_exchange_strong(waiting, Job::Phase::kRunning)) {
    if (job->turns != nullptr) job->turns->release(job->turn);
    return;
  }
  if ((job->cancel.cancelled() || now() >= job->deadline) && !is_service(*job->callee)) {
    counters_->given_up->add();
    return reply(job, never_started(*job));
  }
  job->charge = nullptr;
  ScopeGuard scope(job->call->scope());
  c10::AutoGradMode grad(job->header->grad_mode());
  CallTrace* const trace = options_.trace.get();
  const TraceSpan span(trace == nullptr ? nullptr : trace->writer(), &runtime()->clock(), "run",
                       job->callee->name);
  if (trace != nullptr) {
    trace->request_in(job->call->caller().incarnation, job->header->call_id(), job->callee->name);
  }
  const Status ordered = copier_.begin(job->object_after, job->streams(), job->callee->is_const);
  if (!ordered.ok()) return reply(job, ordered);
  if (job->keep != nullptr) {
    run_kept(job);
  } else {
    // AnyInvocable wants to be movable only, which Replier is: a copy could not tell who replies.
    job->callee->invoke(*job->call, job->object, std::move(job->payload),
                        Replier(shared_from_this(), job));
  }
  // OBJ-4. Of one that has replied the reply sees to it.
  if (job->turns == nullptr || job->replied.load() || job->call->body_goes_on()) return;
  if (Status ordered = end_turn(job); !ordered.ok()) reply(job, ordered);
}

Status Agent::told_by_handler(const Job& job, Status error) const {
  if (error_kind(error) == ErrorKind::kCancelled &&
      (job.call->cancel_reason() == CancelReason::kDeadline || now() >= job.deadline)) {
    // It gave up what the deadline had cancelled, or is about to.
    error = make_error(
        ErrorKind::kDeadline,
        absl::StrCat("deadline of ", absl::FormatDuration(job.call->remaining_at_start()),
                     " exceeded on worker '", options_.self.name,
                     "': ", std::string(error.message())));
  }
  ErrorDetails details = error_details(error);
  // A third worker may have had no room now. This one had, and has run the call: nothing is won by
  // asking it again.
  if (is_no_room_now(error)) details.payload.clear();
  if (details.kind == ErrorKind::kNone) details.kind = ErrorKind::kUser;
  if (details.origin.empty()) details.origin = options_.self.name;
  // One line per hop, innermost first.
  if (!details.remote_trace.empty() && details.remote_trace.back() != '\n') {
    details.remote_trace.push_back('\n');
  }
  absl::StrAppend(&details.remote_trace, "  in '", job.header->method(), "' on worker '",
                  options_.self.name, "', called by '", job.call->caller().name, "'");
  return with_details(std::move(error), details);
}

Answer Agent::error_answer(const Job& job, const Status& error) const {
  const Status told = told_by_handler(job, error);
  return Answer{FrameKind::kError, static_cast<uint32_t>(told.code()),
                static_cast<uint32_t>(error_kind(told)), pack_error(told, options_.self.name),
                job.reach};
}

void Agent::reply(const std::shared_ptr<Job>& job, StatusOr<Payload> result) {
  if (job->replied.exchange(true)) return;
  if (job->keep != nullptr && job->reach == v1::ErrorHeader::PASSED) {
    // It never ran, and the code that waits for its object must learn that.
    std::exchange(job->keep, nullptr)(
        result.ok() ? make_error(ErrorKind::kInternal, "it ended without an object")
                    : told_by_handler(*job, result.status()));
  }
  if (!result.ok()) return finish_reply(job, result.status());
  Status attached = attach_to_answer(job.get(), *result);
  // RES-1: what leaves is what there was when the method returned; the next one may write. What is
  // on devices keeps the object's turn until its bytes are here, unless that is over: then the
  // device copies it. Functions and concurrent objects order their kernels themselves
  // (device_order.h).
  const TensorMemory memory = job->callee->results == TensorResults::kBorrow
                                  ? TensorMemory::kBorrowed
                              : job->turn_over.load() ? TensorMemory::kOwned
                                                      : TensorMemory::kOwnedOnHost;
  StatusOr<std::shared_ptr<OutMessage>> message =
      !attached.ok() ? StatusOr<std::shared_ptr<OutMessage>>(std::move(attached))
                     : pack(*std::move(result), memory, job->back.get(), receive_memory_.get());
  if (message.ok()) (*message)->pool = options_.pool;
  if (message.ok() && !(*message)->on_device.empty()) {
    StatusOr<std::shared_ptr<const Unstaged>> marked = copier_.unstaged(*message);
    if (marked.ok()) {
      return copier_.stage(*marked, shared_memory(),
                           [self = shared_from_this(), job, message = *message](Status staged) {
                             self->finish_reply(
                                 job, staged.ok() ? StatusOr<OutMessageRef>(message) : staged);
                           });
    }
    message = marked.status();
  }
  if (!message.ok()) {
    return finish_reply(
        job, annotate(message.status(), absl::StrCat("the result of '", job->header->method(),
                                                     "' for '", job->call->caller().name, "'")));
  }
  finish_reply(job, OutMessageRef(*std::move(message)));
}

void Agent::finish_reply(const std::shared_ptr<Job>& job, StatusOr<OutMessageRef> message) {
  const uint64_t call_id = job->header->call_id();
  const ServingKey key{job->call->caller().incarnation, call_id};
  if (Status ordered = end_turn(job); !ordered.ok() && message.ok()) message = ordered;
  Answer answer;
  Status error = message.ok() ? absl::OkStatus() : message.status();
  if (error.ok()) {
    answer.message = *std::move(message);
    answer.attachments = job->attachments;
    if (answer.attachments != nullptr) answer.message->riding = answer.attachments->bytes();
  }
  std::shared_ptr<Link> link;
  std::shared_ptr<SendCharge> held;
  OutMessageRef sent = answer.message;
  std::vector<Answer> dropped;  // which end without the mutex
  bool wake = false;
  if (error.ok()) {
    MutexLock lock(&mutex_);
    const auto found = peers_.find(key.first);
    const Peer* const peer = found == peers_.end() ? nullptr : found->second.get();
    if (job->header->at_most_once()) {
      error = charge_kept_locked(&sent, peer, &held);
    } else {
      StatusOr<std::shared_ptr<SendCharge>> charge = charge_answer_locked(*sent, peer);
      error = charge.status();
      if (charge.ok()) held = *std::move(charge);
    }
    if (!error.ok()) error = annotate(error, "there is no room for the result");
  }
  if (options_.trace != nullptr) {
    options_.trace->serve_ended(key.first, call_id, job->header->method(), error);
  }
  if (!error.ok()) {
    answer = error_answer(*job, error);
    sent = answer.message;
    if (job->attachments != nullptr) job->attachments->end(Delivery::kNotDelivered, error);
  }
  for (auto& end : std::exchange(job->ends, {})) end();
  {
    MutexLock lock(&mutex_);
    auto it = serving_.find(key);
    if (it != serving_.end()) {
      link = it->second.link;
      if (it->second.has_deadline) deadlines_.erase(it->second.in_deadlines);
      serving_.erase(it);
    }
    auto peer = peers_.find(key.first);
    if (job->header->at_most_once() && peer != peers_.end()) {
      peer->second->window->finish(call_id, answer, &dropped);
    }
    wake = waiters_ > 0;
  }
  if (job->header->method() != kLeavingMethod) counters_->served->add();
  if (link != nullptr) {
    answer.message = std::move(sent);
    send_answer(link, call_id, answer, std::move(held));
    {
      MutexLock lock(&mutex_);
      --link->serving;
    }
    close_if_drained(link);
  }
  if (wake) idle_changed_.notify_all();
}

void Agent::send_answer(const std::shared_ptr<Link>& link, uint64_t call_id, const Answer& answer,
                        std::shared_ptr<const void> held) {
  Status sent;
  if (answer.kind == FrameKind::kResponse) {
    ArenaMessage<v1::ResponseHeader> header;
    header->set_call_id(call_id);
    if (answer.attachments != nullptr) {
      answer.attachments->put(header.get());
      // Nothing that is said about a small one overtakes it.
      const bool large = answer.message->large(MessageLimits(options_.config));
      if (large) held = answer.attachments->on_its_way(std::move(held));
    }
    sent =
        link->send(FrameKind::kResponse, header.get(), answer.message, 0, now(), std::move(held));
    if (!sent.ok() && error_kind(sent) != ErrorKind::kNotDelivered) {
      // It can never be sent as it is, so the caller gets the reason instead.
      const Status why = annotate(sent, "the result cannot be sent");
      if (answer.attachments != nullptr) answer.attachments->end(Delivery::kNotDelivered, why);
      return send_answer(link, call_id,
                         Answer{FrameKind::kError, static_cast<uint32_t>(why.code()),
                                static_cast<uint32_t>(error_kind(why)),
                                pack_error(why, options_.self.name), v1::ErrorHeader::PASSED});
    }
  } else {
    ArenaMessage<v1::ErrorHeader> header;
    header->set_call_id(call_id);
    header->set_code(answer.code);
    header->set_kind(answer.error_kind);
    header->set_reach(answer.reach);
    sent = link->send(FrameKind::kError, header.get(), answer.message, 0, now());
  }
  if (!sent.ok()) counters_->unsent_answers->add();
}

bool Agent::is_foreign(uint64_t from, uint64_t call_id) {
  MutexLock lock(&mutex_);
  const auto it = pending_.find(call_id);
  return it != pending_.end() && it->second.to.incarnation != from;
}

void Agent::on_answer(uint64_t from, uint64_t call_id, StatusOr<Payload> result, Delivery delivery,
                      std::shared_ptr<Metadata> metadata) {
  if (is_foreign(from, call_id)) {
    counters_->foreign_answers->add();
    return;
  }
  if (result.ok()) result->charge = nullptr;
  if (result.ok() && result->devices != nullptr) {
    return land_answer(call_id, *std::move(result), std::move(metadata));
  }
  if (result.ok() && metadata != nullptr) {
    return receive_answer(call_id, *std::move(result), std::move(metadata));
  }
  if (!result.ok() && is_no_room_now(result.status()) &&
      ask_again_later(call_id, result.status(), delivery)) {
    return;
  }
  complete(call_id, std::move(result), false, delivery);
}

}  // namespace weft::internal
