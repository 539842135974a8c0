// What rides on calls, at the caller: creations, uses, and RRefs inside arguments.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "weft/rref/internal/service.h"

namespace weft::internal {
namespace {

// Delay of the first check for RRefs in answers that are unconfirmed.
constexpr absl::Duration kFirstLook = absl::Seconds(5);

CallEnd outcome_of(Delivery delivery) {
  switch (delivery) {
    case Delivery::kDelivered: return CallEnd::kDelivered;
    case Delivery::kNotDelivered: return CallEnd::kNotDelivered;
    case Delivery::kUnknown: break;
  }
  return CallEnd::kUnknown;
}

}  // namespace

class RRefService::RequestAttachment final : public Attachment {
 public:
  RequestAttachment(std::weak_ptr<RRefService> service, const WorkerKey& self, const WorkerKey& to,
                    const RequestData& data, RRefHandleRef created)
      : Attachment(encode(self, data)),
        service_(std::move(service)),
        to_(to),
        carrier_(data.carrier.has_value() ? data.carrier->number : 0),
        created_(std::move(created)) {}

  void ended(Delivery delivery, const Status& result) override {
    if (carrier_ == 0 && created_ == nullptr) return;
    const auto self = service_.lock();
    if (self == nullptr) return;
    const CallEnd outcome = outcome_of(delivery);
    if (created_ != nullptr && outcome == CallEnd::kDelivered) created_->set_ready();
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

// A use alone changes nothing, so no worker has to learn how it ended.
class RRefService::UseAttachment final : public Attachment {
 public:
  using Attachment::Attachment;
  void ended(Delivery, const Status&) override {}
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
    Outbox& box = outboxes_[key_of(to)];  // for audits
    if (!is_answer) return;
    const absl::Time now = context_.runtime->now();
    box.answers[carrier->number].since = now;
    next_audit_ = std::min(next_audit_, now + kFirstLook);
  });
  return carrier;
}

StatusOr<AttachmentPtr> RRefService::attach(const WorkerInfo& to, const UntypedCall& call) {
  const auto* rider = dynamic_cast<const RRefRider*>(call.rider.get());
  if (rider != nullptr && !rider->use_bytes.empty() && call.arguments.references.empty()) {
    return AttachmentPtr(new UseAttachment(rider->use_bytes));
  }
  RequestData data;
  if (!call.arguments.references.empty()) {
    WEFT_ASSIGN_OR_RETURN(data.carrier, share(to, call.arguments, /*is_answer=*/false));
  }
  if (rider != nullptr) {
    data.creation = rider->creation;
    data.use = rider->use;
  }
  return AttachmentPtr(new RequestAttachment(weak_from_this(), key_of(worker().info()), key_of(to),
                                             data, rider == nullptr ? nullptr : rider->created));
}

void RRefService::arrive_answer(const WorkerInfo& from, Payload& result, std::string_view metadata,
                                Proceed proceed) {
  StatusOr<Carrier> carrier = decode_carrier(key_of(from), metadata);
  if (!carrier.ok()) return proceed(carrier.status());
  receive(key_of(from), *std::move(carrier), &result, std::move(proceed));
}

StatusOr<RRefHandleRef> RRefService::remote(const Destination& to, UntypedCall call,
                                            std::shared_ptr<RRefRider> rider, CreationSite site) {
  WEFT_ASSIGN_OR_RETURN(const WorkerInfo info, worker().try_get_worker_info(to));
  const bool local = info.incarnation == worker().info().incarnation;
  Handle handle;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return closed_error();
    if (rider->target != nullptr) rider->use = protocol().use_of(rider->target->handle());
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
  const RRefHandleRef created = make_handle(handle, /*is_creator=*/true, std::move(site));
  // The rider would keep the handle for as long as its function runs, and it could not be dropped.
  const auto alias =
      std::make_shared<RRefHandle>(std::weak_ptr<RRefService>(), handle, info,
                                   /*is_creator=*/false, CreationSite(), context_.runtime->now());
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

StatusOr<std::shared_ptr<RRefRider>> RRefService::rider_for(const RRefHandleRef& handle) {
  auto rider = std::make_shared<RRefRider>();
  rider->target = handle;
  MutexLock lock(&mutex_);
  Status usable = closed_.ok() ? protocol().check(handle->handle()) : closed_error();
  if (!usable.ok()) return annotate(usable, handle->text());
  rider->use = protocol().use_of(handle->handle());
  // Nothing of it changes while the handle lives.
  std::string& bytes = handle->use_bytes();
  if (bytes.empty()) {
    RequestData data;
    data.use = rider->use;
    bytes = encode(protocol().self(), data);
  }
  rider->use_bytes = bytes;
  return rider;
}

CallHandle RRefService::start_use(const RRefHandleRef& handle, const Destination& owner,
                                  UntypedCall&& call, CallDone done) {
  StatusOr<std::shared_ptr<RRefRider>> rider = rider_for(handle);
  if (!rider.ok()) {
    done(rider.status());
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
  call.rider = *std::move(rider);
  const auto learn = [handle](StatusOr<Payload>* result) {
    if (result->ok()) {
      handle->set_ready();
    } else if (error_kind(result->status()) == ErrorKind::kPeerLost &&
               error_details(result->status()).origin.empty()) {
      *result = annotate(result->status(), absl::StrCat(handle->text(), ": its owner is lost"));
    }
  };
  if (!handle->may_fail()) {
    return start_call(worker(), owner, std::move(call),
                      [learn, done = std::move(done)](StatusOr<Payload> result) mutable {
                        learn(&result);
                        done(std::move(result));
                      });
  }
  auto once = std::make_shared<Once>(std::move(done));
  const uint64_t watch = handle->on_failure([once](const Status& why) { once->fail(why); });
  CallHandle started = start_call(worker(), owner, std::move(call),
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

}  // namespace weft::internal
