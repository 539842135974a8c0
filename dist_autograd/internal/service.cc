// The service's contexts, and what rides on calls.

#include "weft/dist_autograd/internal/service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "weft/dist_autograd/service.h"
#include "weft/rpc/scope_slot.h"

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
  return scope_with_slot(scope_key(), slot_name(), context);
}

ContextRef DistAutogradService::current() const {
  return std::static_pointer_cast<ContextState>(find_slot(scope_key(), slot_name()));
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
  names_.try_emplace(key_of(with), with.name);
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

// ---- what rides on calls -----------------------------------------------------------------------

class DistAutogradService::SendAttachment final : public Attachment {
 public:
  SendAttachment(const ContextRef& context, uint64_t message)
      : Attachment(encode(AutogradData{context->id(), message})),
        context_(context),
        message_(message) {}

  // One whose outcome is unknown stays: a pass that does not reach it never asks.
  void ended(Delivery delivery, const Status&) override {
    if (delivery != Delivery::kNotDelivered || message_ == 0) return;
    if (const ContextRef context = context_.lock()) context->forget(message_);
  }

 private:
  const std::weak_ptr<ContextState> context_;
  const uint64_t message_;
};

AttachmentPtr DistAutogradService::record(const ContextRef& context, const WorkerInfo& to,
                                          const Payload& payload, bool grad_mode) {
  {
    MutexLock lock(&mutex_);
    names_.try_emplace(key_of(to), to.name);
  }
  uint64_t message = last_message_.fetch_add(1) + 1;
  if (!context->record(key_of(to), payload.tensors, grad_mode, &message)) return nullptr;
  return AttachmentPtr(new SendAttachment(context, message));
}

bool DistAutogradService::concerns(const UntypedCall&) const { return current() != nullptr; }

StatusOr<AttachmentPtr> DistAutogradService::attach(const WorkerInfo& to, const UntypedCall& call) {
  const ContextRef context = current();
  if (context == nullptr) return AttachmentPtr();
  return record(context, to, call.arguments, c10::GradMode::is_enabled());
}

void DistAutogradService::arrive(IncomingRequest& request, std::string_view metadata,
                                 Proceed proceed) {
  const StatusOr<AutogradData> data = decode_autograd(metadata);
  if (!data.ok()) return proceed(data.status());
  std::vector<at::Tensor>* const tensors = &request.arguments().tensors;
  ContextRef context = find_or_make(data->context, request.context().caller());
  if (context == nullptr) {
    detach(tensors);  // CTX-3
    // So that the answer, too, says that it has been released.
    context = std::make_shared<ContextState>(data->context, self());
    context->close();
  } else if (data->message > 0) {
    claim(data->context, key_of(request.context().caller()), data->message, tensors);
  }
  request.set_slot(slot_name(), std::move(context));
  proceed(absl::OkStatus());
}

StatusOr<AttachmentPtr> DistAutogradService::attach_answer(IncomingRequest& request,
                                                           const Payload& result) {
  const auto& slots = request.context().scope()->slots;
  const auto slot = slots.find(slot_name());
  if (slot == slots.end() || with_gradient(result.tensors).empty()) return AttachmentPtr();
  const auto context = std::static_pointer_cast<ContextState>(slot->second);
  AttachmentPtr recorded = record(context, request.context().caller(), result, /*grad_mode=*/true);
  // Released: the caller may not know it yet, and is not to take the tensors for leaves.
  return recorded != nullptr ? std::move(recorded) : AttachmentPtr(new SendAttachment(context, 0));
}

void DistAutogradService::arrive_answer(const WorkerInfo& from, Payload& result,
                                        std::string_view metadata, Proceed proceed) {
  const StatusOr<AutogradData> data = decode_autograd(metadata);
  if (!data.ok()) return proceed(data.status());
  if (data->message == 0 || find(data->context) == nullptr) {
    detach(&result.tensors);  // CTX-3
  } else {
    claim(data->context, key_of(from), data->message, &result.tensors);
  }
  proceed(absl::OkStatus());
}

// ---- Service -----------------------------------------------------------------------------------

void DistAutogradService::on_worker_gone(const WorkerInfo& info, const Status& why) {
  const WorkerKey gone = key_of(info);
  std::vector<ContextRef> orphans;
  {
    MutexLock lock(&mutex_);
    gone_.insert(gone.incarnation);
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
  for (const ContextRef& orphan : orphans) orphan->close();
}

void DistAutogradService::on_shutdown(const Status& why) {
  std::vector<ContextRef> all;
  std::unique_ptr<Timer> timer;  // its end waits for its callback
  {
    MutexLock lock(&mutex_);
    if (!closed_.ok()) return;
    timer = std::move(timer_);
    closed_ = why.ok() ? shut_down_error() : why;
    for (auto& [id, context] : std::exchange(contexts_, {})) all.push_back(std::move(context));
    again_.clear();
  }
  // This service is held by passes that it holds: here the cycle ends.
  for (const ContextRef& context : all) context->close();
}

void DistAutogradService::put_debug_info(std::map<std::string, int64_t>* out) const {
  ContextState::Counts sum;
  const std::vector<ContextRef> all = contexts();
  for (const ContextRef& context : all) {
    const ContextState::Counts counts = context->counts();
    sum.sends += counts.sends;
    sum.running += counts.running;
    sum.leaves += counts.leaves;
  }
  MutexLock lock(&mutex_);
  (*out)["num_autograd_contexts"] = static_cast<int64_t>(all.size());
  (*out)["num_current_backward_passes"] = sum.running;
  (*out)["autograd_sends"] = sum.sends;
  (*out)["autograd_leaves"] = sum.leaves;
  (*out)["autograd_releases"] = releases_;
  (*out)["autograd_stall_reports"] = stall_reports_;
  for (const char* kind :
       {"discover", "gradient", "close", "done", "abort", "release", "norm", "scale"}) {
    const auto at = sent_.find(kind);
    (*out)[absl::StrCat("autograd_", kind, "s_sent")] = at == sent_.end() ? 0 : at->second;
  }
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
