// What rides on calls: creations, uses, and RRefs inside values, at both ends.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {
namespace {

// So long may a function run, or a handler with RRefs among its arguments, before the other side is
// told what their answers would have said.
constexpr absl::Duration kFlushAfter = absl::Milliseconds(20);
// The first look for RRefs in answers that nobody has confirmed.
constexpr absl::Duration kFirstLook = absl::Seconds(5);

WorkerKey key_of(const WorkerInfo& info) {
  return WorkerKey{WorkerId(info.id), Incarnation(info.incarnation)};
}

CallEnd outcome_of(Delivery delivery) {
  switch (delivery) {
    case Delivery::kDelivered: return CallEnd::kDelivered;
    case Delivery::kNotDelivered: return CallEnd::kNotDelivered;
    case Delivery::kUnknown: break;
  }
  return CallEnd::kUnknown;
}

}  // namespace

// ---- the caller --------------------------------------------------------------------------------

class RRefService::RequestAttachment final : public Attachment {
 public:
  RequestAttachment(std::weak_ptr<RRefService> service, const WorkerKey& to,
                    const RequestData& data, RRefHandleRef created)
      : Attachment(encode(data)),
        service_(std::move(service)),
        to_(to),
        carrier_(data.carrier.has_value() ? data.carrier->number : 0),
        created_(std::move(created)) {}

  void ended(Delivery delivery, const Status& result) override {
    const auto self = service_.lock();
    if (self == nullptr) return;
    const CallEnd outcome = outcome_of(delivery);
    if (created_ != nullptr && outcome == CallEnd::kDelivered) created_->set_ready();
    if (carrier_ == 0 && created_ == nullptr) return;
    self->with([&](RRefProtocol& p, Effects& out) {
      if (carrier_ != 0) p.carrier_ended(to_, carrier_, outcome, out);
      if (created_ == nullptr || created_->is_owner()) return;
      p.creation_ended(created_->handle().fork, outcome, result, out);
    });
    if (created_ != nullptr && created_->is_owner() && outcome != CallEnd::kDelivered) {
      self->local_creation_ended(created_->handle().rref, result);
    }
  }

 private:
  const std::weak_ptr<RRefService> service_;
  const WorkerKey to_;
  const uint64_t carrier_;
  const RRefHandleRef created_;  // by this call
};

// An answer's RRefs count until somebody proves the opposite: its receiver's accept, or an audit.
class RRefService::AnswerAttachment final : public Attachment {
 public:
  AnswerAttachment(std::weak_ptr<RRefService> service, const WorkerKey& to, const Carrier& carrier)
      : Attachment(encode(carrier)),
        service_(std::move(service)),
        to_(to),
        carrier_(carrier.number) {}

  void ended(Delivery delivery, const Status&) override {
    if (const auto self = service_.lock()) self->answer_ended(to_, carrier_, delivery);
  }

 private:
  const std::weak_ptr<RRefService> service_;
  const WorkerKey to_;
  const uint64_t carrier_;
};

bool RRefService::concerns(const UntypedCall& call) const {
  return !call.arguments.references.empty() ||
         (call.rider != nullptr && dynamic_cast<const RRefRider*>(call.rider.get()) != nullptr);
}

StatusOr<Carrier> RRefService::share(const WorkerInfo& to, const Payload& payload, bool is_answer) {
  std::vector<Handle> handles;
  std::vector<const RRefHandle*> all;
  for (const auto& reference : payload.references) {
    const auto* handle = dynamic_cast<const RRefHandle*>(reference.get());
    if (handle == nullptr) {
      return make_error(ErrorKind::kInternal, "a reference in a message that is no RRef");
    }
    if (const auto service = handle->service(); service.get() != this) {
      return make_error(
          service == nullptr ? ErrorKind::kState : ErrorKind::kInvalidArgument,
          absl::StrCat(
              handle->text(), " in a message of worker '", worker().name(), "' of job ",
              worker().job_id(), " to '", to.name, "': ",
              service == nullptr
                  ? std::string("it was held by a worker that is gone")
                  : absl::StrCat("it is held by worker '", service->worker().name(), "' of job ",
                                 service->worker().job_id(), ", which alone can pass it on")));
    }
    handles.push_back(handle->handle());
    all.push_back(handle);
  }
  StatusOr<Carrier> carrier = make_error(ErrorKind::kState, "the worker has shut down");
  with([&](RRefProtocol& p, Effects&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (size_t i = 0; i < handles.size(); ++i) {
      const Status usable = p.check(handles[i]);
      if (usable.ok()) continue;
      carrier = annotate(usable, all[i]->text());
      return;
    }
    carrier = p.share(key_of(to), handles, is_answer);
    if (!carrier.ok()) return;
    outboxes_[key_of(to)];  // for audits
    if (is_answer) next_audit_ = std::min(next_audit_, context_.runtime->now() + kFirstLook);
  });
  return carrier;
}

StatusOr<AttachmentPtr> RRefService::attach(const WorkerInfo& to, const UntypedCall& call) {
  const auto* rider = dynamic_cast<const RRefRider*>(call.rider.get());
  RequestData data;
  if (!call.arguments.references.empty()) {
    WEFT_ASSIGN_OR_RETURN(data.carrier, share(to, call.arguments, /*is_answer=*/false));
  }
  if (rider != nullptr) {
    data.creation = rider->creation;
    if (rider->target != nullptr) {
      MutexLock lock(&mutex_);
      if (!closed_.ok()) return closed_error();
      data.use = protocol().use_of(rider->target->handle());
    }
  }
  return AttachmentPtr(new RequestAttachment(weak_from_this(), key_of(to), data,
                                             rider == nullptr ? nullptr : rider->created));
}

void RRefService::arrive_answer(const WorkerInfo& from, Payload& result, std::string_view metadata,
                                Proceed proceed) {
  StatusOr<Carrier> carrier = decode_carrier(key_of(from), metadata);
  if (!carrier.ok()) return proceed(carrier.status());
  receive(key_of(from), *std::move(carrier), &result, std::move(proceed));
}

StatusOr<RRefHandleRef> RRefService::remote(const Destination& to, UntypedCall call,
                                            std::shared_ptr<RRefRider> rider, CallSite site) {
  WEFT_ASSIGN_OR_RETURN(const WorkerInfo info, worker().try_get_worker_info(to));
  const bool local = info.incarnation == worker().info().incarnation;
  Handle handle;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_error();
    if (local) {
      handle = protocol().create_local(/*running=*/true);
      local_creations_.insert(handle.rref);
      rider->creation = Creation{handle.rref, ForkId(), 0, {}};
    } else {
      WEFT_ASSIGN_OR_RETURN(rider->creation, protocol().remote(key_of(info)));
      outboxes_[key_of(info)];
      handle = Handle{rider->creation->rref, rider->creation->fork, key_of(info)};
    }
  }
  const RRefHandleRef created = make_handle(handle, /*is_creator=*/true, site);
  // The rider would keep the handle for as long as its function runs: nobody could drop it.
  const auto alias =
      std::make_shared<RRefHandle>(std::weak_ptr<RRefService>(), handle, info,
                                   /*is_creator=*/false, CallSite(), context_.runtime->now());
  rider->created = alias;
  call.rider = rider;
  call.options.retry = Retry::kAtMostOnce;  // over a new connection, when one breaks
  start_call(worker(), info, std::move(call),
             [weak = weak_from_this(), weak_handle = std::weak_ptr<const RRefHandle>(created),
              alias, handle](StatusOr<Payload> result) {
               if (alias->ready()) {
                 if (const auto held = weak_handle.lock()) held->set_ready();
               }
               const auto self = weak.lock();
               if (result.ok() || self == nullptr) return;
               // For a call that failed before anything was attached; else it has been said.
               if (alias->is_owner()) {
                 return self->local_creation_ended(handle.rref, result.status());
               }
               self->with([&](RRefProtocol& p, Effects& out) {
                 p.creation_ended(handle.fork, CallEnd::kNotDelivered, result.status(), out);
               });
             });
  return created;
}

CallHandle RRefService::start_use(const RRefHandleRef& handle, UntypedCall call, CallDone done) {
  if (Status usable = check(*handle); !usable.ok()) {
    done(annotate(usable, handle->text()));
    return CallHandle();
  }
  // Ends with the call, or with the failure of the handle's creation, which also cancels the call:
  // that would hold the handle.
  class Once {
   public:
    explicit Once(CallDone done) : done_(std::move(done)) {}
    bool end(StatusOr<Payload> result) {
      if (ended_.exchange(true)) return false;
      std::exchange(done_, nullptr)(std::move(result));
      return true;
    }
    void fail(const Status& why) {
      if (end(StatusOr<Payload>(why))) cancel();
    }
    void started(CallHandle call) {
      {
        MutexLock lock(&mutex_);
        call_ = std::move(call);
      }
      if (ended_.load()) cancel();  // of a call that has ended: nothing
    }

   private:
    void cancel() {
      CallHandle call;
      {
        MutexLock lock(&mutex_);
        call = std::exchange(call_, CallHandle());
      }
      call.cancel();
    }
    std::atomic<bool> ended_{false};
    CallDone done_;
    Mutex mutex_;
    CallHandle call_ ABSL_GUARDED_BY(mutex_);
  };
  auto rider = std::make_shared<RRefRider>();
  rider->target = handle;
  call.rider = std::move(rider);
  const Destination to(handle->owner());
  const auto learn = [handle](StatusOr<Payload>* result) {
    if (result->ok()) {
      handle->set_ready();
    } else if (error_kind(result->status()) == ErrorKind::kPeerLost &&
               error_details(result->status()).origin.empty()) {
      *result = annotate(result->status(), absl::StrCat(handle->text(), ": its owner is lost"));
    }
  };
  if (!handle->may_fail()) {
    return start_call(worker(), to, std::move(call),
                      [learn, done = std::move(done)](StatusOr<Payload> result) mutable {
                        learn(&result);
                        done(std::move(result));
                      });
  }
  auto once = std::make_shared<Once>(std::move(done));
  const uint64_t watch = handle->on_failure([once](const Status& why) { once->fail(why); });
  CallHandle started = start_call(worker(), to, std::move(call),
                                  [once, learn, handle, watch](StatusOr<Payload> result) {
                                    if (watch != 0) handle->remove(watch);
                                    learn(&result);
                                    once->end(std::move(result));
                                  });
  if (watch != 0) {
    once->started(started);
    // It may have failed before it was watched.
    if (const Status now = check(*handle); !now.ok()) once->fail(now);
  }
  return started;
}

// ---- the callee --------------------------------------------------------------------------------

struct RRefService::Request {
  Request(IncomingRequest& r, const WorkerKey& f, RequestData d, Proceed p)
      : request(r), from(f), data(std::move(d)), proceed(std::move(p)) {}

  IncomingRequest& request;  // lives until it has ended, which is after proceed
  const WorkerKey from;
  RequestData data;
  Proceed proceed;  // whoever sets `ended` calls it
  std::atomic<bool> ended{false};
  std::atomic<uint64_t> token{0};  // of its use
};

void RRefService::arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) {
  const WorkerKey from = key_of(request.context().caller());
  StatusOr<RequestData> data = decode_request(from, metadata);
  if (!data.ok()) return proceed(data.status());
  auto state = std::make_shared<Request>(request, from, *std::move(data), std::move(proceed));
  begin(state);
  // A request that was let pass at once needs no ear for its cancellation.
  if (!state->ended.load()) {
    request.context().on_cancel([weak = weak_from_this(), state] {
      if (auto self = weak.lock()) self->give_up(state);
    });
  }
}

void RRefService::begin(const std::shared_ptr<Request>& state) {
  Status refused;
  const RequestData& data = state->data;
  if (!data.creation.has_value() && !data.carrier.has_value()) return use_target(state);
  const bool local = data.creation.has_value() && data.creation->fork.is_zero();
  bool arm = false;
  with([&](RRefProtocol& p, Effects&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    arm = true;
    if (data.carrier.has_value() &&
        !carriers_.insert({state->from, data.carrier->number}).second) {  // SRV-1
      refused = make_error(ErrorKind::kProtocol,
                           absl::StrCat("carrier ", data.carrier->number, " of ",
                                        to_string(state->from), " has arrived before"));
      return;
    }
    if (!data.creation.has_value()) return;
    const RRefId rref = data.creation->rref;
    const bool start = local ? state->from == p.self() && local_creations_.erase(rref) > 0
                             : p.create(state->from, *data.creation) == CreateVerdict::kStart;
    if (!start) {
      refused = make_error(
          ErrorKind::kCancelled,
          absl::StrCat(to_string(rref), " is not created: its creator, ", to_string(state->from),
                       ", has done so before or given "
                       "it up"));
      if (data.carrier.has_value()) carriers_.erase({state->from, data.carrier->number});
    } else if (!local) {
      flushes_.push_back(Flush{context_.runtime->now() + kFlushAfter, rref, {}, 0});
    }
  });
  if (!arm) refused = make_error(ErrorKind::kState, "the worker has shut down");
  if (!refused.ok()) {
    if (!state->ended.exchange(true)) state->proceed(refused);
    return;
  }
  if (data.creation.has_value()) {
    const RRefId rref = data.creation->rref;
    state->request.keep_result([weak = weak_from_this(), rref](StatusOr<KeptObject> result) {
      if (auto self = weak.lock()) self->function_ended(rref, std::move(result));
    });
  }
  if (!data.carrier.has_value()) return use_target(state);
  state->request.on_end([weak = weak_from_this(), from = state->from, n = data.carrier->number] {
    if (const auto self = weak.lock()) self->request_ended(from, n);
  });
  receive(state->from, *data.carrier, &state->request.arguments(),
          [this, state](const Status& status) {
            if (!status.ok()) return end(state, status);
            use_target(state);
          });
}

void RRefService::request_ended(const WorkerKey& from, uint64_t carrier) {
  with([&](RRefProtocol& p, Effects&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    carriers_.erase({from, carrier});
    p.answered(from, carrier);
  });
}

void RRefService::use_target(const std::shared_ptr<Request>& state) {
  if (!state->data.use.has_value()) return end(state, absl::OkStatus());
  const Use use = *state->data.use;
  bool open = false;
  std::optional<Status> at_once;
  RRefValueRef value;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    open = true;
    const uint64_t token = ++last_token_;
    p.use(token, state->from, use, out);
    // Nearly always the value is there, and nothing needs to be remembered.
    auto* const done = out.empty() ? nullptr : std::get_if<UseDone>(&out.back());
    if (done != nullptr && done->token == token) {
      at_once = std::move(done->status);
      value = find_value_locked(use.rref);
      out.pop_back();
      return;
    }
    state->token.store(token);
    uses_[token] =
        ParkedUse{use.rref, /*local=*/false, [this, state, rref = use.rref](Status status) {
                    RRefValueRef later;
                    if (status.ok()) {
                      MutexLock lock(&mutex_);
                      later = find_value_locked(rref);
                    }
                    set_target(state, std::move(status), later);
                  }};
  });
  if (!open) end(state, make_error(ErrorKind::kState, "the worker has shut down"));
  if (at_once.has_value()) set_target(state, *std::move(at_once), value);
}

void RRefService::set_target(const std::shared_ptr<Request>& state, Status status,
                             const RRefValueRef& value) {
  if (status.ok() && value == nullptr) {
    status =
        make_error(ErrorKind::kState, absl::StrCat(to_string(state->data.use->rref), " is gone"));
  }
  if (!status.ok()) return end(state, std::move(status));
  TargetObject target;
  target.turns = value->turns;
  if (state->request.method().name == kFetchMethod) {
    target.object = std::const_pointer_cast<RRefValue>(value);
  } else {
    target.object = value->kept.object;
    target.class_name = value->class_name;
  }
  state->request.set_target(std::move(target));
  end(state, absl::OkStatus());
}

void RRefService::end(const std::shared_ptr<Request>& state, Status status) {
  if (state->ended.exchange(true)) return;
  // A creation that cannot begin ends with the error that its call would have had.
  if (!status.ok() && state->data.creation.has_value()) {
    function_ended(state->data.creation->rref, status);
  }
  std::exchange(state->proceed, nullptr)(std::move(status));
}

void RRefService::give_up(const std::shared_ptr<Request>& state) {
  if (state->ended.load()) return;
  OnArrival arrival;
  OnUse use;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (state->data.carrier.has_value()) {
      const ArrivalKey key{state->from, state->data.carrier->number};
      auto it = arrivals_.find(key);
      if (it != arrivals_.end() && p.cancel_arrival(key.first, key.second)) {
        arrival = std::move(it->second);
        arrivals_.erase(it);
      }
    }
    auto it = uses_.find(state->token.load());
    if (it != uses_.end()) {
      p.cancel_use(it->first, it->second.rref, out);
      use = std::move(it->second.done);
      uses_.erase(it);
    }
  });
  if (arrival == nullptr && use == nullptr) return;
  // The request lives on: what we hold now is what ends it.
  const CallContext& call = state->request.context();
  const bool late = call.cancel_reason() == CancelReason::kDeadline;
  const Status why = make_error(
      late ? ErrorKind::kDeadline : ErrorKind::kCancelled,
      absl::StrCat(
          late ? absl::StrCat("deadline of ", absl::FormatDuration(call.remaining_at_start()),
                              " exceeded while the call waited for ")
               : "the call was given up while it waited for ",
          use != nullptr ? to_string(state->data.use->rref) : std::string("its RRefs")));
  if (arrival != nullptr) return arrival(why);
  use(why);
}

void RRefService::receive(const WorkerKey& from, Carrier carrier, Payload* payload,
                          OnArrival done) {
  const ArrivalKey key{from, carrier.number};
  bool begun = false;
  bool known = false;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const WorkerKey self = p.self();
    begun = true;
    known = arrivals_.contains(key);
    if (known) return;
    outboxes_[from];  // a peer of ours from now on
    if (!carrier.is_answer) {
      const absl::Time due = context_.runtime->now() + kFlushAfter;
      flushes_.push_back(Flush{due, RRefId(), from, carrier.number});
    }
    arrivals_[key] = [this, self, payload, carrier, done = std::move(done)](Status status) mutable {
      if (status.ok()) {
        for (const Handle& fork : carrier.forks) {
          const Handle ours = fork.owner == self ? Handle{fork.rref, ForkId(), self} : fork;
          payload->references.push_back(make_handle(ours, /*is_creator=*/false, CallSite()));
        }
      }
      done(std::move(status));
    };
    p.receive(from, carrier, out);
  });
  if (!begun) return done(make_error(ErrorKind::kState, "the worker has shut down"));
  if (known) {
    done(make_error(ErrorKind::kProtocol, absl::StrCat("carrier ", carrier.number, " of ",
                                                       to_string(from), " has arrived before")));
  }
}

StatusOr<AttachmentPtr> RRefService::attach_answer(IncomingRequest& request,
                                                   const Payload& result) {
  if (result.references.empty()) return AttachmentPtr();
  const WorkerInfo& to = request.context().caller();
  WEFT_ASSIGN_OR_RETURN(const Carrier carrier, share(to, result, /*is_answer=*/true));
  // The attachment's end takes it out again.
  {
    MutexLock lock(&mutex_);
    outboxes_[key_of(to)].answers[carrier.number] = context_.runtime->now();
  }
  return AttachmentPtr(new AnswerAttachment(weak_from_this(), key_of(to), carrier));
}

void RRefService::answer_ended(const WorkerKey& to, uint64_t carrier, Delivery delivery) {
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto box = outboxes_.find(to);
    if (box != outboxes_.end()) box->second.answers.erase(carrier);
    if (delivery == Delivery::kNotDelivered) {
      p.carrier_ended(to, carrier, CallEnd::kNotDelivered, out);
    } else if (box != outboxes_.end() && box->second.ask_again) {
      p.audit_answers(to, answers_to_ask_locked(to), out);
      box->second.ask_again = !box->second.answers.empty();
    }
  });
}

void RRefService::function_ended(const RRefId& rref, StatusOr<KeptObject> result) {
  const Status status = result.status();
  RRefValueRef value = result.ok() ? make_value(*std::move(result)) : nullptr;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (value != nullptr) values_[rref] = std::move(value);
    p.function_ended(rref, status, out);
  });
}

void RRefService::local_creation_ended(const RRefId& rref, const Status& why) {
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (local_creations_.erase(rref) > 0) p.function_ended(rref, why, out);
  });
}

}  // namespace weft::internal
