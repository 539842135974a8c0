// What rides on calls, at the callee: requests wait for their RRefs and for the object that they
// use, and RRefs inside values, both ways, are taken in here.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {
namespace {

// So long may a function run, or a handler with RRefs among its arguments, before the other side is
// told what their answers would have said.
constexpr absl::Duration kFlushAfter = absl::Milliseconds(20);

Status point_at(IncomingRequest& request, const StatusOr<RRefValueRef>& found) {
  if (!found.ok()) return found.status();
  const RRefValueRef& value = *found;
  TargetObject target;
  if (request.method().name == kCreationMethod) {  // that it is there is all: it waits for no turn
    target.object = std::const_pointer_cast<RRefValue>(value);
    request.set_target(std::move(target));
    return absl::OkStatus();
  }
  target.turns = value->turns;
  target.after = value->kept.after;
  if (request.method().name == kFetchMethod) {
    target.object = std::const_pointer_cast<RRefValue>(value);
  } else {
    target.object = value->kept.object;
    target.class_name = value->class_name;
  }
  request.set_target(std::move(target));
  return absl::OkStatus();
}

}  // namespace

// Goes with the frames of an answer, and says when they are gone.
class RRefService::OnItsWay {
 public:
  OnItsWay(std::weak_ptr<RRefService> service, std::shared_ptr<Executor> executor,
           const WorkerKey& to, uint64_t carrier)
      : service_(std::move(service)), executor_(std::move(executor)), to_(to), carrier_(carrier) {}
  ~OnItsWay() {
    // An executor that takes nothing more is that of a worker that has shut down.
    (void)executor_->post([service = service_, to = to_, carrier = carrier_] {
      if (const auto self = service.lock()) self->answer_left(to, carrier);
    });
  }
  OnItsWay(const OnItsWay&) = delete;
  OnItsWay& operator=(const OnItsWay&) = delete;

 private:
  const std::weak_ptr<RRefService> service_;
  const std::shared_ptr<Executor> executor_;
  const WorkerKey to_;
  const uint64_t carrier_;
};

// An answer's RRefs count until the opposite is proved: by its receiver's accept, or an audit.
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
  std::shared_ptr<const void> on_its_way() override {
    const auto self = service_.lock();
    if (self == nullptr) return nullptr;
    self->answer_leaves(to_, carrier_);
    return std::make_shared<OnItsWay>(service_, self->context_.executor, to_, carrier_);
  }

 private:
  const std::weak_ptr<RRefService> service_;
  const WorkerKey to_;
  const uint64_t carrier_;
};

struct RRefService::Request {
  Request(IncomingRequest& r, const WorkerKey& f, RequestData d, Proceed p)
      : request(r), from(f), data(std::move(d)), proceed(std::move(p)) {}

  IncomingRequest& request;  // lives until it has ended, which is after proceed
  const WorkerKey from;
  RequestData data;
  Proceed proceed;  // called by the thread that sets `ended`
  std::atomic<bool> ended{false};
  std::atomic<uint64_t> token{0};  // of its use
};

void RRefService::arrive(IncomingRequest& request, std::string_view metadata, Proceed proceed) {
  const WorkerKey from = key_of(request.context().caller());
  StatusOr<RequestData> data = decode_request(from, metadata);
  if (!data.ok()) return proceed(data.status());
  if (data->use.has_value() && !data->creation.has_value() && !data->carrier.has_value()) {
    // A method call: nearly always its object is there, and nothing needs to be remembered.
    if (std::optional<Status> at_once = use_now(request, from, *data->use)) {
      return proceed(*std::move(at_once));
    }
  }
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
  if (std::optional<Status> at_once = use_now(state->request, state->from, use)) {
    return end(state, *std::move(at_once));
  }
  bool open = false;
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    open = true;
    const uint64_t token = ++last_token_;
    state->token.store(token);
    uses_[token] = ParkedUse{use.rref, /*local=*/false, [this, state, use](Status status) {
                               if (status.ok()) {
                                 status = point_at(state->request, value_for_use(use.rref));
                               }
                               end(state, std::move(status));
                             }};
    p.use(token, state->from, use, out);
  });
  if (!open) {
    Status leaving;
    {
      MutexLock lock(&mutex_);
      leaving = leaving_error();
    }
    end(state, std::move(leaving));
  }
}

std::optional<Status> RRefService::use_now(IncomingRequest& request, const WorkerKey& from,
                                           const Use& use) {
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return std::nullopt;
    const std::optional<Status> result = protocol().use_if_ready(from, use);
    if (!result.has_value() || !result->ok()) return result;
  }
  return point_at(request, value_for_use(use.rref));
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
                              " exceeded on worker '", context_.worker->name(),
                              "' while the call waited for ")
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
          payload->references.push_back(make_handle(ours, /*is_creator=*/false, CreationSite()));
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
  return AttachmentPtr(new AnswerAttachment(weak_from_this(), key_of(to), carrier));
}

void RRefService::answer_ended(const WorkerKey& to, uint64_t carrier, Delivery delivery) {
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto box = outboxes_.find(to);
    if (delivery == Delivery::kNotDelivered) {
      if (box != outboxes_.end()) box->second.answers.erase(carrier);
      return p.carrier_ended(to, carrier, CallEnd::kNotDelivered, out);
    }
    if (box == outboxes_.end()) return;
    const auto answer = box->second.answers.find(carrier);
    if (answer == box->second.answers.end()) return;
    answer->second.ended = true;
    if (answer->second.on_its_way == 0) forget_answer_locked(p, to, carrier, out);
  });
}

void RRefService::answer_leaves(const WorkerKey& to, uint64_t carrier) {
  MutexLock lock(&mutex_);
  const auto box = outboxes_.find(to);
  if (box == outboxes_.end()) return;
  const auto answer = box->second.answers.find(carrier);
  if (answer != box->second.answers.end()) ++answer->second.on_its_way;
}

void RRefService::answer_left(const WorkerKey& to, uint64_t carrier) {
  with([&](RRefProtocol& p, Effects& out) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto box = outboxes_.find(to);
    if (box == outboxes_.end()) return;
    const auto answer = box->second.answers.find(carrier);
    if (answer == box->second.answers.end()) return;
    answer->second.since = context_.runtime->now();
    if (--answer->second.on_its_way > 0 || !answer->second.ended) return;
    forget_answer_locked(p, to, carrier, out);
  });
}

void RRefService::forget_answer_locked(RRefProtocol& p, const WorkerKey& to, uint64_t carrier,
                                       Effects& out) {
  Outbox& box = outboxes_[to];
  box.answers.erase(carrier);
  if (!box.ask_again) return;
  p.audit_answers(to, answers_to_ask_locked(to), out);
  box.ask_again = !box.answers.empty();
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
