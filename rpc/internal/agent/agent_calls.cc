// The agent's calls at their caller: issue, sending again, completion, deadlines.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/rpc/internal/agent/agent_job.h"
#include "weft/rpc/internal/agent/arena_message.h"
#include "weft/rpc/internal/observe/counters.h"

namespace weft::internal {
namespace {

Status cancelled_with(const CancelToken& caller) {
  return caller.reason() == CancelReason::kDeadline
             ? make_error(ErrorKind::kDeadline, "the deadline of the calling handler is over")
             : make_error(ErrorKind::kCancelled, "the calling handler was cancelled");
}

std::string to_text(const Destination& to) {
  return to.by_id() ? absl::StrCat(" on worker ", to.id()) : absl::StrCat(" on '", to.name(), "'");
}

bool on_devices(const Payload& payload) {
  return std::any_of(payload.tensors.begin(), payload.tensors.end(),
                     [](const at::Tensor& t) { return t.defined() && !t.device().is_cpu(); });
}

}  // namespace

StatusOr<std::shared_ptr<Agent::CallSpec>> Agent::make_spec(UntypedCall call,
                                                            const Destination* to) {
  auto spec = std::make_shared<CallSpec>();
  if (to != nullptr) {
    StatusOr<std::shared_ptr<const DeviceRoute>> route = find_route(*to, call.arguments);
    if (!route.ok()) return annotate(route.status(), absl::StrCat("rpc '", call.method, "'"));
    spec->route = *std::move(route);
  }
  spec->hash = signature_hash(call.signature);
  spec->grad_mode = c10::GradMode::is_enabled();
  if (const CallScope* scope = find_scope(scope_key())) {
    spec->holding = scope->holding;
    spec->chain = scope->chain;
    spec->trace = scope->trace;
  }
  Status carried = check_carried(call.arguments);
  StatusOr<std::shared_ptr<OutMessage>> message =
      !carried.ok() ? StatusOr<std::shared_ptr<OutMessage>>(std::move(carried))
                    : pack(std::move(call.arguments),
                           call.options.tensors == TensorArgs::kCopy ? TensorMemory::kCopied
                                                                     : TensorMemory::kBorrowed,
                           spec->route.get());
  if (message.ok()) (*message)->pool = options_.pool;
  if (message.ok() && !(*message)->on_device.empty()) {
    StatusOr<std::shared_ptr<const Unstaged>> marked = copier_.unstaged(*message);
    if (!marked.ok()) message = marked.status();
    if (marked.ok()) spec->unstaged = *std::move(marked);
  }
  if (!message.ok()) {
    return annotate(message.status(),
                    absl::StrCat("calling '", call.method, "'", to == nullptr ? "" : to_text(*to)));
  }
  spec->message = *std::move(message);
  spec->call = std::move(call);
  return spec;
}

CallHandle Agent::start_call(const Destination& to, UntypedCall call, CallDone done) {
  if (concerns_interceptors(call)) return start_intercepted(to, std::move(call), std::move(done));
  StatusOr<std::shared_ptr<CallSpec>> spec = make_spec(std::move(call), &to);
  if (!spec.ok()) {
    done(spec.status());
    return CallHandle();
  }
  return issue(to, *spec, std::move(done));
}

std::vector<CallHandle> Agent::start_calls(const std::vector<Destination>& to, UntypedCall call,
                                           std::function<void(size_t, StatusOr<Payload>)> done) {
  std::vector<CallHandle> handles;
  if (copier_.has_devices() || on_devices(call.arguments) || concerns_interceptors(call)) {
    // Where tensors belong, and what rides on a call, differs from one destination to the next.
    for (size_t i = 0; i < to.size(); ++i) {
      handles.push_back(
          start_call(to[i], call, [i, done](StatusOr<Payload> r) { done(i, std::move(r)); }));
    }
    return handles;
  }
  StatusOr<std::shared_ptr<CallSpec>> spec = make_spec(std::move(call), nullptr);
  for (size_t i = 0; i < to.size(); ++i) {
    CallDone one = [i, done](StatusOr<Payload> r) { done(i, std::move(r)); };
    if (spec.ok()) {
      handles.push_back(issue(to[i], *spec, std::move(one)));
    } else {
      one(spec.status());
      handles.emplace_back();
    }
  }
  return handles;
}

CallHandle Agent::issue(const Destination& to, const std::shared_ptr<const CallSpec>& spec,
                        CallDone done) {
  const absl::Time start = now();
  const CallScope* scope = find_scope(scope_key());
  absl::Time deadline = deadline_after(start, spec->call.options.deadline.value_or(rpc_timeout()));
  if (scope != nullptr) deadline = std::min(deadline, scope->deadline);

  Status refused;
  uint64_t id = 0;
  bool wants_room = false;
  std::string peer_name;  // for the trace
  {
    MutexLock lock(&mutex_);
    StatusOr<const Member*> member = members_->resolve(to);
    if (closed_ || !accepting_) {
      refused = closed_error();
    } else if (!member.ok()) {
      refused = member.status();
    } else if (deadline <= start) {
      refused =
          make_error(ErrorKind::kDeadline,
                     absl::StrCat("the deadline of the call of '", spec->call.method, "' on ",
                                  to_string((*member)->info), " was over before it was sent"));
    } else if (scope != nullptr && scope->cancel.cancelled()) {
      refused = make_error(ErrorKind::kCancelled,
                           "the call in whose handler this one was made is cancelled");
    } else {
      id = ++last_call_id_;
      Pending p;
      p.spec = spec;
      p.to = (*member)->info;
      if (options_.trace != nullptr) peer_name = p.to.name;
      p.issued = start;
      p.deadline = deadline;
      if (spec->unstaged != nullptr) p.state = CallState::kUnstaged;
      p.notice = spec->call.method == kLeavingMethod;
      const PeerRef peer = peer_locked((*member)->info, (*member)->address);
      if (leaving_ || peer->leaving) refused = check_leaving_locked(p, scope, *peer);
      if (refused.ok()) refused = claim_room_locked(&p, *peer, id);
      wants_room = waits_for_room(p.state);
      if (refused.ok()) p.done = std::move(done);
      if (refused.ok() && deadline != absl::InfiniteFuture()) {
        p.in_deadlines = deadlines_.emplace(deadline, DeadlineKey{false, 0, id});
        p.has_deadline = true;
        arm_locked(deadline);
      }
      if (refused.ok()) {
        if (spec->call.options.retry == Retry::kAtMostOnce) {
          peer->once.insert(id);
          peer->any_once = true;
        }
        pending_.emplace(id, std::move(p));
      }
    }
  }
  if (!refused.ok()) {
    if (spec->attachments != nullptr) spec->attachments->end(Delivery::kNotDelivered, refused);
    done(annotate(refused, absl::StrCat("rpc '", spec->call.method, "'")));
    return CallHandle();
  }
  counters_->issued->add();
  runtime()->trace("issue", options_.self.id, id);
  if (options_.trace != nullptr) {
    options_.trace->call_begun(options_.self.incarnation, id, spec->call.method, peer_name,
                               spec->message->bytes, spec->trace);
  }
  const std::weak_ptr<Agent> weak = weak_from_this();
  if (scope != nullptr) {
    // Cancellation of the call that we serve reaches the calls made for it.
    const CancelToken parent = scope->cancel;
    const uint64_t hook = parent.on_cancel([weak, id, parent] {
      if (auto self = weak.lock()) self->complete(id, cancelled_with(parent), true);
    });
    MutexLock lock(&mutex_);
    auto it = pending_.find(id);
    if (it != pending_.end()) {
      it->second.parent = parent;
      it->second.parent_hook = hook;
    }
  }
  if (wants_room) {
    serve_room_queue();
  } else {
    transmit(id);
  }
  return CallHandle([weak, id] {
    if (auto self = weak.lock()) {
      self->complete(id, make_error(ErrorKind::kCancelled, "cancelled by the caller"), true);
    }
  });
}

// A call on its way to a connection.
struct Agent::Outgoing {
  ArenaMessage<v1::CallHeader> header;
  std::shared_ptr<Link> link;  // null: it does not go now
  std::shared_ptr<const CallSpec> spec;
  std::shared_ptr<SendCharge> charge;
};

void Agent::transmit(uint64_t call_id) {
  Outgoing out;
  take_outgoing(call_id, &out);
  if (out.link == nullptr) return;
  fill_header(*out.spec, call_id, out.header.get());
  Status sent;
  {
    CallTrace* const trace = options_.trace.get();
    const std::string& method = out.spec->call.method;
    const TraceSpan span(trace == nullptr ? nullptr : trace->writer(), &runtime()->clock(), "send",
                         method);
    if (trace != nullptr) trace->request_out(options_.self.incarnation, call_id, method);
    sent = out.link->send(FrameKind::kRequest, out.header.get(), out.spec->message, call_id, now(),
                          std::move(out.charge), out.spec->call.prompt);
  }
  done_sending(out.link);
  after_sending(call_id, out, sent);
}

void Agent::take_outgoing(uint64_t call_id, Outgoing* out) {
  PeerRef to_dial;
  std::shared_ptr<const Unstaged> to_stage;
  Status gone;
  {
    MutexLock lock(&mutex_);
    auto it = pending_.find(call_id);
    if (it == pending_.end()) return;
    Pending& p = it->second;
    if (p.state != CallState::kWaiting && p.state != CallState::kUnstaged) return;
    // One that went long ago may have been forgotten between the choice of the peer and now.
    const auto found = peers_.find(p.to.incarnation);
    const PeerRef peer = found == peers_.end() ? nullptr : found->second;
    if (peer == nullptr) {
      gone = make_error(ErrorKind::kPeerLost, absl::StrCat("worker ", to_string(p.to), " is gone"));
    } else if (!peer->gone.ok()) {
      gone = peer->gone;
    } else if (p.state == CallState::kUnstaged) {
      p.on(CallEvent::kTaken);
      to_stage = p.spec->unstaged;
    } else if (peer->active == nullptr) {
      peer->waiting.insert(call_id);
      if (want_dial_locked(peer)) to_dial = peer;
    } else {
      peer->waiting.erase(call_id);
      out->link = peer->active;
      ++out->link->pending;
      ++out->link->sending;
      p.link = out->link;
      p.on(CallEvent::kTaken);
      out->spec = p.spec;
      out->charge = p.large_charge;
      v1::CallHeader* const header = out->header.get();
      header->set_call_id(call_id);
      header->set_attempt(p.attempt);
      if (p.deadline != absl::InfiniteFuture()) {
        header->set_remaining_us(
            std::max<int64_t>(1, absl::ToInt64Microseconds(p.deadline - now())));
      }
      if (p.at_most_once()) {
        header->set_at_most_once(true);
        header->set_acked_below(std::min(acked_below_locked(*peer), call_id));
        peer->owes_ack = false;
      }
    }
  }
  if (!gone.ok()) return complete(call_id, gone, false);
  if (to_stage != nullptr) return stage_call(call_id, to_stage);
  if (to_dial != nullptr) dial(to_dial);
}

void Agent::fill_header(const CallSpec& spec, uint64_t call_id, v1::CallHeader* header) const {
  header->set_method(spec.call.method);
  header->set_signature_hash(spec.hash);
  header->set_object(spec.call.object);
  header->set_grad_mode(spec.grad_mode);
  if (!spec.trace.empty()) {
    header->set_trace_id_high(spec.trace.trace_high);
    header->set_trace_id(spec.trace.trace_low);
    header->set_span_id(span_of_caller(options_.self.incarnation, call_id));
    header->set_trace_flags(spec.trace.flags);
  }
  for (uint64_t turn : spec.holding) header->add_holding(turn);
  for (uint64_t incarnation : spec.chain) header->add_chain(incarnation);
  if (spec.attachments != nullptr) spec.attachments->put(header);
  if (spec.route != nullptr && spec.route->wrong.empty()) {
    for (const auto& [ours, theirs] : spec.route->pairs) {
      header->add_device_map(ours);
      header->add_device_map(theirs);
    }
  }
}

void Agent::after_sending(uint64_t call_id, const Outgoing& out, const Status& sent) {
  const std::shared_ptr<Link>& link = out.link;
  const UntypedCall& call = out.spec->call;
  bool again = false;
  Status fail;
  std::vector<std::shared_ptr<Link>> goodbyes;
  {
    MutexLock lock(&mutex_);
    auto it = pending_.find(call_id);
    if (it == pending_.end() || it->second.link != link || !is_being_sent(it->second.state)) return;
    Pending& p = it->second;
    const CallEvent event = sent.ok()                                      ? CallEvent::kAccepted
                            : error_kind(sent) == ErrorKind::kNotDelivered ? CallEvent::kRefused
                                                                           : CallEvent::kNeverFits;
    switch (p.on(event)) {
      case CallAction::kFails: fail = sent; break;
      case CallAction::kMaybeExecuted:
        fail = make_error(ErrorKind::kMaybeExecuted,
                          absl::StrCat("the connection to ", to_string(p.to), " broke after '",
                                       call.method, "' was sent: it may have run"));
        break;
      case CallAction::kSendAgain:
      case CallAction::kSendNext:
        p.link = nullptr;
        --link->pending;
        again = true;
        break;
      case CallAction::kNothing:
      case CallAction::kImpossible: break;
    }
    // A connection that refuses is lost, even if on_lost has not come yet.
    const auto peer = peers_.find(p.to.incarnation);
    if (again && peer != peers_.end() && peer->second->active == link) {
      peer->second->active = nullptr;
      failed_locked(peer->second.get(), link.get(), sent);
      retire_locked(link.get(), &goodbyes);
    }
  }
  for (const auto& l : goodbyes) send_goodbye(l);
  if (!fail.ok()) return complete(call_id, fail, false);
  if (again) {
    counters_->retried->add();
    transmit(call_id);
  }
}

uint64_t Agent::acked_below_locked(const Peer& peer) const {
  return peer.once.empty() ? last_call_id_ + 1 : *peer.once.begin();
}

void Agent::complete(uint64_t call_id, StatusOr<Payload> result, bool tell_callee,
                     std::optional<Delivery> delivery) {
  Pending p;
  bool wake = false;
  std::shared_ptr<Link> link;
  std::vector<ReplyFn> ended;
  {
    MutexLock lock(&mutex_);
    auto it = pending_.find(call_id);
    if (it == pending_.end()) {
      if (!tell_callee) counters_->late_answers->add();
      return;
    }
    p = std::move(it->second);
    pending_.erase(it);
    if (waits_for_room(p.state)) leave_room_queue_locked(call_id);
    if (p.has_deadline) deadlines_.erase(p.in_deadlines);
    if (p.asked_again.has_value()) deadlines_.erase(*p.asked_again);
    auto peer = peers_.find(p.to.incarnation);
    if (peer != peers_.end()) {
      if (peer->second->once.erase(call_id) > 0) peer->second->owes_ack = true;
      peer->second->waiting.erase(call_id);
      if (peer->second->leaving) ended = ended_with_locked(peer->second.get());
    }
    if (p.link != nullptr) {
      --p.link->pending;
      link = p.link;
    }
    wake = waiters_ > 0;
  }
  if (p.parent_hook != 0) p.parent.remove(p.parent_hook);
  if (tell_callee && link != nullptr) {
    v1::CancelHeader cancel;
    cancel.set_call_id(call_id);
    cancel.set_deadline_over(!result.ok() && error_kind(result.status()) == ErrorKind::kDeadline);
    // Lost or refused: the handler runs on and its answer is dropped.
    link->send_control(FrameKind::kCancel, cancel.SerializeAsString(), kControlLane, now())
        .IgnoreError();
  }
  counters_->completed->add();
  counters_->call_seconds->observe(absl::ToDoubleSeconds(now() - p.issued));
  runtime()->trace("complete", call_id,
                   result.ok() ? 0 : static_cast<uint64_t>(result.status().code()));
  if (options_.trace != nullptr) {
    options_.trace->call_ended(call_id, p.spec->call.method, result.status());
  }
  if (!result.ok()) {
    counters_->failed->add();
    Status error = result.status();
    if (error_kind(error) == ErrorKind::kSignature) {
      error = annotate(error, absl::StrCat("called as ", p.spec->call.method,
                                           std::string(p.spec->call.signature)));
    }
    // What a handler threw reaches the caller unchanged; what arose here says what was tried.
    if (error_details(error).origin.empty()) {
      error = annotate(error, absl::StrCat("rpc '", p.spec->call.method, "' on '", p.to.name, "'"));
    }
    result = std::move(error);
  }
  if (p.spec->attachments != nullptr) {
    const bool unsent = is_here(p.state) && p.attempt == 0 && !p.maybe_taken;
    p.spec->attachments->end(delivery.value_or(p.answered ? Delivery::kDelivered
                                               : unsent   ? Delivery::kNotDelivered
                                                          : Delivery::kUnknown),
                             result.status());
  }
  // The arguments are given back first: the caller may count on their bytes when it hears of the
  // end.
  p.spec = nullptr;
  p.small_charge.reset();
  p.large_charge = nullptr;
  p.done(std::move(result));
  for (ReplyFn& tell : ended) tell(Payload());
  if (wake) idle_changed_.notify_all();
  if (link != nullptr) close_if_drained(link);
}

void Agent::arm_locked(absl::Time deadline) {
  // Deadlines mostly come in order, so the timer is rarely moved. It is never disarmed: it finds
  // nothing due and sleeps on.
  if (deadline >= armed_ || deadline_timer_ == nullptr) return;
  armed_ = deadline;
  deadline_timer_->arm(deadline);
}

void Agent::on_deadline_timer() {
  std::vector<DeadlineKey> due;
  std::vector<std::shared_ptr<Job>> late_handlers;
  std::vector<std::shared_ptr<Job>> unstarted;
  std::vector<uint64_t> again;
  std::vector<std::pair<uint64_t, Status>> late_calls;
  {
    MutexLock lock(&mutex_);
    const absl::Time at = now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= at) {
      const DeadlineKey key = deadlines_.begin()->second;
      deadlines_.erase(deadlines_.begin());
      if (key.again) {
        if (const auto it = pending_.find(key.call_id); it != pending_.end()) {
          it->second.asked_again.reset();
        }
        again.push_back(key.call_id);
      } else if (key.serving) {
        auto it = serving_.find({key.incarnation, key.call_id});
        if (it == serving_.end()) continue;
        Serving& s = it->second;
        s.has_deadline = false;
        if (at >= s.job->deadline) {
          late_handlers.push_back(s.job);
          continue;
        }
        unstarted.push_back(s.job);  // if so it is
        s.in_deadlines = deadlines_.emplace(s.job->deadline, key);
        s.has_deadline = true;
      } else {
        auto it = pending_.find(key.call_id);
        if (it == pending_.end()) continue;
        Pending& p = it->second;
        p.has_deadline = false;
        std::string where = p.state == CallState::kSent ? "no answer came" : "it could not be sent";
        if (p.state != CallState::kSent && !p.refused.ok()) {
          // Here or there: the message names the budget and its worker.
          absl::StrAppend(&where, ", for lack of room: ", std::string(p.refused.message()));
        }
        auto peer = peers_.find(p.to.incarnation);
        if (p.state != CallState::kSent && peer != peers_.end() &&
            !peer->second->last_dial_error.ok()) {
          absl::StrAppend(&where, ", last attempt to connect: ",
                          std::string(peer->second->last_dial_error.message()));
        }
        late_calls.emplace_back(
            key.call_id,
            make_error(ErrorKind::kDeadline,
                       absl::StrCat("deadline of ", absl::FormatDuration(p.deadline - p.issued),
                                    " exceeded: ", where)));
      }
    }
    armed_ = absl::InfiniteFuture();
    if (!deadlines_.empty()) arm_locked(deadlines_.begin()->first);
  }
  for (const auto& job : unstarted) give_up(job);
  for (const auto& job : late_handlers) cancel_job(job, CancelReason::kDeadline);
  for (auto& [id, why] : late_calls) complete(id, why, true);
  for (const uint64_t id : again) transmit(id);
}

}  // namespace weft::internal
