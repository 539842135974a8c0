// The service's contexts, and what rides on calls.

#include "weft/dist_autograd/internal/service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/spi/scope_slot.h"

namespace weft {

ServiceFactory dist_autograd_service(DistAutogradServiceOptions options) {
  return [options](const ServiceContext& context) {
    return std::make_shared<internal::DistAutogradService>(context, options);
  };
}

}  // namespace weft

namespace weft::internal {
namespace {

std::string slot_name() { return "@dist_autograd"; }

Status check_devices(const AutogradData& data, const std::vector<at::Tensor>& tensors) {
  if (data.devices.empty()) return absl::OkStatus();
  const size_t wanted = with_gradient(tensors).size();
  if (data.devices.size() == wanted) return absl::OkStatus();
  return make_error(
      ErrorKind::kProtocol,
      absl::StrCat("message ", data.message, " of ", to_string(data.context), " has ", wanted,
                   " tensors that require grad and the devices of ", data.devices.size()));
}

}  // namespace

Status shut_down_error() { return make_error(ErrorKind::kState, "the worker has shut down"); }

DistAutogradService::DistAutogradService(ServiceContext context,
                                         const DistAutogradServiceOptions& options)
    : context_(std::move(context)),
      report_stall_after_(options.report_stall_after.value_or(absl::Seconds(10))) {}

const void* DistAutogradService::scope_key() const {
  const void* key = scope_key_.load(std::memory_order_relaxed);
  if (key == nullptr) scope_key_.store(key = scope_key_of(worker()), std::memory_order_relaxed);
  return key;
}

// ---- contexts ----------------------------------------------------------------------------------

StatusOr<ContextRef> DistAutogradService::make_context() {
  const WorkerKey me = self();
  if (const ContextRef here = current()) {
    return make_error(ErrorKind::kState, absl::StrCat("this thread is in ", to_string(here->id()),
                                                      " already: contexts do not nest"));
  }
  MutexLock lock(&mutex_);
  if (!closed_.ok()) return closed_;
  const AutogradContextId id{me, ++last_context_};
  return contexts_[id] = std::make_shared<ContextState>(id, me);
}

ScopeRef DistAutogradService::scope_of(const ContextRef& context) {
  return scope_with_slot(scope_key(), slot_name(), std::make_shared<Ambient>(Ambient{context}));
}

DistAutogradService::AmbientRef DistAutogradService::ambient() const {
  return std::static_pointer_cast<const Ambient>(find_slot(scope_key(), slot_name()));
}

ContextRef DistAutogradService::current() const {
  const AmbientRef here = ambient();
  return here == nullptr ? nullptr : here->context;
}

ContextRef DistAutogradService::find(const AutogradContextId& id) const {
  MutexLock lock(&mutex_);
  const auto at = contexts_.find(id);
  return at == contexts_.end() ? nullptr : at->second;
}

bool DistAutogradService::was_released(const AutogradContextId& id) const {
  const bool ours = id.creator == self();
  MutexLock lock(&mutex_);
  if (contexts_.contains(id)) return false;
  if (ours) return id.counter <= last_context_;
  const auto released = released_.find(id.creator);
  return gone_.contains(id.creator.incarnation) ||
         (released != released_.end() && released->second.contains(id.counter));
}

ContextRef DistAutogradService::find_or_make(const AutogradContextId& id, const WorkerInfo& with) {
  const WorkerKey me = self();
  MutexLock lock(&mutex_);
  names_.add(with);
  if (const auto at = contexts_.find(id); at != contexts_.end()) return at->second;
  const auto released = released_.find(id.creator);
  if (!closed_.ok() || id.creator == me || gone_.contains(id.creator.incarnation) ||
      (released != released_.end() && released->second.contains(id.counter))) {
    return nullptr;  // CTX-1
  }
  return contexts_[id] = std::make_shared<ContextState>(id, me);
}

std::vector<ContextRef> DistAutogradService::contexts() const {
  std::vector<ContextRef> out;
  MutexLock lock(&mutex_);
  for (const auto& [id, context] : contexts_) out.push_back(context);
  return out;
}

void DistAutogradService::set_leaf_effects(MakeLeafEffect make) {
  MutexLock lock(&mutex_);
  make_effect_ = std::move(make);
}

StatusOr<std::unique_ptr<LeafEffect>> DistAutogradService::make_effect(std::string_view data) {
  MakeLeafEffect make;
  {
    MutexLock lock(&mutex_);
    make = make_effect_;
  }
  if (make == nullptr) return std::unique_ptr<LeafEffect>();
  return make(data);
}

PassTrace* DistAutogradService::trace() const {
  if (trace_known_.load(std::memory_order_acquire)) return trace_.get();
  std::shared_ptr<TraceWriter> writer = trace_of(worker());
  MutexLock lock(&mutex_);
  if (!trace_known_.load(std::memory_order_relaxed)) {
    if (writer != nullptr)
      trace_ = std::make_unique<PassTrace>(std::move(writer), context_.runtime);
    trace_known_.store(true, std::memory_order_release);
  }
  return trace_.get();
}

// ---- what rides on calls -----------------------------------------------------------------------

// Releases that ride on a request.
struct DistAutogradService::Riders {
  std::weak_ptr<DistAutogradService> service{};
  WorkerKey to{};
  std::vector<ReleaseRef> releases{};

  void ended(Delivery delivery) {
    const auto self = service.lock();
    if (self == nullptr) return;
    for (const ReleaseRef& one : std::exchange(releases, {})) {
      if (delivery == Delivery::kDelivered) {
        self->one_released(one);
      } else {
        self->tell_released(one, to);  // it does no harm twice
      }
    }
  }
};

class DistAutogradService::SendAttachment final : public Attachment {
 public:
  SendAttachment(const ContextRef& context, const AutogradData& data, Riders riders)
      : Attachment(encode(with_releases(data, riders))),
        context_(context),
        message_(data.message),
        riders_(std::move(riders)) {}

  // One whose outcome is unknown stays: a pass that does not reach it never asks.
  void ended(Delivery delivery, const Status&) override {
    riders_.ended(delivery);
    if (delivery != Delivery::kNotDelivered || message_ == 0) return;
    if (const ContextRef context = context_.lock()) context->forget(message_);
  }

 private:
  static AutogradData with_releases(AutogradData data, const Riders& riders) {
    Released all;
    for (const ReleaseRef& one : riders.releases) {
      data.released.push_back(one->data.context.counter);
      all.add_below(one->data.released_below, one->data.alive);
    }
    data.released_below = all.below();
    data.alive = all.alive();
    return data;
  }

  const std::weak_ptr<ContextState> context_;
  const uint64_t message_;
  Riders riders_;
};

AttachmentPtr DistAutogradService::record(const Ambient& where, const WorkerInfo& to,
                                          const Payload& payload, bool grad_mode, bool is_request) {
  {
    MutexLock lock(&mutex_);
    names_.add(to);
  }
  expect_more();
  const uint64_t number = last_message_.fetch_add(1) + 1;
  AutogradData data{.context = where.context->id(), .message = number};
  if (!where.context->record(key_of(to), payload.tensors, grad_mode, is_request, where.served,
                             &data.message, &data.devices)) {
    return nullptr;
  }
  Riders riders;
  if (is_request) {
    riders = {weak_from_this(), key_of(to), take_riding(key_of(to))};
    data.within = where.served;
    if (data.message == 0) data.call = number;
  }
  return AttachmentPtr(new SendAttachment(where.context, data, std::move(riders)));
}

bool DistAutogradService::concerns(const UntypedCall&) const { return current() != nullptr; }

StatusOr<AttachmentPtr> DistAutogradService::attach(const WorkerInfo& to, const UntypedCall& call) {
  const AmbientRef here = ambient();
  if (here == nullptr) return AttachmentPtr();
  return record(*here, to, call.arguments, c10::GradMode::is_enabled(), /*is_request=*/true);
}

void DistAutogradService::arrive(IncomingRequest& request, std::string_view metadata,
                                 Proceed proceed) {
  expect_more();
  const StatusOr<AutogradData> data = decode_autograd(metadata);
  if (!data.ok()) return proceed(data.status());
  for (const uint64_t counter : data->released) {
    const AutogradContextId id{key_of(request.context().caller()), counter};
    release_here(
        ReleaseData{.context = id, .released_below = data->released_below, .alive = data->alive},
        /*rides=*/false, [](const Status&) {});
  }
  std::vector<at::Tensor>* const tensors = &request.arguments().tensors;
  ContextRef context = find_or_make(data->context, request.context().caller());
  if (context == nullptr) {
    detach(tensors);  // CTX-3
    // So that the answer, too, says that it has been released.
    context = std::make_shared<ContextState>(data->context, self());
    context->close(context->release_error());
  } else if (data->message > 0) {
    if (Status wrong = check_devices(*data, *tensors); !wrong.ok()) return proceed(wrong);
    claim(data->context, key_of(request.context().caller()), data->message, data->devices, tensors);
  }
  const uint64_t number = data->message > 0 ? data->message : data->call;
  request.set_slot(slot_name(), std::make_shared<Ambient>(Ambient{
                                    std::move(context), order_within(data->within, number)}));
  proceed(absl::OkStatus());
}

StatusOr<AttachmentPtr> DistAutogradService::attach_answer(IncomingRequest& request,
                                                           const Payload& result) {
  const auto& slots = request.context().scope()->slots;
  const auto slot = slots.find(slot_name());
  if (slot == slots.end() || with_gradient(result.tensors).empty()) return AttachmentPtr();
  const auto where = std::static_pointer_cast<const Ambient>(slot->second);
  AttachmentPtr recorded = record(*where, request.context().caller(), result, /*grad_mode=*/true,
                                  /*is_request=*/false);
  if (recorded != nullptr) return recorded;
  // Released: the caller may not know it yet, and is not to take the tensors for leaves.
  return AttachmentPtr(
      new SendAttachment(where->context, AutogradData{.context = where->context->id()}, {}));
}

void DistAutogradService::arrive_answer(const WorkerInfo& from, Payload& result,
                                        std::string_view metadata, Proceed proceed) {
  const StatusOr<AutogradData> data = decode_autograd(metadata);
  if (!data.ok()) return proceed(data.status());
  if (data->message == 0 || find(data->context) == nullptr) {
    detach(&result.tensors);  // CTX-3
  } else {
    if (Status wrong = check_devices(*data, result.tensors); !wrong.ok()) return proceed(wrong);
    claim(data->context, key_of(from), data->message, data->devices, &result.tensors);
  }
  proceed(absl::OkStatus());
}

// ---- Service -----------------------------------------------------------------------------------

void DistAutogradService::on_worker_gone(const WorkerInfo& info, const Status& why) {
  const WorkerKey gone = key_of(info);
  bool rode = false;
  std::vector<ContextRef> orphans;
  {
    MutexLock lock(&mutex_);
    gone_.add(gone.incarnation);
    // From now on membership no longer knows its name, which errors of passes are to tell.
    names_.add_gone(info);
    rode = ridden_.erase(gone) > 0;
    released_.erase(gone);
    for (auto at = contexts_.begin(); at != contexts_.end();) {
      if (at->first.creator != gone) {
        ++at;
        continue;
      }
      orphans.push_back(std::move(at->second));
      at = contexts_.erase(at);
    }
  }
  for (const ContextRef& context : contexts()) {
    for (const auto& pass : context->passes()) pass->on_gone(gone, why);
  }
  for (const ContextRef& orphan : orphans) orphan->close(why);
  if (rode) tell_what_is_left();  // CTX-5
}

void DistAutogradService::on_shutdown(const Status& why) {
  std::vector<ContextRef> all;
  std::unique_ptr<Timer> timer;  // its end waits for its callback
  std::map<WorkerKey, OutQueue> out;
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    for (auto& [to, queue] : out_) out[to].waiting.swap(queue.waiting);
    timer = std::move(timer_);
    closed_ = why.ok() ? shut_down_error() : why;
    for (auto& [id, context] : std::exchange(contexts_, {})) all.push_back(std::move(context));
    again_.clear();
    riding_.clear();
  }
  // This service is held by passes that it holds: here the cycle ends.
  const Status left = make_error(ErrorKind::kPeerLost,
                                 absl::StrCat("worker '", worker().name(), "' has left the job"));
  for (const ContextRef& context : all) context->close(left);
}

Service::Load DistAutogradService::load() const {
  uint64_t pending = 0;
  for (const ContextRef& context : contexts()) {
    pending += static_cast<uint64_t>(context->counts().running);
  }
  MutexLock lock(&mutex_);
  return Load{pending + static_cast<uint64_t>(releases_), 0};
}

}  // namespace weft::internal
